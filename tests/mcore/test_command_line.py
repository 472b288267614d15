"""What a user types, and what he sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mcore.command_line import ROOT, run_module, torchrun
from tests.mcore.session import MODEL_FLAGS, fsdp

PRETRAIN = "megatron_fsdp_v2_mcore.pretrain_gpt"
RUN = "megatron_fsdp_v2_mcore.run"
CHECK = ["--log-per-param-norm"]
TWENTY = [*MODEL_FLAGS, "--train-iters", "20", "--cpu-rehearsal"]


STAND_IN = Path(__file__).parent / "pretrain_as_megatron_does.py"


@pytest.fixture(scope="module")
def printed_by_ddp() -> dict[int, float]:
    reference = torchrun(2, PRETRAIN, TWENTY)
    assert reference.code == 0, reference.output[-3000:]
    assert len(reference.losses) == 20
    return reference.losses


def test_printed_losses_of_20_iterations_equal_ddp(printed_by_ddp: dict[int, float]) -> None:
    # Other world sizes train in process, in test_parity_with_ddp.py: starting takes longer.
    ours = torchrun(2, PRETRAIN, [*TWENTY, *fsdp()])
    assert ours.code == 0, ours.output[-3000:]
    assert ours.losses == pytest.approx(printed_by_ddp, rel=1e-6)


@pytest.mark.parametrize("own_flags", [[], ["--by-provider"]], ids=["by-config", "by-provider"])
def test_run_trains_a_script_like_megatrons_as_pretrain_gpt_does(
    printed_by_ddp: dict[int, float], own_flags: list[str]
) -> None:
    script = str(STAND_IN.relative_to(ROOT))
    ours = torchrun(2, RUN, [script, *own_flags, *TWENTY, *fsdp("optim_grads_params", *CHECK)])
    assert ours.code == 0, ours.output[-3000:]
    assert ours.losses == pytest.approx(printed_by_ddp, rel=1e-6)
    assert f"script: {script} called as {script}" in ours.output
    # Only our wrapper does this: the run would look the same with Megatron's own.
    assert "norms of every parameter at iteration 20" in ours.output


def test_a_run_says_little_before_it_trains_and_ends_cleanly() -> None:
    run = torchrun(2, PRETRAIN, [*MODEL_FLAGS, "--train-iters", "2", "--cpu-rehearsal", *fsdp()])
    assert run.code == 0, run.output[-3000:]
    assert 0 < len(run.lines_before_training) <= 25, "\n".join(run.lines_before_training)
    for word in ("destroy_process_group", "Warning", "Traceback", "leaked"):
        assert word not in run.output


def test_leaving_at_an_interval_is_as_clean_as_finishing() -> None:
    flags = [*MODEL_FLAGS, "--train-iters", "9", "--exit-interval", "2", "--cpu-rehearsal"]
    run = torchrun(2, PRETRAIN, [*flags, *fsdp()])
    assert run.code == 0, run.output[-3000:]
    assert list(run.losses) == [1, 2]
    for word in ("destroy_process_group", "Warning", "Traceback", "leaked"):
        assert word not in run.output


def test_verbose_prints_what_megatron_prints() -> None:
    flags = [*MODEL_FLAGS, "--train-iters", "1", "--cpu-rehearsal", "--rehearsal-verbose"]
    run = torchrun(1, PRETRAIN, flags)
    assert run.code == 0, run.output[-3000:]
    assert "end of arguments" in run.output


SHOW = """
import json, sys
import megatron.core
from beside import NAME
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
print(json.dumps({"file": __file__, "argv": sys.argv, "beside": NAME}))
"""


def test_a_script_finds_itself_its_flags_and_what_lies_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "my scripts" / "gpt"
    folder.mkdir(parents=True)
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    (folder / "show.py").write_text(SHOW)
    script = str(folder / "show.py")
    run = run_module(RUN, [script, "--lr", "1e-3", "--cpu-rehearsal", "--some-flag", "a b"])
    assert run.code == 0, run.output[-3000:]
    seen = json.loads(run.output.strip().splitlines()[-1])
    assert (seen["file"], seen["beside"]) == (script, "beside")
    # --cpu-rehearsal is not Megatron's; what it stands for comes after the user's own flags.
    mine = ["--lr", "1e-3", "--some-flag", "a b"]
    assert seen["argv"][: len(mine) + 1] == [script, *mine]


def test_a_scripts_exit_code_is_that_of_run(tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text("import sys\nsys.exit(7)\n")
    assert run_module(RUN, [str(tmp_path / "leave.py"), "--cpu-rehearsal"]).code == 7


def test_a_script_that_comes_too_late_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import sys\n"
        "from megatron_fsdp_v2_mcore import install, uninstall\n"
        "from megatron.training.arguments import parse_and_validate_args\n"
        "uninstall()\n"
        "parse_and_validate_args()\n"
        "install()\n"
    )
    flags = [*MODEL_FLAGS, "--train-iters", "1", "--cpu-rehearsal"]
    run = run_module(RUN, [str(script), *flags])
    assert run.code == 1
    assert "Megatron has parsed its arguments already" in run.output


def test_run_without_a_script_says_how_it_is_used() -> None:
    run = run_module(RUN, ["--bf16"])
    assert run.code != 0
    assert run.output.startswith("usage:")
    missing = run_module(RUN, ["no_such_script.py"])
    assert "no script no_such_script.py" in missing.output


def test_without_gpu_and_rehearsal_the_start_ends_with_one_sentence() -> None:
    run = run_module(PRETRAIN, MODEL_FLAGS, CUDA_VISIBLE_DEVICES="")
    assert run.code == 2
    assert run.output.strip() == (
        "No GPU was found. Add --cpu-rehearsal to run the same training on this machine's CPU."
    )


def test_one_rank_speaks_for_all() -> None:
    run = torchrun(2, PRETRAIN, MODEL_FLAGS, CUDA_VISIBLE_DEVICES="")
    assert run.code != 0
    assert run.output.count("No GPU was found.") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--use-fsdp-fully-shard-api"], "needs --use-megatron-fsdp"),
        (fsdp("optim_grads_parameters"), "invalid choice: 'optim_grads_parameters'"),
        (fsdp("optim_grads_params", "--ckpt-format", "torch_dist"), "--ckpt-format torch_dist"),
        (fsdp("optim_grads_params", "--load", "no/such/folder"), "--load no/such/folder does not"),
        (["--transformer-impl", "transformer_engine"], "cannot be used on a CPU"),
        (fsdp("optim_grads_params", "--qk-clip"), "--qk-clip cannot be used with"),
        (["--log-per-param-norm"], "--log-per-param-norm needs --use-fsdp-fully-shard-api"),
        (
            fsdp("optim", "--num-experts", "3", "--expert-model-parallel-size", "2"),
            "--num-experts 3 cannot be divided by --expert-model-parallel-size 2",
        ),
    ],
    ids=[
        *("api-alone", "unknown-strategy", "ckpt-format", "load-nothing", "gpu-flag"),
        *("reads-internals", "norms-alone", "experts"),
    ],
)
def test_a_bad_command_line_ends_with_a_sentence(flags: list[str], message: str) -> None:
    run = run_module(PRETRAIN, [*MODEL_FLAGS, "--train-iters", "2", "--cpu-rehearsal", *flags])
    assert run.code == 2
    assert message in run.output
    assert "Traceback" not in run.output
