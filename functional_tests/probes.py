"""Probes of finished trainings, called with the chunks and the optimizer."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_fsdp_v2.dtensor.sharded_rows import local_of
from megatron_fsdp_v2.memory.host_memory import is_in_host_memory
from megatron_fsdp_v2.optim import FlatOptimizer
from megatron_fsdp_v2.runtime.module import named_units


def gathered_units(chunks: Any, optimizer: Any) -> list[str]:
    """Return the units that are still gathered; a chunk of Megatron's DDP has none."""
    units = (pair for chunk in chunks for pair in named_units(chunk))
    return [name for name, unit in units if unit.is_unsharded]


def prefetch_limits(chunks: Any, optimizer: Any) -> tuple[int, int | None, int | None, int]:
    """Return the number of units, and the prefetch and buffer limits."""
    context = next(unit for _, unit in named_units(chunks[0].module)).context
    limit = context.state.gathers.limit
    most = context.options.max_live_grad_buffers
    return len(context.units()), limit.units, limit.nbytes, most


def separate_gather_groups(chunks: Any, optimizer: Any) -> list[bool]:
    """Return, for each all-gather group, whether it is a separate group of the same ranks."""
    found: dict[str, bool] = {}
    for _, unit in named_units(chunks[0]):
        for axis in (group.axes[-1] for group in unit.groups):
            gathers = axis.for_gathers().group
            ranks = [dist.get_process_group_ranks(one) for one in (gathers, axis.group)]
            fits = gathers is not axis.group and ranks[0] == ranks[1]
            found[gathers.group_name] = found.get(gathers.group_name, True) and fits
    return list(found.values())


def _torch_optimizers(optimizer: Any) -> list[Any]:
    """Return the torch optimizers inside Megatron's optimizers."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if part.optimizer is not None]


def steps_flat_tensors(chunks: Any, optimizer: Any) -> bool:
    """Return whether Adam stepped flat tensors: fewer nonempty tensors than parameters."""
    stepped = given = 0
    for part in _torch_optimizers(optimizer):
        assert isinstance(part, FlatOptimizer) and part._plan is not None
        given += sum(local_of(p).numel() > 0 for g in part.param_groups for p in g["params"])
        stepped += sum(tensor.numel() > 0 for group in part._plan.params for tensor in group)
    return 0 < stepped < given


def offloads(chunks: Any, optimizer: Any, *, fraction: float) -> bool:
    """Return whether the offloaded moments exceed this fraction by less than one parameter."""
    moments = [
        local_of(state["exp_avg"])
        for part in _torch_optimizers(optimizer)
        for state in part.state.values()
        if "exp_avg" in state
    ]
    on_host = [moment.numel() for moment in moments if is_in_host_memory(moment) and moment.numel()]
    wanted = fraction * sum(moment.numel() for moment in moments)
    return sum(on_host) >= wanted and (not on_host or sum(on_host) - min(on_host) < wanted)


def moment_bytes_per_element(chunks: Any, optimizer: Any) -> float:
    """Return the bytes of both moments per parameter element on this rank."""
    (part,) = _torch_optimizers(optimizer)
    moments = [
        (moment, getattr(moment, "_data", moment))
        for state in part.state.values()
        for moment in (local_of(state[name]) for name in ("exp_avg", "exp_avg_sq"))
    ]
    nbytes = sum(data.numel() * data.element_size() for _, data in moments)
    return 2 * nbytes / sum(moment.numel() for moment, _ in moments)
