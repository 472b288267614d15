"""When weights are gathered, ahead of their use too, and freed."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.runtime.machine.orders import ExecutionOrder
from megatron_fsdp_v2.runtime.machine.state import RootState, UnitState


def gather(unit: UnitState, uses: WeightUse, *, async_op: bool) -> None:
    """Gather weights; before a forward, refresh stale model weights first. Collective.

    Args:
        unit: The unit.
        uses: Uses to gather for.
        async_op: Whether to return before the gathers are done.
    """
    if unit.is_gathered and unit.single_payload:
        return
    if not unit.root.is_checked:
        check_units(unit.root)
    unit.do.gather(uses, adds=unit.is_gathered, async_op=async_op)
    unit.is_gathered = True


def check_units(root: RootState) -> None:
    """Compare the units of all ranks, before their first use. Collective."""
    root.do.check_units()
    # A use after an error is checked again.
    root.is_checked = True


def wait(unit: UnitState) -> None:
    """Wait for the gathers and register the gathered parameters."""
    try:
        unit.do.wait()
    except RuntimeError:
        free(unit, after_error=True)
        raise


def gather_for(unit: UnitState, uses: WeightUse) -> None:
    """Gather weights at the beginning of a use and wait for them. Collective."""
    gather(unit, uses, async_op=False)
    wait(unit)


def free(unit: UnitState, *, after_error: bool = False) -> None:
    """Register the sharded parameters and free gathered weights, if weights are gathered."""
    if unit.is_gathered:
        unit.is_gathered = False
        unit.do.free(after_error=after_error)


def free_all(units: Sequence[UnitState]) -> None:
    """Free the weights of several units.

    Raises:
        RuntimeError: Gathered weights were changed in place; all units are freed.
    """
    errors = []
    for unit in units:
        try:
            free(unit)
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def free_if_changed(unit: UnitState) -> None:
    """Free gathered weights, with a sync, if parameters were assigned or written since.

    A forward may change the weights of a unit that runs later, and that is gathered ahead.
    """
    if unit.do.is_changed():
        unit.do.sync()
        free(unit)


def free_if_outdated(unit: UnitState) -> None:
    """Free gathered weights that are stale or changed, or of which some were (un)frozen."""
    if unit.is_gathered and unit.do.is_outdated():
        free(unit)


def free_outdated(root: RootState) -> None:
    """Free outdated weights of all units, between passes.

    Whether a unit is reduced depends on which of its sharded parameters are frozen; on a rank where
    it is gathered, users froze the gathered ones.
    """
    for unit in root.units:
        if unit.is_gathered:
            free_if_outdated(unit)


# -- gathers ahead of use --------------------------------------------------------------------------


def before_use(unit: UnitState) -> None:
    """Drop the prefetched units that were expected before a unit that is used now.

    If the unit was not expected, all prefetched units are dropped, unless the unit is already
    gathered for another reason.
    """
    gathers = unit.root.gathers
    gathers.num_uses += 1
    prefetched = gathers.prefetched
    if prefetched and unit.nbytes and (not unit.is_gathered or unit in prefetched):
        while prefetched and (dropped := prefetched.popleft()) is not unit:
            free(dropped)
    if gathers.requested:
        gathers.requested = [other for other in gathers.requested if other is not unit]


def free_after_use(unit: UnitState, order: ExecutionOrder[UnitState]) -> None:
    """Free a unit's weights at the end of a use, unless the order predicts the unit next.

    It is then one of the units gathered ahead. A unit called many times in a row is gathered once,
    also on a rank where no gradient reaches some of the calls.

    Args:
        unit: The unit.
        order: The order that the use is part of.
    """
    gathers = unit.root.gathers
    is_next = order.expected[order.following : order.following + 1] == [unit]
    if is_next and unit.is_gathered and gathers.limit.units != 0:
        gathers.prefetched.appendleft(unit)
    else:
        free(unit)


def look_ahead(
    unit: UnitState, order: ExecutionOrder[UnitState], chosen: Sequence[UnitState] = ()
) -> None:
    """Prefetch the next units after a unit is gathered for a use.

    Args:
        unit: The unit.
        order: The order that the use is part of.
        chosen: Units chosen by the user instead of the predicted ones.
    """
    gathers = unit.root.gathers
    following = order.after(unit)
    if gathers.limit.units == 0:
        return
    if chosen:
        # Chosen units stay gathered until they run or the pass ends, that of their own root.
        for requested in chosen:
            root = requested.root
            # Below ZeRO-3, another rank may skip this unit, and the other root refreshes its
            # weights in its own passes.
            if not requested.is_gone and (root is unit.root or not root.ranks_may_differ):
                is_kept = requested.is_gathered
                _prefetch(requested)
                if not is_kept:
                    root.gathers.requested.append(requested)
        return
    for expected in gathers.limit.fitting(following):
        # A unit that is in use, or kept for its backward, may lack a payload, and must not be
        # dropped as a misprediction.
        is_kept = expected.is_gathered
        _prefetch(expected)
        # Recorded once: an earlier prefetch may have been dropped by a load of weights.
        if not is_kept and expected not in gathers.prefetched:
            gathers.prefetched.append(expected)


def _prefetch(unit: UnitState) -> None:
    """Issue the gathers of a unit before its use. Collective."""
    uses = WeightUse.FORWARD
    if unit.root.belongs_to_backward:
        # A recomputed unit runs its forward first, then its backward.
        uses = WeightUse.BOTH if unit.is_recomputed else WeightUse.BACKWARD
    gather(unit, uses, async_op=True)


def drop_prefetched(root: RootState) -> None:
    """Drop all prefetched units at the end of a pass."""
    gathers = root.gathers
    if gathers.prefetched or gathers.requested:
        for unit in (*gathers.prefetched, *gathers.requested):
            free(unit)
        gathers.prefetched.clear()
        gathers.requested.clear()
