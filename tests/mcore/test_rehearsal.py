"""The CPU rehearsal is explicit, changes devices only, and is undone."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_cpu_rehearsal
from megatron_cpu_rehearsal import RehearsalError
from megatron_cpu_rehearsal.cuda_stubs import STUBS, install_stubs
from megatron_cpu_rehearsal.devices import CpuDevices
from megatron_cpu_rehearsal.flags import (
    CPU_FLAGS,
    GPU_FLAGS,
    cpu_environment,
    with_cpu_defaults,
    with_cpu_flags,
)
from megatron_cpu_rehearsal.patching import Patches
from tests.mcore.session import LOCAL, enter_rehearsal
from tests.mcore.trained import on_megatron


def test_flags_a_cpu_needs_are_added_and_the_users_are_kept() -> None:
    given = ["--bf16", "--num-workers", "2", "--no-rope-fusion", *LOCAL]
    flags = with_cpu_flags(given)
    assert flags[: len(given)] == given
    assert flags.count("--no-rope-fusion") == 1
    assert flags.count("--num-workers") == 1
    for flag in CPU_FLAGS:
        assert flag.name in flags


@pytest.mark.parametrize(
    "flags",
    [
        ["--transformer-impl", "inference_optimized"],
        ["--distributed-backend=nccl"],
        ["--attention-backend", "flash"],
        *[[flag.name, *flag.values[:1]] for flag in GPU_FLAGS],
    ],
    ids=lambda flags: flags[0],
)
def test_a_flag_that_needs_a_gpu_is_rejected_by_name(flags: list[str]) -> None:
    flags = flags if "--transformer-impl" in flags else [*flags, *LOCAL]
    with pytest.raises(RehearsalError, match=f"{flags[0].split('=')[0]}.* cannot be used on a CPU"):
        with_cpu_flags(flags)


def test_a_value_that_needs_no_gpu_is_left_to_the_user() -> None:
    flags = ["--cuda-graph-impl", "none", "--moe-token-dispatcher-type", "allgather"]
    assert with_cpu_flags(flags)[:4] == flags


@on_megatron(1)
def test_every_flag_that_is_set_or_rejected_is_one_of_megatrons() -> None:
    enter_rehearsal()
    from megatron.training import arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    assert {flag.name for flag in (*CPU_FLAGS, *GPU_FLAGS)} <= options


def _parsed_with_defaults(flags: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What Megatron's parser makes of flags: with what a CPU needs as flags, and as defaults."""
    enter_rehearsal()
    from megatron.training import arguments

    plain = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    other = with_cpu_defaults(arguments.add_megatron_arguments, flags)
    parser = other(argparse.ArgumentParser(allow_abbrev=False))
    as_flags, as_defaults = plain.parse_args(with_cpu_flags(flags)), parser.parse_args(flags)
    return _comparable(as_flags), _comparable(as_defaults)


def _comparable(args: argparse.Namespace) -> dict[str, Any]:
    return {name: repr(value) for name, value in vars(args).items()}


@on_megatron(1)
def test_what_a_cpu_needs_is_the_same_as_flags_and_as_defaults_of_the_parser() -> None:
    flags = ["--bf16", "--num-workers", "2", "--attention-backend=unfused", *LOCAL]
    as_flags, as_defaults = _parsed_with_defaults(flags)
    assert as_defaults == as_flags
    assert as_defaults["num_workers"] == "2"
    assert as_defaults["distributed_backend"] == "'gloo'"
    with pytest.raises(RehearsalError, match="--profile cannot be used on a CPU"):
        _parsed_with_defaults(["--profile"])


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
def test_megatron_is_told_the_number_of_hardware_queues_it_insists_on(
    flags: list[str], connections: str | None
) -> None:
    assert cpu_environment(flags).get("CUDA_DEVICE_MAX_CONNECTIONS") == connections


def test_a_variable_the_user_has_set_is_kept_and_others_are_taken_back(
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


def test_without_gpu_and_rehearsal_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RehearsalError, match="Add --cpu-rehearsal"):
        megatron_cpu_rehearsal.check_device([])


@on_megatron(1)
def test_everything_a_rehearsal_changes_is_put_back() -> None:
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
    # The others are the same in the rehearsal that this rank is in already.
    assert {"all_to_all_single", "variable", "modes"} <= changed
    assert after == before


@on_megatron(2, is_async=[False, True])
def test_tensors_of_several_dtypes_are_gathered_in_one_call(is_async: bool) -> None:
    """As Megatron's distributed optimizer does with FP8 weights and those of bf16."""
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


def test_stubs_are_undone() -> None:
    before = {name: getattr(torch.cuda, name, None) for name in STUBS}
    patches = Patches()
    install_stubs(patches)
    assert torch.cuda.device_count() == 1
    patches.undo()
    assert {name: getattr(torch.cuda, name, None) for name in STUBS} == before


def test_cuda_devices_become_the_cpu_and_values_stay() -> None:
    with CpuDevices():
        made = torch.arange(4, device="cuda")
        by_ordinal = torch.zeros(2, device=0)
        moved = torch.ones(3).to("cuda", torch.bfloat16).cuda()
        meta = torch.empty(2, device="meta")
    assert made.device.type == by_ordinal.device.type == moved.device.type == "cpu"
    assert made.tolist() == [0, 1, 2, 3]
    assert moved.dtype == torch.bfloat16
    assert meta.is_meta
