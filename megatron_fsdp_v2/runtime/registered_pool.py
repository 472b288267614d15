"""Have the traced pool of a model in memory that NCCL knows."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.comm.backends import registrar_for
from megatron_fsdp_v2.comm.interface import Registrar
from megatron_fsdp_v2.memory.registered_memory import RegisteredMemory
from megatron_fsdp_v2.runtime.fsdp_module import FSDPModule, named_units

__all__ = ["register_pool"]


def register_pool(model: nn.Module, registrar: Registrar | None = None) -> bool:
    """Register the memory of a model's traced pool with the process groups of its units.

    It happens on each rank alone, when a plan is given its block of memory, and once for each
    block: addresses stay the same from then on. What a plan is replaced by is registered in its
    place. Call `registered_memory.deregister_all()` before process groups are destroyed.

    Args:
        model: The root, sharded with `enable_trace_pool=True`.
        registrar: Allocates and registers; that of the units' device when None.

    Returns:
        Whether there is anything to register with: not on a CPU, nor on one rank.

    Raises:
        RuntimeError: The model has no trace pool.
        ValueError: It is not sharded.
    """
    if not isinstance(model, FSDPModule):
        raise ValueError(f"{type(model).__name__} is not sharded; call fully_shard on it first")
    pool = model.trace_pool()
    groups: dict[str, dist.ProcessGroup] = {}
    for _, unit in named_units(model):
        for group in unit.groups:
            registrar = registrar or registrar_for(group.device)
            for axis in group.axes:
                for one in (axis.group, axis.for_gathers().group) if axis.size > 1 else ():
                    groups.setdefault(one.group_name, one)
    if registrar is None or not groups:
        return False
    pool.place_in(RegisteredMemory(list(groups.values()), registrar))
    return True
