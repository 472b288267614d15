"""`make pretrain` without a process group: text, dataset, flags, and replays of a log."""

import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from examples.pretrain_text import __main__ as program
from examples.pretrain_text import dataset as datasets
from examples.pretrain_text import text as texts
from examples.pretrain_text.launch import RunFailedError, run
from examples.pretrain_text.report import describe
from examples.pretrain_text.settings import DDP, Settings, first_run_flags, second_run_flags
from examples.pretrain_text.text import Corpus, TextError, collect
from examples.pretrain_text.training_log import TrainingLog, compare_resumed
from tests.pictures import has_clear_ground

SAMPLE_LOG = Path(__file__).parent / "data" / "pretrain_sample.log"


def prose(nbytes: int) -> str:
    line = "All happy families are alike; each unhappy family is unhappy in its own way.\n"
    return (line * (nbytes // len(line) + 1))[:nbytes]


# -- text and dataset -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "content", "said"),
    [
        ("", None, "TEXT is empty.*leave TEXT out"),
        ("   ", None, "TEXT is empty.*leave TEXT out"),
        ("{}/nowhere", None, "nowhere does not exist"),
        ("{}", None, f"contains 0 bytes.*at least {texts.MIN_NBYTES} bytes"),
        ("{}/file", b"\xff\0" * 99_999, "contains 0 bytes"),
        ("{}/file", b"short", "contains 5 bytes"),
    ],
    ids=["empty", "blank", "nowhere", "an empty folder", "a binary file", "a short file"],
)
def test_text_that_cannot_be_used_is_rejected(tmp_path, given, content, said):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(TextError, match=said):
        collect(given.format(tmp_path))


def test_text_of_a_folder_is_limited_and_excludes_hidden_and_binary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "USER_MAX_NBYTES", 100_000)
    for name in ("a/c.txt", "b.txt", "d.txt", ".hidden/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n" + prose(45_000))
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0\xff" * 1000)
    corpus = collect(str(tmp_path))
    assert (corpus.num_files, corpus.num_skipped) == (2, 2)
    assert corpus == collect(str(tmp_path))


def test_without_text_the_standard_library_is_read_without_its_tests():
    corpus = collect(None)
    assert 4_000_000 < corpus.nbytes <= texts.STDLIB_MAX_NBYTES
    assert not any(b"class TestLongMessage(" in document for document in corpus.documents)
    assert any(b"class JSONEncoder" in document for document in corpus.documents)


@pytest.mark.mcore
def test_megatron_reads_a_dataset_that_is_written_once(tmp_path):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    documents = (b"first\n", "zweites: ä".encode(), bytes(range(256)))
    built = datasets.build(documents, tmp_path)
    assert built.num_tokens == sum(map(len, documents)) + 3
    read = indexed.IndexedDataset(str(built.prefix))
    for tokens, document in zip(read, documents, strict=True):
        np.testing.assert_array_equal(tokens, [*document, datasets.END_OF_DOCUMENT])
    np.testing.assert_array_equal(read.document_indices, [0, 1, 2, 3])
    again, other = datasets.build(documents, tmp_path), datasets.build([b"first"], tmp_path)
    assert (built.is_new, again.is_new, other.is_new) == (True, False, True)
    assert built.prefix == again.prefix != other.prefix


