"""The parts of `make pretrain` that need no process group: text, dataset, flags, log, report."""

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
from examples.pretrain_text.progress import progress
from examples.pretrain_text.report import Results, describe, draw, folder_nbytes, show_summary
from examples.pretrain_text.settings import DDP, Settings, first_run_flags, second_run_flags
from examples.pretrain_text.text import Corpus, TextError, collect
from examples.pretrain_text.training_log import (
    Iteration,
    TrainingLog,
    compare_resumed,
    parse_iteration,
    parse_log,
)
from tests.processes import ran

SAMPLE_LOG = Path(__file__).parent / "data" / "pretrain_sample.log"


def prose(nbytes: int) -> str:
    line = "All happy families are alike; each unhappy family is unhappy in its own way.\n"
    return (line * (nbytes // len(line) + 1))[:nbytes]


def settings(tmp_path: Path, **changes: object) -> Settings:
    values = {"strategy": "optim_grads_params", "ranks": 2, "iters": 100, "on_cpu": True}
    return Settings(out=tmp_path, **(values | changes))


def value_of(flags: list[str], flag: str) -> str:
    return flags[flags.index(flag) + 1]


# ------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *((blank, r"TEXT is empty.*leave TEXT out") for blank in ("", "   ")),
        ("/nowhere/at/all", "TEXT=/nowhere/at/all does not exist"),
    ],
    ids=["empty", "blank", "nowhere"],
)
def test_empty_text_and_text_that_does_not_exist_are_rejected(given, said):
    with pytest.raises(TextError, match=said):
        collect(given)


@pytest.mark.parametrize("kind", ["empty file", "empty folder", "binary file", "short file"])
def test_text_without_enough_text_in_it_is_rejected_with_both_sizes(tmp_path, kind):
    place = tmp_path / "place"
    if kind == "empty folder":
        place.mkdir()
    else:
        content = {"empty file": b"", "binary file": b"\xff\0" * 99999, "short file": b"short"}
        place.write_bytes(content[kind])
    held = 5 if kind == "short file" else 0
    with pytest.raises(TextError, match=f"holds {held} bytes.*at least {texts.MIN_NBYTES} bytes"):
        collect(str(place))


def test_make_pretrain_reports_bad_text_in_one_sentence(tmp_path, capsys):
    status = program.main(["--text", str(tmp_path / "nowhere"), "--out", str(tmp_path)])
    assert status == 2
    error = capsys.readouterr().err
    assert error.startswith("pretrain: TEXT=") and error.count("\n") == 1


def test_one_file_is_cut_into_documents_that_are_the_file_again(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text(prose(100_000) + "é" * 5000 + "x" * 5000, encoding="utf-8")
    corpus = collect(str(book))
    assert len(corpus.documents) >= 200, "too few documents to be split 98:1:1"
    pieces = texts._cut(book.read_bytes(), 500)
    assert b"".join(pieces) == book.read_bytes()
    assert corpus.nbytes == book.stat().st_size
    assert all(corpus.documents)


def test_documents_end_at_lines_where_there_are_lines():
    cut = list(texts._cut(prose(10_000).encode(), 512))
    assert all(piece.endswith(b"\n") for piece in cut[:-1])
    assert max(map(len, cut)) <= 512


def test_a_folder_gives_its_text_files_in_a_fixed_order_without_hidden_or_binary_ones(tmp_path):
    for name in ("b.txt", "a/c.txt", ".hidden/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n" + prose(40_000))
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0\xff" * 1000)
    first, second = collect(str(tmp_path)), collect(str(tmp_path))
    assert first == second
    assert (first.num_files, first.num_skipped) == (2, 1)


def test_text_beyond_the_limit_is_left_out_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "USER_MAX_NBYTES", 100_000)
    for name in "abc":
        (tmp_path / name).write_text(prose(45_000))
    corpus = collect(str(tmp_path))
    assert (corpus.num_files, corpus.num_skipped) == (2, 1)
    assert corpus.nbytes <= 100_000


def test_without_text_the_standard_library_is_read_without_its_tests():
    corpus = collect(None)
    assert 4_000_000 < corpus.nbytes <= texts.STDLIB_MAX_NBYTES
    assert not any(b"class TestLongMessage(" in document for document in corpus.documents)
    assert any(b"class JSONEncoder" in document for document in corpus.documents)


# ---------------------------------------------------------------------------------------- dataset


