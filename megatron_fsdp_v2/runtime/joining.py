"""A new root takes in the units below it: one context, names under it, one pool."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import nn

from megatron_fsdp_v2.memory.allocator import PlainAllocator
from megatron_fsdp_v2.memory.trace_pool import TracePoolAllocator
from megatron_fsdp_v2.runtime.fsdp_module import FSDPModule, unit_of
from megatron_fsdp_v2.runtime.owned_parameters import numbered
from megatron_fsdp_v2.runtime.undo import keep_attributes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from megatron_fsdp_v2.memory.allocator import Allocator, TemporaryBuffer
    from megatron_fsdp_v2.params.grads import GroupGrads
    from megatron_fsdp_v2.params.group import ParameterGroup
    from megatron_fsdp_v2.params.weights import GroupWeights
    from megatron_fsdp_v2.runtime.context import Context
    from megatron_fsdp_v2.runtime.unit import Unit

__all__ = ["join"]


def join(roots: Sequence[nn.Module], context: Context, undo: ExitStack) -> None:
    """Have all units below a new root share its context, and know their names under it.

    Args:
        roots: Modules of the new root's unit.
        context: Of that unit.
        undo: Has units below be as they were.
    """
    names: dict[Unit, list[str]] = {}
    for prefix, root in numbered(roots):
        for name, module in root.named_modules(prefix=prefix):
            if isinstance(module, FSDPModule):
                names.setdefault(unit_of(module), []).append(name)
    units = list(names)
    for unit in units:
        _share_pool(context.allocator, unit, undo)
        keep_attributes(unit, ("context", "is_root", "fqns", "fqn"), undo)
        unit.context, unit.is_root = context, unit is units[0]
        unit.fqns = [""] if unit.is_root else names[unit]
        unit.fqn = ", ".join(unit.fqns)
        for number, group in enumerate(unit.groups):
            keep_attributes(group, ("watcher",), undo)
            group.watcher = weakref.ref(unit)
            undo.callback(group.rename, group.name)
            group.rename(f"{unit.fqn or unit.class_name}/{number}")
    _note_empty_ranks([group for unit in units for group in unit.groups if group.grads], undo)
    spread = any(axis.size > 1 for u in units for group in u.groups for axis in group.axes)
    may_differ = all(unit.skips_safely for unit in units)
    context.set_units(units, spread=spread, may_differ=may_differ)


def _share_pool(allocator: Allocator, unit: Unit, undo: ExitStack) -> None:
    """Have a unit's temporary buffers in the root's pool, if it has one."""
    other = unit.context.allocator
    if not isinstance(allocator, TracePoolAllocator):
        return
    if isinstance(other, TracePoolAllocator):
        allocator.merge(other, undo)
        return
    assert isinstance(other, PlainAllocator)
    keep_attributes(other, ("successor",), undo)
    other.successor = allocator
    for group in unit.groups:
        for holder in (group.weights, group.grads):
            if holder is not None:
                _adopt(allocator, holder, undo)


def _adopt(pool: TracePoolAllocator, holder: GroupWeights | GroupGrads, undo: ExitStack) -> None:
    before: dict[TemporaryBuffer, TemporaryBuffer] = {}
    undo.callback(holder.replace_buffers, lambda buffer: before.get(buffer, buffer))

    def adopt(buffer: TemporaryBuffer) -> TemporaryBuffer:
        adopted = pool.adopt(buffer)
        before[adopted] = buffer
        return adopted

    holder.replace_buffers(adopt)


def _note_empty_ranks(trained: Sequence[ParameterGroup], undo: ExitStack) -> None:
    """Tell gradients which ranks hold none of the model: those take no part in a common norm."""
    by_mesh: dict[DeviceMesh, list[ParameterGroup]] = {}
    for group in trained:
        by_mesh.setdefault(group.mesh, []).append(group)
    for groups in by_mesh.values():
        empty = frozenset.intersection(*(frozenset(group.empty_ranks) for group in groups))
        for group in groups:
            keep_attributes(group.holders, ("empty",), undo)
            group.holders.empty = empty