def test_failed_write_of_a_dataset_leaves_no_files(tmp_path, monkeypatch):
    def fail(documents: object, folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(datasets, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        datasets.build([b"one"], tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- settings and flags ---------------------------------------------------------------------------


def settings(tmp_path: Path, **changes: object) -> Settings:
    values = {"strategy": "optim_grads_params", "ranks": 2, "iters": 100, "on_cpu": True}
    return Settings(out=tmp_path, **(values | changes))


def make_dataset(tmp_path: Path) -> datasets.Dataset:
    return datasets.Dataset(tmp_path / "text_document", tmp_path / "index", 1000, True)


def test_second_run_resumes_half_way_and_stops_early(tmp_path):
    wanted, dataset = settings(tmp_path), make_dataset(tmp_path)
    first, second = first_run_flags(wanted, dataset), second_run_flags(wanted, dataset)
    assert {"--use-megatron-fsdp", "--use-fsdp-fully-shard-api", "--cpu-rehearsal"} <= set(first)
    assert "--load" not in first
    assert "--save" not in second
    for flags, name, value in (
        (first, "--data-parallel-sharding-strategy", "optim_grads_params"),
        (first, "--save-interval", "50"),
        (second, "--ckpt-step", "50"),
        (second, "--exit-interval", "70"),
        (second, "--load", first[first.index("--save") + 1]),
        (second, "--train-iters", first[first.index("--train-iters") + 1]),
    ):
        assert flags[flags.index(name) + 1] == value, name
    assert "--cpu-rehearsal" not in first_run_flags(settings(tmp_path, on_cpu=False), dataset)
    of_ddp = first_run_flags(settings(tmp_path, strategy=DDP), dataset)
    assert not any("fsdp" in flag for flag in of_ddp)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ranks 0", "RANKS=0"),
        ("--ranks 5", "RANKS=5 does not divide .*1, 2, 3, 4, 6 or 12"),
        ("--iters 7", "ITERS=7, but at least 8"),
        ("--ranks 4", "RANKS=4, but this machine has 2 GPUs"),
    ],
)
def test_invalid_numbers_are_rejected(tmp_path, words, said):
    args = program.build_parser().parse_args(["--out", str(tmp_path), *words.split()])
    with pytest.raises(ValueError, match=said):
        program.read_settings(args, num_gpus=2 if words == "--ranks 4" else 0)


# -- comparing and running ------------------------------------------------------------------------


FIRST = {5: "3.781659E+00", 6: "3.447801E+00", 7: "3.523259E+00"}


@pytest.mark.parametrize(
    ("resumed", "holds", "said"),
    [
        # The second line that a run prints is the mean of two losses.
        (FIRST | {6: "3.614730E+00"}, True, "losses 5 to 7"),
        (FIRST | {6: "3.614830E+00"}, False, "iteration 6: "),
        (FIRST | {7: "3.5"}, False, "iteration 7: 3.523259E+00 uninterrupted, 3.5 resumed"),
        ({5: FIRST[5]}, False, "2 of the losses 5 to 7 were not printed"),
    ],
    ids=["equal", "another mean", "another", "none"],
)
def test_resume_is_verified_by_equal_losses(resumed, holds, said):
    proof = compare_resumed(FIRST, resumed, range(5, 8))
    assert proof.holds is holds
    assert said in describe(proof)


@pytest.fixture
def replays(tmp_path, monkeypatch):
    """Run the program with a recorded log in place of each training: `replays(status, *words)`."""

    def run_it(status, *words):
        script = "import sys; print(open(sys.argv[1]).read()); sys.exit(int(sys.argv[2]))"
        replay = [sys.executable, "-c", script, str(SAMPLE_LOG), str(status)]
        monkeypatch.setattr(program, "collect", lambda text: Corpus("a test", (b"x" * 100,), 1, 0))
        monkeypatch.setattr(program.datasets, "build", lambda *_: make_dataset(tmp_path))
        monkeypatch.setattr(program, "training_command", lambda ranks, flags: replay)
        return program.main(["--out", str(tmp_path), *words])

    return run_it


def test_two_equal_runs_are_summarized_and_plotted(replays, tmp_path, capsys):
    assert replays(0, "--iters", "12") == 0
    printed = capsys.readouterr().out
    for said in ("iteration 12: loss", "first 5.9710, last", "tokens/s", "holds: losses 7 to 12"):
        assert said in printed
    assert str(tmp_path / "loss.png") in printed
    assert has_clear_ground(tmp_path / "loss.png")
    assert SAMPLE_LOG.read_text() in (tmp_path / "first_run.log").read_text()


def test_resumed_run_without_repeated_losses_fails(replays, capsys):
    assert replays(0, "--iters", "16") == 1
    assert "FAILED" in capsys.readouterr().out


def test_failing_run_and_invalid_text_print_the_reason(tmp_path, capsys, replays):
    assert program.main(["--text", str(tmp_path / "nowhere"), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pretrain: TEXT=") and error.count("\n") == 1
    assert replays(3) == 1
    error = capsys.readouterr().err
    assert SAMPLE_LOG.read_text().splitlines()[-1] in error
    assert "failed with status 3" in error and "first_run.log" in error


def _run(tmp_path, script):
    command = [sys.executable, "-c", script]
    return run(Console(file=io.StringIO()), "run", command, tmp_path / "run.log", range(1, 3))


def test_report_of_the_launcher_does_not_hide_the_reason(tmp_path):
    report = "E1121 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: 1)"
    script = f"print('the reason'); print({report!r}); print('x\\n' * 60); raise SystemExit(1)"
    with pytest.raises(RunFailedError) as failure:
        _run(tmp_path, script)
    assert failure.value.last_lines == ("the reason",)


def test_interruption_leaves_no_child_process(tmp_path, monkeypatch):
    def interrupt(log: TrainingLog, line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    pids: list[int] = []
    monkeypatch.setattr(TrainingLog, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