@pytest.mark.mcore
def test_the_dataset_read_by_megatron_holds_the_bytes_and_ends_of_documents(tmp_path):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    documents = (b"first\n", "zweites: ä".encode(), bytes(range(256)))
    built = datasets.build(documents, tmp_path)
    assert built.is_new
    assert built.num_tokens == sum(map(len, documents)) + 3
    read = indexed.IndexedDataset(str(built.prefix))
    assert len(read) == 3
    for tokens, document in zip(read, documents, strict=True):
        np.testing.assert_array_equal(tokens, [*document, datasets.END_OF_DOCUMENT])
    np.testing.assert_array_equal(read.document_indices, [0, 1, 2, 3])


@pytest.mark.mcore
def test_the_dataset_is_found_again_for_the_same_text_and_written_for_another(tmp_path):
    pytest.importorskip("megatron.core")
    first = datasets.build([b"one", b"two"], tmp_path)
    again = datasets.build([b"one", b"two"], tmp_path)
    other = datasets.build([b"onet", b"wo"], tmp_path)
    assert (first.is_new, again.is_new, other.is_new) == (True, False, True)
    assert first.prefix == again.prefix != other.prefix


def test_a_dataset_that_could_not_be_written_is_not_found_later(tmp_path, monkeypatch):
    def fail(documents: object, folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(datasets, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        datasets.build([b"one"], tmp_path)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------- settings and flags


def make_dataset(tmp_path: Path) -> datasets.Dataset:
    return datasets.Dataset(tmp_path / "text_document", tmp_path / "index", 1000, True)


def test_the_first_run_types_flags_of_megatron_and_saves_half_way(tmp_path):
    flags = first_run_flags(settings(tmp_path), make_dataset(tmp_path))
    assert {"--use-megatron-fsdp", "--use-fsdp-fully-shard-api", "--bf16"} <= set(flags)
    assert value_of(flags, "--data-parallel-sharding-strategy") == "optim_grads_params"
    assert value_of(flags, "--ckpt-format") == "fsdp_dtensor"
    assert value_of(flags, "--save-interval") == "50"
    assert "--cpu-rehearsal" in flags
    assert "--load" not in flags


def test_on_gpus_the_rehearsal_is_not_asked_for(tmp_path):
    on_gpu = settings(tmp_path, on_cpu=False)
    assert "--cpu-rehearsal" not in first_run_flags(on_gpu, make_dataset(tmp_path))


def test_the_second_run_is_the_same_training_from_half_way_stopped_early(tmp_path):
    wanted, dataset = settings(tmp_path), make_dataset(tmp_path)
    first, second = first_run_flags(wanted, dataset), second_run_flags(wanted, dataset)
    assert value_of(second, "--load") == value_of(first, "--save")
    assert value_of(second, "--ckpt-step") == value_of(first, "--save-interval") == "50"
    assert value_of(second, "--exit-interval") == "90"
    assert value_of(second, "--train-iters") == value_of(first, "--train-iters")
    assert "--save" not in second


def test_the_ddp_peer_runs_without_any_flag_of_this_package(tmp_path):
    flags = first_run_flags(settings(tmp_path, strategy=DDP), make_dataset(tmp_path))
    assert not any("fsdp" in flag for flag in flags)


@pytest.mark.parametrize("iters", [8, 9, 40, 81, 301])
def test_a_resumed_run_is_never_empty_and_ends_within_the_first_one(tmp_path, iters):
    wanted = settings(tmp_path, iters=iters)
    assert wanted.half_way < wanted.resumed_until <= iters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "RANKS=0"),
        ({"ranks": 5}, "RANKS=5 does not divide .*1, 2, 3, 4, 6 or 12"),
        ({"iters": 7}, "ITERS=7, but at least 8"),
    ],
)
def test_numbers_that_make_no_run_are_rejected(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **changes)


def test_more_ranks_than_gpus_are_rejected(tmp_path):
    args = program.build_parser().parse_args(["--ranks", "4", "--out", str(tmp_path)])
    with pytest.raises(ValueError, match="RANKS=4, but this machine has 2 GPUs"):
        program.read_settings(args, num_gpus=2)


# -------------------------------------------------------------------------------------------- log


def test_the_recorded_log_is_read_completely():
    log = parse_log(SAMPLE_LOG.read_text(encoding="utf-8").splitlines())
    assert list(log.iterations) == list(range(1, 13))
    assert log.losses[1] == "5.971004E+00"
    assert log.iterations[12].total == 12
    assert set(log.evaluations) == {"validation", "test"}


