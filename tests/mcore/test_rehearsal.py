"""The CPU rehearsal is explicit, changes only devices, is reversible, and runs by itself."""

from __future__ import annotations

import argparse
import logging
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_cpu_rehearsal
from megatron_cpu_rehearsal import RehearsalError
from megatron_cpu_rehearsal.devices import CpuDevices
from megatron_cpu_rehearsal.flags import (
    CPU_FLAGS,
    GPU_FLAGS,
    cpu_environment,
    with_cpu_defaults,
    with_cpu_flags,
)
from megatron_fsdp_v2_patching import Patches
from tests.docs.blocks import ROOT, blocks_in
from tests.mcore.command_line import (
    PRINTED,
    environment_of,
    launcher,
    printed_losses,
    run_each,
    torchrun,
)
from tests.mcore.flags import LOCAL, MODEL_FLAGS
from tests.mcore.session import enter_rehearsal
from tests.mcore.trained import on_megatron, trained
from tests.processes import ran
from tests.ranks import RankPools


def test_cpu_flags_are_added_and_user_flags_are_kept() -> None:
    given = ["--bf16", "--num-workers", "2", "--no-rope-fusion", *LOCAL]
    # Values of flags that need no GPU.
    given += ["--cuda-graph-impl", "none", "--moe-token-dispatcher-type", "allgather"]
    flags = with_cpu_flags(given)
    assert flags[: len(given)] == given
    assert flags.count("--no-rope-fusion") == flags.count("--num-workers") == 1
    assert {flag.name for flag in CPU_FLAGS} <= set(flags)


def _parser(add_arguments: Any) -> argparse.ArgumentParser:
    return add_arguments(argparse.ArgumentParser(allow_abbrev=False))


@on_megatron(1)
def test_cpu_flags_are_those_of_megatrons_parser_and_equal_its_cpu_defaults() -> None:
    enter_rehearsal()
    from megatron.training.arguments import add_megatron_arguments as theirs

    flags = ["--bf16", "--num-workers", "2", "--attention-backend=unfused", *LOCAL]
    plain = _parser(theirs)
    as_flags = vars(plain.parse_args(with_cpu_flags(flags)))
    as_defaults = vars(_parser(with_cpu_defaults(theirs, flags)).parse_args(flags))
    assert sorted(map(repr, as_defaults.items())) == sorted(map(repr, as_flags.items()))
    assert (as_defaults["num_workers"], as_defaults["distributed_backend"]) == (2, "gloo")
    with pytest.raises(RehearsalError, match="--profile cannot be used on a CPU"):
        _parser(with_cpu_defaults(theirs, ["--profile"]))
    options = {option for action in plain._actions for option in action.option_strings}
    assert {flag.name for flag in (*CPU_FLAGS, *GPU_FLAGS)} <= options


@pytest.mark.parametrize(
    ("flags", "connections"),
    [
        ([], None),
        (["--tensor-model-parallel-size", "1"], None),
        (["--tensor-model-parallel-size", "2"], "1"),
        (["--context-parallel-size=2"], "1"),
        (["--tensor-model-parallel-size", "2", "--use-megatron-fsdp"], None),
    ],
)
def test_required_number_of_hardware_queues_is_set(
    flags: list[str], connections: str | None
) -> None:
    assert cpu_environment(flags).get("CUDA_DEVICE_MAX_CONNECTIONS") == connections


def test_user_variables_are_kept_and_added_variables_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINE", "kept")
    patches = Patches()
    patches.default_environment({"MINE": "replaced", "REHEARSAL_TEST": "1"})
    assert (os.environ["MINE"], os.environ["REHEARSAL_TEST"]) == ("kept", "1")
    patches.undo()
    assert os.environ["MINE"] == "kept"
    assert "REHEARSAL_TEST" not in os.environ


def test_a_rehearsal_is_rejected_where_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RehearsalError, match="never runs where CUDA is in use"):
        megatron_cpu_rehearsal.check_device(["--cpu-rehearsal"])
    megatron_cpu_rehearsal.check_device([])


@on_megatron(1)
def test_rehearsal_restores_everything_it_changes() -> None:
    enter_rehearsal()
    from megatron.training import arguments, initialize

    def state() -> dict[str, object]:
        return {
            "all_to_all_single": torch.distributed.all_to_all_single,
            "is_available": torch.cuda.is_available,
            "arguments": arguments._print_args,
            "warm-up": initialize._warmup_jit_function,
            "warnings": list(warnings.filters),
            "level": logging.getLogger("megatron").level,
            "variable": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
            "modes": torch._C._len_torch_function_stack(),
        }

    before = state()
    with megatron_cpu_rehearsal.rehearse(["--tensor-model-parallel-size", "2"]):
        within = state()
    after = state()
    changed = {name for name, value in within.items() if value != before[name]}
    # Other values do not change: this rank is already in a rehearsal.
    assert {"all_to_all_single", "variable", "modes"} <= changed
    assert after == before


