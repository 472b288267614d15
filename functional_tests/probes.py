"""Probes of finished trainings, called with the chunks and the optimizer."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from megatron_fsdp_v2.memory.host_memory import is_in_host_memory
from megatron_fsdp_v2.optim import FlatOptimizer
from megatron_fsdp_v2.runtime.module import named_units


def left_gathered(chunks: Any, optimizer: Any) -> list[str]:
    """Return the units that are still gathered; a chunk of Megatron's DDP has none."""
    del optimizer
    units = (pair for chunk in chunks for pair in named_units(chunk))
    return [name for name, unit in units if unit.is_unsharded]


def knobs(chunks: Any, optimizer: Any) -> tuple[int, int | None, int | None, int, int]:
    """Return the number of units, their options, and the number gathered by the last step."""
    del optimizer
    units = [unit for _, unit in named_units(chunks[0].module)]
    context, gathered = units[0].context, sum(unit.is_gathered_after_step for unit in units)
    limit = context.gathers.limit
    most = context.options.max_live_grad_buffers
    return len(context.units()), limit.units, limit.nbytes, most, gathered


def gathers_apart(chunks: Any, optimizer: Any) -> list[bool]:
    """Return, for each group of gathers, whether it is a separate group of the same ranks."""
    del optimizer
    found: dict[str, bool] = {}
    for _, unit in named_units(chunks[0]):
        for axis in (group.axes[-1] for group in unit.groups):
            gathers = axis.for_gathers().group
            ranks = [dist.get_process_group_ranks(one) for one in (gathers, axis.group)]
            fits = gathers is not axis.group and ranks[0] == ranks[1]
            found[gathers.group_name] = found.get(gathers.group_name, True) and fits
    return list(found.values())


def _parts(optimizer: Any) -> list[Any]:
    """Return the torch optimizers inside Megatron's optimizers."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if part.optimizer is not None]


def steps_runs(chunks: Any, optimizer: Any) -> bool:
    """Return whether Adam stepped fewer nonempty tensors than parameters."""
    del chunks
    stepped = given = 0
    for part in _parts(optimizer):
        assert isinstance(part, FlatOptimizer) and part._plan is not None
        given += sum(local_of(p).numel() > 0 for g in part.param_groups for p in g["params"])
        stepped += sum(tensor.numel() > 0 for group in part._plan.params for tensor in group)
    return 0 < stepped < given


def offloads(chunks: Any, optimizer: Any, *, fraction: float) -> bool:
    """Return whether this fraction of the moments, plus less than a parameter, is offloaded."""
    del chunks
    moments = [
        local_of(state["exp_avg"])
        for part in _parts(optimizer)
        for state in part.state.values()
        if "exp_avg" in state
    ]
    on_host = [moment.numel() for moment in moments if is_in_host_memory(moment) and moment.numel()]
    wanted = fraction * sum(moment.numel() for moment in moments)
    return sum(on_host) >= wanted and (not on_host or sum(on_host) - min(on_host) < wanted)


def bytes_of_state(chunks: Any, optimizer: Any) -> float:
    """Return the bytes of moments per element on this rank."""
    del chunks
    (part,) = _parts(optimizer)
    moments = [
        (moment, getattr(moment, "_data", moment))
        for state in part.state.values()
        for moment in (local_of(state[name]) for name in ("exp_avg", "exp_avg_sq"))
    ]
    nbytes = sum(data.numel() * data.element_size() for _, data in moments)
    return 2 * nbytes / sum(moment.numel() for moment, _ in moments)
