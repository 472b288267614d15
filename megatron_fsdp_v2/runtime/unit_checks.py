"""Whether units have values and keep weights inside, and all ranks shard and use the same ones."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2._text import readable_size
from megatron_fsdp_v2.comm.backends import LateFlag
from megatron_fsdp_v2.comm.rank_checks import (
    CheckRanks,
    UnitRecord,
    checksum,
    compare_steps,
    compare_units,
)
from megatron_fsdp_v2.layout.placement import Placement
from megatron_fsdp_v2.params.autograd import tensors_within
from megatron_fsdp_v2.params.unset_values import is_unset

if TYPE_CHECKING:
    from torch import nn

    from megatron_fsdp_v2.params.group import ParameterGroup
    from megatron_fsdp_v2.runtime.context import Context
    from megatron_fsdp_v2.runtime.unit_base import UnitBase

__all__ = [
    "check_capture",
    "check_captured_pass",
    "check_has_values",
    "check_outputs",
    "check_unchanged",
    "check_units",
    "compare_after_step",
    "compare_unit",
    "without_values",
]


def check_capture(context: Context) -> None:
    """See that what begins in the capture of a CUDA graph does in every replay what it does now.

    Raises:
        RuntimeError: The host decides something of it, or waits for the device.
    """
    options, groups = context.options, context.groups()
    reasons = {
        "ranks compare what they sharded at the first use: run a step before the capture": (
            not context.is_checked and any(a.size > 1 for group in groups for a in group.axes)
        ),
        "check_ranks='always' compares on the host: leave it at 'once'": (
            options.check_ranks is CheckRanks.ALWAYS
        ),
        "enable_unshard_after_step gathers beyond the end of a step: leave it off": (
            options.enable_unshard_after_step
        ),
        "enable_trace_pool plans addresses anew between steps: leave it off": (
            options.enable_trace_pool
        ),
        "weights are offloaded, and the host waits for gradients": any(
            group.spec.offload is not None for group in groups
        ),
        "weights are quantized, with scales that the host keeps": context.has_formats,
        "a schedule runs parts of modules": context.is_scheduled,
        "gradients of an earlier backward are not synchronized yet": (
            not context.is_captured and any(group.has_unreduced for group in groups)
        ),
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise RuntimeError(
            f"{context.units()[0].name} cannot be captured in a CUDA graph: {'; '.join(found)}"
        )


def check_captured_pass(context: Context, what: str) -> None:
    """See that a capture has all of a pass or nothing of it.

    Args:
        context: Of a pass under way.
        what: What runs now.

    Raises:
        RuntimeError: It begins or ends within the pass.
    """
    if context.is_capturing != context.is_captured:
        here, there = ("in", "outside") if context.is_capturing else ("outside", "in")
        raise RuntimeError(
            f"{what} runs {here} the capture of a CUDA graph, and the forward of "
            f"{context.units()[0].name} began {there} it; capture forward and backward together"
        )


def compare_after_step(context: Context, unit: UnitBase) -> None:
    """Compare weights that were gathered after a step with those that are there now.

    The device compares, and the host reads what it found when it is there: see `check_unchanged`.
    """
    unit.is_gathered_after_step = False
    for group in unit.held_groups:
        changed = group.weights.changed()
        if changed is not None:
            context.late_flags.append((group.name, LateFlag(changed)))


def check_unchanged(context: Context, *, wait: bool = False) -> None:
    """See that no weights were changed unseen after a step had started to gather them.

    Args:
        context: Of the units that were compared.
        wait: Whether the host waits for what is not there yet.

    Raises:
        RuntimeError: Some were.
    """
    flags, context.late_flags = context.late_flags, []
    for index, (name, flag) in enumerate(flags):
        found = flag.read(wait=wait)
        if found is None:
            context.late_flags = flags[index:]
            return
        if found:
            raise RuntimeError(
                f"weights of {name} were changed after the optimizer's step, in a way that torch "
                "does not count: through .data, or by a function for lists of tensors "
                "(torch._foreach_...). The step had started to gather them, so the forward after "
                "it computed with the weights as they were. Call reshard() on the model after such "
                "a change, or leave enable_unshard_after_step off"
            )


def check_units(context: Context) -> None:
    """At the first use: see that all ranks sharded the same. Collective.

    Raises:
        RuntimeError: They did not, or a unit shares a parameter with another root's.
    """
    context.is_checked = True
    units = context.units()
    for unit in units:
        for group in unit.tied_groups:
            if not any(group in other.groups for other in units):
                raise RuntimeError(
                    f"{unit.name} shares a parameter with {group.name}, which belongs to "
                    "another root; call fully_shard on a module that contains both"
                )
    if units[0].is_root:
        _warn_of_large_root(units)
    if context.options.check_ranks is CheckRanks.NEVER:
        return
    by_mesh: dict[Any, list[UnitBase]] = {}
    for unit in units:
        if unit.groups:
            by_mesh.setdefault(unit.groups[0].mesh, []).append(unit)
    for members in by_mesh.values():
        group = members[0].groups[0]
        compare_units([_record(unit) for unit in members], group.axes, group.device)


NOTABLE_NBYTES = 64 << 20
"""Gathered bytes that a root may have before anything is said of it."""


def _warn_of_large_root(units: Sequence[UnitBase]) -> None:
    """Say so where a root has more parameters itself than any of its units.

    They are gathered, and their gradients whole, for as long as anything inside it computes. That
    is what becomes of an embedding and an output layer where layers alone were made units.

    Args:
        units: All of it, the root first.
    """
    root, *others = units
    sizes = {unit: sum(_nbytes(g, g.layout.numel) for g in unit.groups) for unit in units}
    largest = max(others, key=lambda unit: sizes[unit], default=None)
    if largest is None or sizes[root] <= max(sizes[largest], NOTABLE_NBYTES):
        return
    modules: Counter[str] = Counter()
    for group in root.groups:
        for name, slot in zip(group.names, group.layout.slots, strict=True):
            modules[name.rpartition(".")[0]] += _nbytes(group, slot.numel)
    parts = [f"{name} ({readable_size(n)})" for name, n in modules.most_common(3) if name]
    warnings.warn(
        f"the root, {root.name}, has {readable_size(sizes[root])} of weights itself, and its "
        f"largest unit, {largest.name}, has {readable_size(sizes[largest])}. A root's weights stay "
        "gathered, and their gradients whole, while anything inside it computes: call fully_shard "
        f"on what has most of them before the root{': ' + ', '.join(parts) if parts else ''}",
        stacklevel=2,
    )


def _nbytes(group: ParameterGroup, numel: int) -> int:
    """Bytes of gathered weights, in the first form that their format has."""
    gathered = group.weights.gathered
    return numel // gathered.packing * gathered.tensor.element_size()


def _record(unit: UnitBase) -> UnitRecord:
    options = [unit.class_name]
    copies = [0] * len(unit.groups[0].axes)
    for group in unit.groups:
        options += [",".join(group.names), group.layout.fingerprint, repr(group.spec)]
        if group.axes[-1].gather_group is not None:
            options.append("gathered in a group of its own")
        if group.grads is not None and not group.grads.reduces:
            continue
        for axis, placements in enumerate(group.spec.placements):
            replicated = placements.main_weight is Placement.REPLICATE
            if replicated and group.axes[axis].size > 1:
                copies[axis] += checksum(group.main_weight.tensor)
    return UnitRecord(unit.fqn, " ".join(options), tuple(copies))


def compare_unit(context: Context, unit: UnitBase, action: str) -> None:
    """Before a collective: see that it is the same unit's on every rank. Collective.

    Args:
        context: The unit's.
        unit: Whose parameters are about to be communicated.
        action: `gather` or `reduce`.

    Raises:
        RuntimeError: A rank is about to do something else.
    """
    if not unit.groups:
        return
    units, group = context.units(), unit.groups[0]
    axis = group.axes[-1]
    actions = ("gather", "reduce")
    names = [f"{known} {other.name}" for other in units for known in actions]
    code = units.index(unit) * len(actions) + actions.index(action)
    # In two groups, gathers pair with gathers and reductions with reductions.
    axis = axis.for_gathers() if action == "gather" else axis
    compare_steps(action, unit.name, code, axis, group.device, names)


def _buffer_of(module: weakref.ref[nn.Module], attribute: str) -> torch.Tensor | None:
    owner = module()
    return None if owner is None else owner._buffers.get(attribute)


def without_values(
    groups: Sequence[ParameterGroup],
    params: AbstractSet[str],
    buffers: Sequence[tuple[str, nn.Module, str]],
) -> list[tuple[str, Callable[[], torch.Tensor | None]]]:
    """What has no values yet: names, and how to look each one up.

    Args:
        groups: Those of the unit.
        params: Names of parameters without values.
        buffers: Buffers without values: name, module and attribute.
    """
    found: list[tuple[str, Callable[[], torch.Tensor | None]]] = [
        (name, functools.partial(_buffer_of, weakref.ref(module), attribute))
        for name, module, attribute in buffers
    ]
    for group in groups:
        for index, name in enumerate(group.names):
            if name in params:
                found.append((name, functools.partial(group.main_weight.view, index)))
    return found


def check_has_values(unit: UnitBase) -> None:
    """Before a unit's first forward: see that what had no values has some. Collective.

    Raises:
        RuntimeError: Something has none, on some rank.
    """
    waiting = unit.unset
    for group in unit.groups:
        group.changes.sync()
    found = [tensor is not None and is_unset(tensor) for tensor in (get() for _, get in waiting)]
    # A rank that holds no row of a parameter hears of it from those that do.
    for group in unit.groups[:1]:
        table = torch.tensor(found, dtype=torch.int32, device=group.device)
        for axis in group.axes:
            if axis.size > 1:
                dist.all_reduce(table, op=dist.ReduceOp.MAX, group=axis.group)
        found = [bool(one) for one in table.tolist()]
    names = [name for (name, _), is_missing in zip(waiting, found, strict=True) if is_missing]
    if names:
        raise RuntimeError(
            f"{', '.join(names)} of unit {unit.name} had no values on the meta device and got none "
            "since: load a state dict, define reset_parameters() on the module that has it, or "
            "give fully_shard a param_init_fn"
        )
    unit.unset = []


def check_outputs(unit: UnitBase, output: Any, context: Context) -> None:
    """See that no output of a forward shares memory with weights that are dropped at its end.

    Few operations of torch look whether a tensor has memory: the others crash, or read what has
    been put there since.

    Args:
        unit: Whose forward ends; its weights are still gathered.
        output: What the forward returned.
        context: The unit's.

    Raises:
        RuntimeError: One does.
    """
    if not unit.gathered_nbytes or not unit.drops_after_forward:
        return
    dropped = [group for group in unit.held_groups if group.weights.gathers_for_use]
    for tensor in tensors_within(output):
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if not torch._C._has_storage(local):
            continue
        for group in dropped:
            name = group.gathered_name_at(local)
            if name is not None and local.numel() and not _is_held_around(group, unit, context):
                raise RuntimeError(
                    f"the forward of {unit.name} returns its weight {name}, or a view of it, and "
                    "drops gathered weights when it ends: whoever used that would read freed "
                    "memory. Return a copy (weight.clone()) or what is computed of it, or keep "
                    "the weights until the backward with reshard_after_forward=False or "
                    "sharding_strategy='optim_grads'"
                )


def _is_held_around(group: ParameterGroup, unit: UnitBase, context: Context) -> bool:
    """Whether a unit that runs this one holds the same weights, longer than this one."""
    return any(
        group in other.held_groups and other.is_unsharded and not other.is_idle
        for other in context.units()
        if other is not unit
    )