@on_megatron(2, is_async=[False, True])
def test_tensors_of_several_dtypes_are_gathered_in_one_call(is_async: bool) -> None:
    """Megatron's distributed optimizer gathers FP8 and bf16 weights in one call."""
    enter_rehearsal()
    rank = dist.get_rank()
    wholes = [torch.arange(200, 216, dtype=torch.uint8), torch.arange(8).bfloat16() / 3]
    buffers = [torch.zeros_like(whole) for whole in wholes]
    with dist._coalescing_manager(async_ops=is_async) as work:
        for buffer, whole in zip(buffers, wholes, strict=True):
            mine = buffer.chunk(2)[rank].copy_(whole.chunk(2)[rank])
            dist.all_gather_into_tensor(buffer, mine, async_op=is_async)
    if is_async:
        work.wait()
    assert all(torch.equal(*pair) for pair in zip(buffers, wholes, strict=True))


def test_cuda_devices_become_the_cpu_with_the_same_values() -> None:
    with CpuDevices():
        made = torch.arange(4, device="cuda")
        by_ordinal = torch.zeros(2, device=0)
        moved = torch.ones(3).to("cuda", torch.bfloat16).cuda()
        meta = torch.empty(2, device="meta")
    assert made.device.type == by_ordinal.device.type == moved.device.type == "cpu"
    assert made.tolist() == [0, 1, 2, 3]
    assert moved.dtype == torch.bfloat16
    assert meta.is_meta


PAGE = ROOT / "adapters" / "megatron_cpu_rehearsal" / "README.md"
REHEARSAL = "megatron_cpu_rehearsal"
SCRIPT = str(ROOT / "tests" / "mcore" / "pretrain_as_megatron_does.py")
# Python cannot import a module that is None.
ALONE = "import sys\nsys.modules.update(megatron_fsdp_v2=None, megatron_fsdp_v2_mcore=None)\n"


def _losses_of_the_page(num_ranks: int, path: Path) -> list[float]:
    variables = environment_of(PYTHONPATH=str(ROOT / "adapters"))
    done = ran(*launcher(num_ranks), path, cwd=path.parent, env=variables, timeout=240)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"iteration (\d): loss ([\d.]+)", done.stdout)
    assert [number for number, _ in losses] == list("12345")
    return [float(loss) for _, loss in losses]


@pytest.mark.functional
def test_program_of_the_page_trains(tmp_path: Path) -> None:
    (program,) = [b for b in blocks_in(PAGE.name, PAGE.read_text()) if b.language == "python"]
    path = tmp_path / "train.py"
    path.write_text(ALONE + program.code)
    on_two, on_one = _losses_of_the_page(2, path), _losses_of_the_page(1, path)
    # Both runs train on the same eight sequences in an iteration.
    assert on_two == pytest.approx(on_one, abs=5e-6)
    assert on_two[-1] < on_two[0] - 0.1


@pytest.mark.functional
def test_script_like_megatrons_matches_the_adapter(megatron: RankPools, tmp_path: Path) -> None:
    assert REHEARSAL in PAGE.read_text(), "README.md says how the script is started"
    script = tmp_path / "script.py"
    script.write_text(f"{ALONE}import runpy\nrunpy.run_path({SCRIPT!r}, run_name='__main__')\n")
    run = torchrun(2, REHEARSAL, [str(script), *MODEL_FLAGS, "--train-iters", "4"])
    assert run.code == 0, run.output
    losses = printed_losses(trained(megatron, 2, "--train-iters 4").losses)
    assert run.losses == pytest.approx(losses, rel=1e-6 + PRINTED)


@pytest.mark.slow
def test_flag_that_needs_a_gpu_prints_one_sentence() -> None:
    command_lines = [[SCRIPT, *MODEL_FLAGS, "--profile"], ["--profile"], ["no_such_script.py"]]
    rejected, unnamed, missing = run_each(REHEARSAL, command_lines)
    assert rejected.code == 2
    said = "--profile cannot be used on a CPU: it records CUDA activity; leave it out"
    assert rejected.output.splitlines()[-1] == said
    assert unnamed.code == missing.code == 1