def test_speed_is_that_of_the_median_iteration_after_warm_up():
    line = " iteration {:8d}/ 10 | elapsed time per iteration (ms): {} | lm loss: 1.0E+00 |"
    elapsed = [9000, 900, 800, 90, 100, 110]
    log = parse_log(line.format(n, ms) for n, ms in enumerate(elapsed, start=1))
    assert log.tokens_per_second(500) == pytest.approx(5000.0)


def test_an_iteration_is_read_out_of_the_middle_of_other_output():
    line = (
        "[rank1]: junk [2026-01-01 00:00:00.0] iteration        7/     300 |"
        " consumed samples: 84 | elapsed time per iteration (ms): 210.5 | learning rate: 1E-4 |"
        " global batch size:    12 | lm loss: 3.120000E+00 | loss scale: 1.0 | more"
    )
    iteration = parse_iteration(line)
    assert iteration is not None
    assert (iteration.number, iteration.total) == (7, 300)
    assert (iteration.loss, iteration.elapsed_ms) == ("3.120000E+00", 210.5)


@pytest.mark.parametrize("line", ["", "training ...", " iteration 3/ 9 | no loss here |"])
def test_other_lines_report_no_iteration(line):
    assert parse_iteration(line) is None


# ---------------------------------------------------------------------------------- resume proof


def test_equal_losses_prove_the_resume():
    first = {n: f"{n}.5E+00" for n in range(1, 11)}
    proof = compare_resumed(first, {n: first[n] for n in range(6, 11)}, range(6, 11))
    assert proof.holds
    assert "losses 6 to 10" in describe(proof)


@pytest.mark.parametrize(
    ("resumed", "said"),
    [
        ({5: "2.0", 6: "1.001"}, "iteration 6: 1.000 uninterrupted, 1.001 resumed"),
        ({5: "2.0"}, "1 of the losses 5 to 6 were not printed"),
    ],
    ids=["another", "none"],
)
def test_a_loss_that_is_another_or_none_fails_the_proof_and_is_shown(resumed, said):
    proof = compare_resumed({5: "2.0", 6: "1.000"}, resumed, range(5, 7))
    assert not proof.holds
    assert said in describe(proof)


@pytest.mark.parametrize(("second", "holds"), [("3.614730E+00", True), ("3.614830E+00", False)])
def test_the_second_line_of_a_run_is_compared_as_the_mean_that_megatron_prints(second, holds):
    first = {11: "3.781659E+00", 12: "3.447801E+00", 13: "3.523259E+00"}
    resumed = first | {12: second}
    assert compare_resumed(first, resumed, range(11, 14)).holds is holds


def test_only_the_second_line_may_be_a_mean():
    first = {11: "2.0E+00", 12: "4.0E+00", 13: "6.0E+00"}
    assert not compare_resumed(first, first | {13: "5.0E+00"}, range(11, 14)).holds


def test_no_losses_at_all_prove_nothing():
    assert not compare_resumed({}, {}, range(5, 5)).holds


# ------------------------------------------------------------------------------ running, reporting


def capture() -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    return Console(file=shown, width=80, highlight=False), shown


def replay(status: int = 0) -> list[str]:
    script = "import sys; sys.stdout.write(open(sys.argv[1]).read()); sys.exit(int(sys.argv[2]))"
    return [sys.executable, "-c", script, str(SAMPLE_LOG), str(status)]


def test_a_run_is_logged_whole_and_its_progress_shown(tmp_path):
    console, shown = capture()
    log = run(console, "first run", replay(), tmp_path / "first.log", range(1, 13))
    assert len(log.iterations) == 12
    assert SAMPLE_LOG.read_text() in (tmp_path / "first.log").read_text()
    assert "iteration 12: loss" in shown.getvalue()


def test_lines_tell_the_time_elapsed_and_an_estimate_of_the_rest():
    console, shown = capture()
    seconds = iter([0.0, 10.0, *(10.0 + 6 * n for n in range(1, 20))])
    with progress(console, "run", range(1, 101), lambda: next(seconds)) as show:
        for number in range(1, 11):
            show(Iteration(number, 100, "2.5", 9000.0))
    lines = shown.getvalue().splitlines()
    # The first iteration is slow, the others take 6 seconds each: ten of a hundred per line, and
    # one after half a minute of silence.
    assert lines[1:] == [
        "  iteration 1: loss 2.500, 9000 ms, 0:10 elapsed, about 14:51 left",
        "  iteration 6: loss 2.500, 9000 ms, 0:40 elapsed, about 9:24 left",
        "  iteration 10: loss 2.500, 9000 ms, 1:04 elapsed, about 9:00 left",
    ]


