"""How a backward ends: finished by the engine's callback, or repaired after an exception."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_fsdp_v2.comm.rank_checks import CheckRanks
from megatron_fsdp_v2.runtime.unit_checks import compare_unit

if TYPE_CHECKING:
    from megatron_fsdp_v2.params.grads import GroupGrads
    from megatron_fsdp_v2.runtime.context import Context
    from megatron_fsdp_v2.runtime.unit_base import UnitBase

__all__ = [
    "end_scheduled",
    "finish_backward",
    "finish_ordered_reductions",
    "needs_repair",
    "reduce_in_order",
    "repair",
    "synchronize_gradients",
]


def finish_backward(context: Context) -> None:
    """At the end of a backward: reduce what is left and put every unit to rest. Collective."""
    synchronize = _synchronizes(context)
    finish_ordered_reductions(context)
    for unit in reversed(context.units()):
        if unit.reshard_after_backward and unit.is_unsharded:
            unit.reshard()
        if unit.has_pending_reduction or any([group.has_unreduced for group in unit.groups]):
            _reduce_rest(context, unit, synchronize=unit.syncs_gradients)
        unit.end_backward()
    context.gathers.drop_prefetched()
    _settle(context)
    context.forget_recomputed()
    # An optimizer that torch's hooks do not see may step now.
    context.weight_version += synchronize
    context.has_unreduced = not synchronize
    context.forget_backward()
    context.end_pass("synchronized backward" if synchronize else "backward")
    # Last of all: they may step weights, and may raise.
    _run_hooks_of_synced(context)


def end_scheduled(context: Context) -> None:
    """At the end of a micro-batch's backward in a schedule: reduce what is left. Collective.

    Units stay gathered for other micro-batches that use them.
    """
    synchronize = _synchronizes(context)
    for unit in reversed(context.units()):
        _reduce_rest(context, unit, synchronize=unit.syncs_gradients)
    _settle(context)
    context.has_unreduced = not synchronize
    context.num_scheduled -= 1
    if not context.is_scheduled:
        context.gathers.drop_prefetched()
        context.weight_version += synchronize
        context.end_pass("synchronized schedule" if synchronize else "schedule")
    _run_hooks_of_synced(context)
    context.has_gradient = False


def _synchronizes(context: Context) -> bool:
    return any(unit.syncs_gradients for unit in context.units())


def _run_hooks_of_synced(context: Context) -> None:
    synced = [unit for unit in reversed(context.units()) if unit.syncs_gradients]
    # Nothing at all arrived in a backward to inputs alone (`torch.autograd.grad`).
    _run_hooks(synced, only_certain=not context.has_gradient)


def finish_ordered_reductions(context: Context) -> None:
    """Reduce the units that had no turn yet. Collective."""
    if context.ordered_reductions is not None:
        reduce_in_order(context, context.ordered_reductions.remaining())


def reduce_in_order(context: Context, units: Sequence[UnitBase]) -> None:
    """Reduce units whose turn it is, with or without a gradient here. Collective."""
    for unit in units:
        unit.has_pending_reduction = True
        _reduce(context, unit, synchronize=unit.syncs_gradients)


def _reduce(context: Context, unit: UnitBase, *, synchronize: bool) -> None:
    """Reduce gradients of a unit that arrived, as far as asked for. Collective.

    A unit whose backward ran takes part with all its groups: which of them got a gradient may
    differ between ranks.

    Args:
        context: The unit's.
        unit: Whose gradients.
        synchronize: Whether to go all the way into `param.grad`, where gradients are otherwise
            left unreduced between micro-batches.
    """
    reductions = context.reductions
    is_pending, unit.has_pending_reduction = unit.has_pending_reduction, False
    with unit.in_range("reduce_grad"):
        arrived = [
            group.grads
            for group in unit.groups
            if group.grads is not None
            and (group.grads.buffers.has_gradient or (is_pending and group.is_trained))
        ]
        if not arrived and reductions.is_async:
            return
        due = reductions.due(arrived, synchronize=synchronize)
        if due and context.options.check_ranks is CheckRanks.ALWAYS:
            compare_unit(context, unit, "reduce")
        reductions.reduce(due)


def _reduce_rest(context: Context, unit: UnitBase, *, synchronize: bool) -> None:
    """Reduce what is left, also along the outer axis where that is all that is left."""
    _reduce(context, unit, synchronize=synchronize)
    if synchronize:
        context.reductions.reduce_partials(unit.grads())


def needs_repair(context: Context) -> bool:
    """Whether an exception left something behind. To be asked between passes."""
    if context.is_in_backward or context.is_scheduled or context.forward_failed:
        return True
    return not all(unit.is_idle for unit in context.units())


def repair(context: Context) -> None:
    """Clear away what a failed forward or backward left behind.

    A failed backward's gradients that were collected and not reduced yet are dropped, and so are
    those that were being reduced: whatever `zero_grad` made of them, the reduction may have written
    them since. A failed forward costs no gradient.
    """
    if context.is_in_backward or context.is_scheduled:
        # The forward that repairs may be an evaluation; gradients it makes outlive that.
        with torch.inference_mode(False), torch.no_grad():
            _drop_gradients(context)
    context.num_scheduled = 0
    context.forget_backward()
    context.forget_recomputed()
    context.end_forward()
    context.forward_failed = False
    for unit in context.units():
        unit.forget_failure()
        unit.reshard()


def _drop_gradients(context: Context) -> None:
    dropped = context.reductions.groups()
    turns = context.ordered_reductions
    # Where ranks run different units, another one may have had the turn of a unit that this one was
    # still to run: its reductions would pair with the next backward's. Ranks that follow one
    # schedule reduce without turns.
    late = [] if turns is None or context.is_scheduled else turns.remaining()
    for unit in late:
        reduced = unit in context.synced_in_backward
        dropped += [g for g in unit.grads() if reduced or not g.accumulates_unreduced]
    before = [(grads.param_grads, grads.param_grads.state()) for grads in dropped]
    for unit in late:
        unit.has_pending_reduction = True
        _reduce(context, unit, synchronize=unit in context.synced_in_backward)
    # Where ranks run different units, what waits for others here may be under way there.
    if late or (context.ranks_may_differ and context.reductions.has_bucket):
        context.reductions.drain()
    context.reductions.abandon()
    for param_grads, state in before:
        param_grads.forget(state)
    for grads in _grads_of(context.units()):
        grads.abandon()


def _grads_of(units: Iterable[UnitBase]) -> list[GroupGrads]:
    return [grads for unit in units for grads in unit.grads()]


def synchronize_gradients(context: Context, units: Sequence[UnitBase]) -> None:
    """Bring all gradients of these units into `param.grad`. Collective.

    Args:
        context: Theirs.
        units: Some of its units, parents before children.
    """
    # Where every backward reduces (ZeRO-2), no rank has anything left to reduce, and the units that
    # some rank skipped have had their turn with the others.
    is_pending = context.ranks_may_differ and context.has_unreduced
    for unit in reversed(units):
        if is_pending and any(grads.accumulates_unreduced for grads in unit.grads()):
            unit.has_pending_reduction = True
        _reduce_rest(context, unit, synchronize=True)
    _settle(context)
    # As after a synchronized backward: an optimizer may step next.
    context.weight_version += 1
    context.has_unreduced = False
    _run_hooks(list(reversed(units)), only_certain=False)


def _run_hooks(units: Sequence[UnitBase], *, only_certain: bool) -> None:
    """Call what users registered to be called when a parameter has its gradient."""
    with torch.no_grad():
        for grads in _grads_of(units):
            grads.param_grads.run_hooks(only_certain=only_certain)


def _settle(context: Context) -> None:
    """Wait for all reductions, and take back what turned out to be no gradient at all."""
    context.reductions.drain()
    for grads in _grads_of(context.units()):
        grads.settle()
