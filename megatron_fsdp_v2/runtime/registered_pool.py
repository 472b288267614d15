"""Registration of a model's trace pool with NCCL."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.comm.backends import NcclRegistrar, registrar_for
from megatron_fsdp_v2.memory.registered_memory import RegisteredMemory
from megatron_fsdp_v2.runtime.module import ShardedModule, named_units


def register_pool(model: nn.Module, registrar: NcclRegistrar | None = None) -> bool:
    """Register the memory of a model's trace pool with the process groups of its units.

    Each rank registers a block of memory once, without communication, when its plan allocates the
    block; addresses stay the same from then on. If a new plan allocates another block, that block
    is registered instead. Call `registered_memory.deregister_all()` before destroying process
    groups.

    Args:
        model: The root, sharded with `enable_trace_pool=True`.
        registrar: Allocates and registers memory. None: the registrar of the units' device.

    Returns:
        Whether memory will be registered: False on a CPU and on a single rank.

    Raises:
        RuntimeError: The model has no trace pool.
        ValueError: The model is not sharded.
    """
    if not isinstance(model, ShardedModule):
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
    pool.set_memory_source(RegisteredMemory(list(groups.values()), registrar))
    return True
