"""Commands of a user, and their output."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_fsdp_v2_mcore.run import main as run_script
from tests.cases import longer
from tests.mcore.command_line import (
    PRETRAIN,
    PRINTED,
    ROOT,
    RUN,
    Run,
    printed_losses,
    run_module,
    torchrun,
)
from tests.mcore.flags import MODEL_FLAGS, fsdp, words
from tests.mcore.trained import trained
from tests.ranks import RankPools

STEPS = "--train-iters 21"
LONGER = words(MODEL_FLAGS, STEPS)
UNCLEAN = ("destroy_process_group", "Warning", "Traceback", "leaked")

SCRIPT_STUB = Path(__file__).parent / "pretrain_as_megatron_does.py"


@pytest.fixture(scope="module")
def losses_of_ddp(megatron: RankPools) -> dict[int, float]:
    """Printed losses of 20 iterations under Megatron's own DDP, which trains on a rank pool."""
    return printed_losses(trained(megatron, 2, STEPS).losses[:20])


@pytest.fixture(scope="module")
def sharded_run() -> Run:
    """A sharded run from the command line, which exits after 20 of 21 iterations."""
    run = torchrun(2, PRETRAIN, [*LONGER, *fsdp(), "--exit-interval", "20", "--cpu-rehearsal"])
    assert run.code == 0, run.output[-3000:]
    return run


def test_printed_losses_of_20_iterations_equal_ddp(
    sharded_run: Run, losses_of_ddp: dict[int, float]
) -> None:
    # The functional matrix trains at other world sizes on rank pools: starting torchrun is slower.
    assert list(sharded_run.losses) == list(range(1, 21))
    assert sharded_run.losses == pytest.approx(losses_of_ddp, rel=1e-6 + PRINTED)


def test_run_prints_few_lines_before_training(sharded_run: Run) -> None:
    lines = sharded_run.lines_before_training
    assert 0 < len(lines) <= 25, "\n".join(lines)


def test_run_with_an_exit_interval_ends_cleanly(sharded_run: Run) -> None:
    assert max(sharded_run.losses) == 20
    for word in UNCLEAN:
        assert word not in sharded_run.output


@pytest.mark.functional
def test_command_without_our_flags_trains_megatrons_ddp(
    losses_of_ddp: dict[int, float],
) -> None:
    run = torchrun(2, PRETRAIN, [*LONGER, "--cpu-rehearsal"])
    assert run.code == 0, run.output[-3000:]
    assert len(run.losses) == 21
    printed = {iteration: run.losses[iteration] for iteration in losses_of_ddp}
    assert printed == pytest.approx(losses_of_ddp, rel=PRINTED)


@pytest.mark.parametrize(
    "own_flags", [longer([], id="by-config"), longer(["--by-provider"], id="by-provider")]
)
def test_run_with_a_script_like_megatrons_matches_pretrain_gpt(
    sharded_run: Run, own_flags: list[str]
) -> None:
    script = str(SCRIPT_STUB.relative_to(ROOT))
    flags = words(LONGER, fsdp(), "--log-per-param-norm --cpu-rehearsal")
    ours = torchrun(2, RUN, [script, *own_flags, *flags])
    assert ours.code == 0, ours.output[-3000:]
    # This run trains all 21 iterations.
    assert max(ours.losses) == 21
    assert {i: ours.losses[i] for i in sharded_run.losses} == pytest.approx(
        sharded_run.losses, rel=1e-6
    )
    assert f"script: {script} called as {script}" in ours.output
    # Only our wrapper logs these norms: losses would be the same with Megatron's own wrapper.
    assert "norms of every parameter at iteration 20" in ours.output
    for word in UNCLEAN:
        assert word not in ours.output


@pytest.mark.functional
def test_verbose_flag_prints_megatrons_output() -> None:
    flags = words(MODEL_FLAGS, "--train-iters 1 --cpu-rehearsal --rehearsal-verbose")
    run = torchrun(1, PRETRAIN, flags)
    assert run.code == 0, run.output[-3000:]
    assert "end of arguments" in run.output


SHOW = """
import json, sys
import megatron.core
from beside import NAME
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
print(json.dumps({"file": __file__, "argv": sys.argv, "beside": NAME}))
sys.exit(7)
"""


def test_run_preserves_path_flags_and_exit_code_of_a_script(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "my scripts" / "gpt"
    folder.mkdir(parents=True)
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    (folder / "show.py").write_text(SHOW)
    script = str(folder / "show.py")
    run = run_module(RUN, [script, "--lr", "1e-3", "--cpu-rehearsal", "--some-flag", "a b"])
    assert run.code == 7, run.output[-3000:]
    seen = json.loads(run.output.strip().splitlines()[-1])
    assert (seen["file"], seen["beside"]) == (script, "beside")
    # `run` removes --cpu-rehearsal and adds no CPU flags, which a strict parser would reject.
    assert seen["argv"] == [script, "--lr", "1e-3", "--some-flag", "a b"]


@pytest.mark.functional
def test_install_after_a_script_parsed_its_arguments_is_rejected(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import sys\n"
        "from megatron_fsdp_v2_mcore import install, uninstall\n"
        "from megatron.training.arguments import parse_and_validate_args\n"
        "uninstall()\n"
        "parse_and_validate_args()\n"
        "install()\n"
    )
    run = run_module(RUN, words(str(script), MODEL_FLAGS, "--train-iters 1 --cpu-rehearsal"))
    assert run.code == 1
    assert "Megatron has parsed its arguments already" in run.output


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


def test_start_without_gpu_and_rehearsal_prints_one_sentence() -> None:
    run = run_module(PRETRAIN, MODEL_FLAGS, CUDA_VISIBLE_DEVICES="")
    assert run.code == 2
    assert run.output.strip() == (
        "No GPU was found. Add --cpu-rehearsal to run the same training on this machine's CPU."
    )


@pytest.mark.functional
def test_only_one_rank_prints_that_no_gpu_was_found() -> None:
    run = torchrun(2, PRETRAIN, MODEL_FLAGS, CUDA_VISIBLE_DEVICES="")
    assert run.code != 0
    assert run.output.count("No GPU was found.") == 1