def test_lines_of_a_resumed_run_count_from_where_it_goes_on():
    console, shown = capture()
    seconds = iter([0.0, 5.0, 7.0])
    with progress(console, "run", range(151, 154), lambda: next(seconds)) as show:
        show(Iteration(151, 300, "2.5", 2000.0))
        show(Iteration(152, 300, "2.5", 2000.0))
    first, second = shown.getvalue().splitlines()[1:]
    assert first.endswith("iteration 151: loss 2.500, 2000 ms, 0:05 elapsed, about 0:04 left")
    assert second.endswith("0:07 elapsed, about 0:02 left")


def test_a_failing_run_gives_its_last_forty_lines_and_status(tmp_path):
    console, _ = capture()
    with pytest.raises(RunFailedError, match=r"first run failed with status 3") as failure:
        run(console, "first run", replay(status=3), tmp_path / "first.log", range(1, 13))
    lines = SAMPLE_LOG.read_text().splitlines()
    assert list(failure.value.last_lines) == lines[-40:]


def test_the_launchers_own_report_does_not_push_the_reason_out_of_sight(tmp_path):
    report = "E1121 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: 1)"
    script = f"print('the reason'); print({report!r}); print('x\\n' * 60); raise SystemExit(1)"
    console, _ = capture()
    with pytest.raises(RunFailedError) as failure:
        run(console, "run", [sys.executable, "-c", script], tmp_path / "run.log", range(1, 3))
    assert failure.value.last_lines == ("the reason",)


@pytest.fixture
def replays(tmp_path, monkeypatch):
    """The program with a recorded run in place of each of its runs: `replays(status, *words)`."""

    def run_it(status, *words):
        monkeypatch.setattr(program, "collect", lambda text: Corpus("a test", (b"x" * 100,), 1, 0))
        monkeypatch.setattr(program.datasets, "build", lambda *_: make_dataset(tmp_path))
        monkeypatch.setattr(program, "training_command", lambda ranks, flags: replay(status))
        return program.main(["--out", str(tmp_path), *words])

    return run_it


def test_a_failing_run_ends_the_program_with_its_log_on_standard_error(replays, capsys):
    assert replays(3) == 1
    error = capsys.readouterr().err
    assert SAMPLE_LOG.read_text().splitlines()[-1] in error
    assert "failed with status 3" in error and "first_run.log" in error


def test_a_resumed_run_that_repeats_nothing_fails_the_program(replays, capsys):
    assert replays(0, "--iters", "12") == 0
    assert "holds: losses 7 to 12" in capsys.readouterr().out
    assert replays(0, "--iters", "16") == 1
    assert "FAILED" in capsys.readouterr().out


def test_an_interruption_leaves_no_child_behind(tmp_path, monkeypatch):
    def interrupt(log: TrainingLog, line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    pids: list[int] = []
    monkeypatch.setattr(TrainingLog, "read", interrupt)
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    console, _ = capture()
    with pytest.raises(KeyboardInterrupt):
        run(console, "run", [sys.executable, "-c", script], tmp_path / "run.log", range(1, 3))
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_the_summary_names_losses_speed_checkpoint_proof_and_picture(tmp_path):
    wanted = settings(tmp_path, iters=12)
    wanted.half_way_checkpoint.mkdir(parents=True)
    (wanted.half_way_checkpoint / "shard").write_bytes(bytes(2_500_000))
    log = parse_log(SAMPLE_LOG.read_text().splitlines())
    proof = compare_resumed(log.losses, log.losses, range(7, 13))
    console, shown = capture()
    show_summary(console, Results(wanted, log, log, proof, tmp_path / "loss.png"))
    summary = shown.getvalue()
    assert "first 5.9710, last" in summary
    assert "tokens/s" in summary
    assert f"{wanted.half_way_checkpoint} (2.5 MB)" in summary
    assert "holds: losses 7 to 12" in summary
    assert str(tmp_path / "loss.png") in summary


def test_the_loss_curves_are_drawn_without_a_display(tmp_path):
    picture = tmp_path / "loss.png"
    losses = {n: f"{5 / n:.6E}" for n in range(1, 20)}
    draw(settings(tmp_path), losses, {n: losses[n] for n in range(10, 15)}, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_folder_size_counts_files_at_every_depth(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "x").write_bytes(bytes(3))
    (tmp_path / "a" / "b" / "y").write_bytes(bytes(4))
    assert folder_nbytes(tmp_path) == 7


def test_help_lists_every_option_that_make_passes_on():
    done = ran(sys.executable, "-m", "examples.pretrain_text", "--help")
    for option in ("--strategy", "--ranks", "--iters", "--text", "--out"):
        assert option in done.stdout
