"""What a user types, and what he sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mcore.command_line import run_module, torchrun
from tests.mcore.session import MODEL_FLAGS, fsdp

PRETRAIN = "megatron_fsdp_v2_mcore.pretrain_gpt"
TWENTY = [*MODEL_FLAGS, "--train-iters", "20", "--cpu-rehearsal"]


def test_printed_losses_of_20_iterations_equal_ddp() -> None:
    # Other world sizes train in process, in test_parity_with_ddp.py: starting takes longer.
    reference = torchrun(2, PRETRAIN, TWENTY)
    ours = torchrun(2, PRETRAIN, [*TWENTY, *fsdp()])
    assert reference.code == ours.code == 0, ours.output[-3000:]
    assert len(reference.losses) == 20
    assert ours.losses.keys() == reference.losses.keys()
    for iteration, loss in reference.losses.items():
        assert ours.losses[iteration] == pytest.approx(loss, rel=1e-6)


def test_a_run_says_little_before_it_trains_and_ends_cleanly() -> None:
    run = torchrun(2, PRETRAIN, [*MODEL_FLAGS, "--train-iters", "2", "--cpu-rehearsal", *fsdp()])
    assert run.code == 0, run.output[-3000:]
    assert 0 < len(run.lines_before_training) <= 25, "\n".join(run.lines_before_training)
    for word in ("destroy_process_group", "Warning", "Traceback", "leaked"):
        assert word not in run.output


def test_leaving_at_an_interval_is_as_clean_as_finishing() -> None:
    flags = [*MODEL_FLAGS, "--train-iters", "9", "--exit-interval", "2", "--cpu-rehearsal"]
    run = torchrun(2, PRETRAIN, flags)
    assert run.code == 0, run.output[-3000:]
    assert list(run.losses) == [1, 2]
    for word in ("destroy_process_group", "Warning", "Traceback", "leaked"):
        assert word not in run.output


def test_verbose_prints_what_megatron_prints() -> None:
    flags = [*MODEL_FLAGS, "--train-iters", "1", "--cpu-rehearsal", "--rehearsal-verbose"]
    run = torchrun(1, PRETRAIN, flags)
    assert run.code == 0, run.output[-3000:]
    assert "end of arguments" in run.output


def test_run_trains_a_script_of_ones_own(tmp_path: Path) -> None:
    script = tmp_path / "my_pretrain.py"
    script.write_text(
        "from megatron.training import pretrain\n"
        "from megatron.training.argument_utils import pretrain_cfg_container_from_args\n"
        "from megatron.training.arguments import parse_and_validate_args\n"
        "from megatron.core.enums import ModelType\n"
        "from my_parts import build_datasets, build_model, forward_step\n"
        "if __name__ == '__main__':\n"
        "    args = parse_and_validate_args()\n"
        "    pretrain(pretrain_cfg_container_from_args(args), build_datasets,\n"
        "             ModelType.encoder_or_decoder, forward_step, model_provider=build_model)\n"
    )
    (tmp_path / "my_parts.py").write_text(
        "from megatron_fsdp_v2_mcore.pretrain_gpt.gpt import *\n"
        "from megatron_fsdp_v2_mcore.pretrain_gpt.gpt import (\n"
        "    build_datasets, build_model, forward_step)\n"
    )
    flags = [*MODEL_FLAGS, "--train-iters", "2", "--cpu-rehearsal", *fsdp()]
    run = torchrun(2, "megatron_fsdp_v2_mcore.run", [str(script), *flags])
    assert run.code == 0, run.output[-3000:]
    assert len(run.losses) == 2


def test_run_without_a_script_says_how_it_is_used() -> None:
    run = run_module("megatron_fsdp_v2_mcore.run", ["--bf16"])
    assert run.code != 0
    assert run.output.startswith("usage:")
    missing = run_module("megatron_fsdp_v2_mcore.run", ["no_such_script.py"])
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
    ],
    ids=["api-alone", "unknown-strategy", "ckpt-format", "load-nothing", "gpu-flag"],
)
def test_a_bad_command_line_ends_with_a_sentence(flags: list[str], message: str) -> None:
    run = run_module(PRETRAIN, [*MODEL_FLAGS, "--train-iters", "2", "--cpu-rehearsal", *flags])
    assert run.code == 2
    assert message in run.output
    assert "Traceback" not in run.output
