"""Commands of a user, and their output."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from megatron_fsdp_v2_mcore.launch import launch
from megatron_fsdp_v2_mcore.run import main as run_script
from tests.cases import longer
from tests.mcore.command_line import (
    PRETRAIN,
    PRINTED,
    ROOT,
    RUN,
    printed_losses,
    run_each,
    run_module,
    torchrun,
)
from tests.mcore.flags import MODEL_FLAGS, fsdp, words
from tests.mcore.trained import trained
from tests.ranks import RankPools, free_port

STEPS = "--train-iters 21"
LONGER = words(MODEL_FLAGS, STEPS)
UNCLEAN = ("destroy_process_group", "Warning", "Traceback", "leaked")

SCRIPT_STUB = Path(__file__).parent / "pretrain_as_megatron_does.py"


def _of_ddp(megatron: RankPools, num_ranks: int) -> dict[int, float]:
    """Return printed losses of 20 iterations under Megatron's own DDP, trained on a rank pool."""
    return printed_losses(trained(megatron, num_ranks, STEPS, once=True).losses[:20])


@pytest.mark.functional
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_command_prints_the_losses_of_ddp_and_few_other_lines(
    megatron: RankPools, num_ranks: int
) -> None:
    """The run exits after 20 of 21 iterations; one rank is started without torchrun."""
    flags = [*LONGER, *fsdp(), "--exit-interval", "20", "--cpu-rehearsal"]
    if num_ranks == 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        run = run_module(PRETRAIN, flags, **address)
    else:
        run = torchrun(num_ranks, PRETRAIN, flags)
    assert run.code == 0, run.output[-3000:]
    assert list(run.losses) == list(range(1, 21))
    assert run.losses == pytest.approx(_of_ddp(megatron, num_ranks), rel=1e-6 + PRINTED)
    lines = run.lines_before_training
    assert 0 < len(lines) <= 25, "\n".join(lines)
    for word in UNCLEAN:
        assert word not in run.output


@pytest.mark.functional
def test_command_without_our_flags_trains_and_prints_as_megatron_does(megatron: RankPools) -> None:
    flags = words(LONGER, "--exit-interval 20 --cpu-rehearsal --rehearsal-verbose")
    run = torchrun(2, PRETRAIN, flags)
    assert run.code == 0, run.output[-3000:]
    assert "end of arguments" in run.output
    assert run.losses == pytest.approx(_of_ddp(megatron, 2), rel=PRINTED)


@pytest.mark.parametrize(
    "own_flags", [longer([], id="by-config"), longer(["--by-provider"], id="by-provider")]
)
def test_run_with_a_script_like_megatrons_matches_ddp(
    megatron: RankPools, own_flags: list[str]
) -> None:
    script = str(SCRIPT_STUB.relative_to(ROOT))
    flags = words(LONGER, fsdp(), "--log-per-param-norm --cpu-rehearsal")
    ours = torchrun(2, RUN, [script, *own_flags, *flags])
    assert ours.code == 0, ours.output[-3000:]
    losses, expected = ours.losses, _of_ddp(megatron, 2)
    # This run trains all 21 iterations.
    assert max(losses) == 21
    assert {i: losses[i] for i in expected} == pytest.approx(expected, rel=1e-6 + PRINTED)
    assert f"script: {script} called as {script}" in ours.output
    # Only our wrapper logs these norms: losses would be the same with Megatron's own wrapper.
    assert "norms of every parameter at iteration 20" in ours.output
    for word in UNCLEAN:
        assert word not in ours.output


SHOW = """
import json, sys
import megatron.core
from beside import NAME
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
print(json.dumps({"file": __file__, "argv": sys.argv, "beside": NAME}))
sys.exit(7)
"""


@pytest.mark.slow
def test_run_preserves_path_flags_and_exit_code_of_a_script(tmp_path: Path) -> None:
    folder = tmp_path / "my scripts" / "gpt"
    folder.mkdir(parents=True)
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    (folder / "show.py").write_text(SHOW)
    script = str(folder / "show.py")
    flags = ["--lr", "1e-3", "--cpu-rehearsal", "--some-flag", "a b"]
    (run,) = run_each(RUN, [[script, *flags]])
    assert run.code == 7, run.output[-3000:]
    seen = json.loads(run.output.strip().splitlines()[-1])
    assert (seen["file"], seen["beside"]) == (script, "beside")
    # `run` removes --cpu-rehearsal and adds no CPU flags, which a strict parser would reject.
    assert seen["argv"] == [script, "--lr", "1e-3", "--some-flag", "a b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bf16"], "^usage: "),
        ([], "^usage: "),
        (["no_such_script.py"], r"^There is no script no_such_script\.py"),
    ],
)
def test_run_without_a_script_prints_its_usage(
    monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", *words])
    with pytest.raises(SystemExit, match=message):
        run_script()


def test_typos_and_a_start_without_torchrun_print_one_sentence() -> None:
    said = {
        "--num-layerz 2": "unrecognized arguments: --num-layerz 2; did you mean --num-layers?",
        "--optimizer adm": "argument --optimizer: invalid choice: 'adm' (choose from ",
        "--lr-decay-style cosin": "did you mean cosine?",
        "": "pretrain_gpt is started by torchrun, on one rank too: torchrun --nproc-per-node 1 ",
    }
    lines = [words(MODEL_FLAGS, fsdp(), f"--cpu-rehearsal {typo}") for typo in said]
    for run, message in zip(run_each(PRETRAIN, lines), said.values(), strict=True):
        assert run.code == 2, run.output[-3000:]
        # Before the launcher is checked, Megatron prints the sizes of the parallel groups.
        *before, last = run.output.splitlines()
        assert message in last
        assert not before or ("torchrun" in last and "world size" in before[0]), run.output
        assert len(before) <= 3, run.output


def test_start_without_gpu_and_rehearsal_prints_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as leaving, launch(MODEL_FLAGS):
        pytest.fail("a training starts")
    assert leaving.value.code == 2
    assert capsys.readouterr().err.strip() == (
        "No GPU was found. Add --cpu-rehearsal to run the same training on this machine's CPU."
    )


@pytest.mark.functional
def test_only_one_rank_prints_that_no_gpu_was_found() -> None:
    run = torchrun(2, PRETRAIN, MODEL_FLAGS, CUDA_VISIBLE_DEVICES="")
    assert run.code != 0
    assert run.output.count("No GPU was found.") == 1
