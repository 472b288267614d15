"""Bytes that a rank keeps during a training, measured and as `plan` computes them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megatron_cpu_rehearsal.flags import IMPL_FLAG, LOCAL, with_cpu_flags
from megatron_fsdp_v2.diagnostics import Role, group_summary
from megatron_fsdp_v2.diagnostics.walk import units_below
from megatron_fsdp_v2.dtensor.sharded_rows import local_of
from megatron_fsdp_v2.memory.host_memory import is_in_host_memory
from megatron_fsdp_v2.plan.optimizer_state import state_nbytes
from megatron_fsdp_v2.plan.run import run_training
from megatron_fsdp_v2_mcore.plan.source import describe_in_rehearsal, without_gpu_flags
from megatron_fsdp_v2_mcore.prove.rejection import reason_of

WEIGHTS, GRADIENTS, STATE = "weights", "gradients", "optimizer state"


def measured(chunks: Sequence[Any], optimizer: Any) -> Counter[str]:
    """Return the bytes of this rank before a step of the optimizer that is not its first one.

    Args:
        chunks: Sharded chunks of the model.
        optimizer: Their optimizer, which may be a chain of optimizers.
    """
    found = Counter[str]()
    for chunk in chunks:
        found[WEIGHTS] += group_summary(chunk).total("steady_nbytes")
        groups = [group for _, unit in units_below(chunk) for group in unit.groups]
        found[GRADIENTS] += sum(g.main_grad.nbytes for g in groups if g.main_grad is not None)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for param, state in part.optimizer.state.items():
            if not is_in_host_memory(local_of(param)):
                kept = [local_of(value) for name, value in state.items() if name != "step"]
                found[STATE] += sum(tensor.nbytes for tensor in kept)
    return found


def planned(flags: Sequence[str], num_ranks: int) -> tuple[dict[str, int], str]:
    """Return the bytes of the rank with most, or the reason why the flags cannot be planned.

    Runs in a process whose process group has only this rank.

    Args:
        flags: Flags of a sharded training, without those of the rehearsal.
        num_ranks: Number of ranks of the training.
    """
    found = Counter[str]()

    def plan() -> None:
        argv = with_cpu_flags([*without_gpu_flags(flags), IMPL_FLAG, LOCAL])
        source = describe_in_rehearsal(argv, flags)
        for stage in source.stages:
            run = run_training(stage, source.strategy)
            peaks = run.device_memory.role_peaks
            found[WEIGHTS] = max(found[WEIGHTS], peaks[Role.MAIN_WEIGHT] + peaks[Role.MODEL_WEIGHT])
            found[GRADIENTS] = max(found[GRADIENTS], peaks[Role.MAIN_GRAD])
            found[STATE] = max(found[STATE], state_nbytes(stage, run.groups)[0])

    with _without_process_group():
        reason = reason_of(plan, num_ranks)
    return dict(found), reason


@contextlib.contextmanager
def _without_process_group() -> Iterator[None]:
    """Destroy the process group of this rank, and create it again."""
    backend: str = dist.get_backend()
    if backend == dist.Backend.UNDEFINED:
        # A backend for each kind of device.
        backend = dist.get_backend_config()
    dist.destroy_process_group()
    try:
        yield
    finally:
        dist.init_process_group(backend, rank=0, world_size=1, store=HashStore())
