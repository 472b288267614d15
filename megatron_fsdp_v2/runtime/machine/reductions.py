"""When gradients are reduced: turns of units and roots, room for full gradients, and the end.

A backward begins with the first unit that the engine reaches, and ends in a callback of the engine,
or, for a schedule that runs modules part by part, when the schedule says so. In between, each unit
is reduced in its turn (`Pass`). Before the number of full gradients exceeds its bound, the oldest
reduction is waited for. The reduction along the outer axis is queued behind the inner one, or
follows when that was waited for, with its own bound. At the end, ranks tell each other which
parameters had gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_fsdp_v2.runtime.machine.commands import GroupCommands
from megatron_fsdp_v2.runtime.machine.orders import Pass
from megatron_fsdp_v2.runtime.machine.state import (
    AT_END,
    UNKNOWN,
    Engine,
    Forward,
    Phase,
    Reduction,
    RootState,
    UnitState,
)
from megatron_fsdp_v2.runtime.machine.weights import (
    drop_prefetched,
    free,
    free_all,
    free_outdated,
)

# -- beginning -------------------------------------------------------------------------------------


def join(unit: UnitState, passed: Pass[UnitState], position: int = UNKNOWN) -> None:
    """Begin a backward, with a callback at its end, unless one is under way.

    Args:
        unit: The unit whose backward begins.
        passed: The pass of the unit.
        position: Number of the forward that the engine has reached, if known.
    """
    root = unit.root
    if root.engine is Engine.FAILED:
        repair(root)
    if root.engine is Engine.RESTING:
        root.do.check_captured_pass(unit.do, "backward")
        root.do.queue_end()
        root.engine, root.run = Engine.RUNNING, root.do.engine_run
        if root.ranks_may_differ:
            root.synced = _syncing(root)
        root.gathers.begin_backward()
    elif passed is root.passed:
        return
    _reduce_in_turn(root, position)
    finish_others(root, position)
    under_way = root.process.under_way
    if root in under_way:
        # One backward through several forwards of the root reduces each unit once per forward,
        # after the units of other roots whose turn is earlier.
        last = root.passed.turn.last
        _finish([each for each in _together(root) if each.passed.turn.last > last], position)
        reduce(root, root.passed.due(is_left=True))
    else:
        under_way.append(root)
    root.passed = passed
    if root.pass_unit is not None:
        # A backward inside a forward, which uses weights until the backward ends.
        for each in root.units:
            if each.has_begun and each.passed is passed:
                passed.add_use(each.reduced_with)
                root.pending.update(each.reduced_with)
    passed.begin_backward()
    root.pending.update(passed.used_directly)


def _syncing(root: RootState) -> list[UnitState]:
    """Return the units whose gradients a backward that begins now synchronizes."""
    return [unit for unit in root.units if unit.syncs_gradients()]


def finish_deferred(root: RootState, number: int) -> None:
    """End deferred backwards of forwards that began after this one.

    The engine runs the most recently created nodes first, so these backwards are over. A backward
    that failed is repaired first.
    """
    if root.engine is Engine.FAILED:
        repair(root)
    while root.deferred and (latest := max(root.deferred)) > number:
        forward = root.deferred.pop(latest)
        if forward.unit.phase is Phase.BACKWARD:
            forward.unit.do.end_backward(forward)


def _together(root: RootState) -> list[RootState]:
    """Return all roots in this run of the engine, in order of their turns."""
    found = [each for each in root.process.under_way if each.run == root.run]
    if len(found) > 1:
        found.sort(key=lambda each: each.passed.turn.last, reverse=True)
    return found or [root]


# -- recomputations --------------------------------------------------------------------------------


def prepare_recomputation(unit: UnitState) -> None:
    """Prepare to recompute a unit.

    Frees the oldest recomputed units if they and this unit exceed the prefetch limit.
    """
    root = unit.root
    root.recomputed.pop(unit, None)
    # These units run next in the backward, the newest first.
    waiting = list(reversed(root.recomputed))
    current = root.unit
    # The recomputed region belongs to a gathered unit whose backward has begun.
    is_for_another = (
        current is not None
        and current is not unit
        and current.is_gathered
        and current not in unit.ancestors
    )
    kept = root.gathers.limit.fitting([unit, *waiting] if is_for_another else waiting)
    for other in reversed(waiting):
        if other not in kept:
            del root.recomputed[other]
            free(other)


# -- turns -----------------------------------------------------------------------------------------


def end_use(root: RootState, units: Sequence[UnitState], position: int) -> None:
    """Reduce the units whose turn has come after the backward of one use. Collective.

    Args:
        root: Root of the units.
        units: The units whose parameters were used; see `UnitState.reduced_with`.
        position: Number of the forward that the engine has reached.
    """
    units = root.passed.count_backward(units)
    reduce(root, [unit for unit in units if unit in root.pending and not unit.is_gone])
    _reduce_in_turn(root, position)


def _reduce_in_turn(root: RootState, position: int) -> None:
    """Reduce units whose turn has come, of all roots in the backward under way. Collective.

    Args:
        root: A root in this run of the engine.
        position: Number of the forward that the engine has reached.
    """
    root.position = position
    for each in _together(root):
        passed = each.passed
        if passed.is_reduced:
            continue
        if passed.waits(position):
            return
        if due := passed.due(is_left=passed.turn.first > position):
            reduce(each, due)
        if not passed.is_reduced:
            return


def finish_others(root: RootState, position: int = UNKNOWN) -> None:
    """Reduce all units of other roots, before this root communicates in their backward.

    Ranks that run different units may have reduced different numbers of them so far. A backward
    that may go on reduces all its units once more. Roots that reduce in turn are left out.
    Collective.

    Args:
        root: The root that communicates next.
        position: Number of the forward that the engine has reached, if known.
    """
    run = root.do.engine_run
    reduces_in_turn = root.is_running and root.ranks_may_differ
    others = [
        other
        for other in sorted(root.process.under_way, key=lambda other: -other.passed.turn.last)
        if other is not root and other.ranks_may_differ and other.is_running
        if not (reduces_in_turn and other.run == run)
    ]
    _finish(others, position)


def _finish(others: Sequence[RootState], position: int) -> None:
    for other in others:
        reduce(other, other.passed.due(is_left=True))
    for other in others:
        if other.passed.turn.first < position:
            drain(other)
            other.passed.begin_backward()


def reduce(root: RootState, units: Iterable[UnitState]) -> None:
    """Reduce units in turn, with or without a gradient on this rank. Collective."""
    root.in_turn = list(units)
    while root.in_turn:
        unit = root.in_turn[0]
        root.pending.add(unit)
        _reduce(root, unit, synchronize=unit.syncs_gradients())
        # Last: a repair issues the reductions that an exception prevented, such as out of memory.
        del root.in_turn[0]


def _reduce(
    root: RootState,
    unit: UnitState,
    *,
    synchronize: bool,
    begun: Reduction | None = None,
) -> None:
    """Reduce the gradients of a unit that arrived, if they are due. Collective.

    A unit whose backward ran takes part with all its groups: which of them got a gradient may
    differ between ranks.

    Args:
        root: Root whose backward reduces the unit.
        unit: The unit.
        synchronize: Whether gradients are reduced into `param.grad`. Otherwise they stay unreduced
            between micro-batches if the strategy accumulates them.
        begun: The reduction of the unit that an exception ended, after ranks compared it.
    """
    is_pending = unit in root.pending
    # A unit that keeps its gradient stays pending until it is reduced: another rank may have a
    # gradient of it where this rank has none.
    if synchronize or not any([group.accumulates_unreduced for group in unit.groups]):
        root.pending.discard(unit)
    is_async = root.control.is_async
    issued = begun.groups if begun is not None else []
    with unit.root.report(unit.fqn, "reduce_grad"):
        due = [
            group
            for group in unit.groups
            if (group.has_gradient or (is_pending and (group.is_trained or group.is_owed)))
            and (synchronize or not group.accumulates_unreduced)
            and group not in issued
        ]
        if due or issued:
            # Buffers that accumulate micro-batches were allocated before.
            make_room(root)
            if due and begun is None and root.compares_collectives:
                has_outer = synchronize and any(group.reduces_partial for group in due)
                unit.do.compare_reduction(along_all=has_outer and not root.ranks_may_differ)
            # A repair needs the reductions that were issued before one that fails.
            reduction = Reduction([*issued], synchronize)
            root.inner.append(reduction)
            for group in due:
                group.reduce(async_op=is_async)
                reduction.groups.append(group)
            queued = [g for g in due if synchronize and is_async and g.queues_partial]
            if queued:
                # These are queued behind the inner ones, in another stream; all others follow when
                # the inner ones are waited for.
                _reduce_outer(root, queued, 2 * root.control.max_live)
        if not is_async:
            drain(root)


def _reduce_rest(
    root: RootState, unit: UnitState, *, synchronize: bool, is_shared: bool = False
) -> None:
    """Reduce remaining gradients of a unit, including partial ones along the outer axis.

    Args:
        root: The root.
        unit: The unit.
        synchronize: See `_reduce`.
        is_shared: Whether another rank may have partial gradients that this one discarded.
    """
    _reduce(root, unit, synchronize=synchronize)
    if synchronize:
        in_flight = [group for reduction in root.inner for group in reduction.groups]
        for group in unit.groups:
            is_due = is_shared and group.reduces_partial and (group.is_trained or group.is_owed)
            if (group.has_partial or is_due) and group not in in_flight:
                _reduce_outer(root, [group], root.control.max_live)


def _owe(root: RootState, unit: UnitState) -> None:
    """Record the trained parameters of a unit whose gradients are synchronized later."""
    for group in unit.groups:
        # Another rank may have gradients of a unit that this rank skipped, unless all ranks run
        # the same units.
        if root.ranks_may_differ or group.has_gradient or group.has_partial:
            group.owe()


# -- room ------------------------------------------------------------------------------------------


def make_room(root: RootState) -> None:
    """Wait for the oldest reductions until the bound allows another full gradient."""
    root.is_draining = False
    while len(root.inner) >= root.control.max_live:
        _finish_inner(root)


def drain(root: RootState) -> None:
    """Wait for all reductions."""
    root.is_draining = True
    while root.inner:
        _finish_inner(root)
    while root.outer:
        _finish_outer(root)


def _finish_inner(root: RootState) -> None:
    """Wait for the oldest unit's reductions, and begin those along the outer axis."""
    reduction = root.inner.popleft()
    groups = reduction.groups
    if not groups:
        return
    with root.report(groups[0].name, "finish_reduction"):
        for group in groups:
            group.end_inner()
    if reduction.synchronize and (following := [g for g in groups if g.has_partial]):
        _reduce_outer(root, following, root.control.max_live)


def _reduce_outer(root: RootState, groups: Sequence[GroupCommands], most: int) -> None:
    """Issue reductions along the outer axis. Collective.

    Args:
        root: The root.
        groups: Groups of one unit.
        most: Number of units that may be in flight. Otherwise partial shards of all units would be
            live at the end of a backward.
    """
    while len(root.outer) >= most:
        _finish_outer(root)
    reduction = Reduction()
    root.outer.append(reduction)
    with root.report(groups[0].name, "finish_reduction"):
        for group in groups:
            group.reduce_outer(async_op=root.control.is_async)
            reduction.groups.append(group)


def _finish_outer(root: RootState) -> None:
    groups = root.outer.popleft().groups
    if groups:
        with root.report(groups[0].name, "finish_reduction"):
            for group in groups:
                group.end_outer()


# -- end -------------------------------------------------------------------------------------------


def end(root: RootState) -> None:
    """End a backward: reduce remaining gradients and bring every unit to IDLE. Collective.

    The first callback ends the backward of all roots, in order of their turns: the callbacks of
    several roots may run in another order on another rank.
    """
    if root.engine is Engine.RESTING:
        return
    _reduce_in_turn(root, AT_END)
    together = _together(root)
    synced = [_reduce_remaining(each) for each in together]
    # Of all roots first: a unit that two roots share may be in flight for either.
    for each, units in zip(together, synced, strict=True):
        _end_reductions(each, units)
        _forget(each)
        end_pass(each, "backward", synchronize=bool(units))
    # Hooks run last: they may step weights, and may raise.
    for each, units in zip(together, synced, strict=True):
        each.do.run_hooks(units)


def _reduce_remaining(root: RootState) -> list[UnitState]:
    """Reduce remaining gradients, wait for all, and bring every unit to IDLE. Collective.

    Returns:
        The units whose gradients the backward synchronized.
    """
    if root.ranks_may_differ:
        # All had their turn, also if a double backward reached some of them again since.
        root.pending.clear()
    for unit in reversed(root.units):
        if unit.settings.reshard_after_backward:
            free(unit)
        if unit.phase is Phase.BACKWARD:
            # Its inputs need no gradients, so no hook marked the end of its backward.
            unit.num_pending_backwards = max(0, unit.num_pending_backwards - 1)
        if unit.is_recomputing or unit.pending_modules:
            unit.end_forward()
        # A forward may run a backward, such as a whole training step, and go on.
        unit.phase = Phase.FORWARD if unit.has_begun else Phase.IDLE
    drop_prefetched(root)
    return _reduce_all(root)


def _reduce_all(root: RootState) -> list[UnitState]:
    """Reduce remaining gradients and wait for all reductions. Collective.

    Returns:
        The units whose gradients are synchronized; those of the others stay owed.
    """
    synced = []
    for unit in reversed(root.units):
        is_synced = unit.syncs_gradients()
        if unit in root.pending or any([g.has_partial or g.has_gradient for g in unit.groups]):
            _reduce_rest(root, unit, synchronize=is_synced)
        if is_synced:
            synced.append(unit)
        else:
            _owe(root, unit)
    drain(root)
    return synced


def end_scheduled(root: RootState) -> None:
    """End a micro-batch's backward in a schedule: reduce remaining gradients. Collective.

    Units that other micro-batches use stay gathered.
    """
    synced = _reduce_all(root)
    _end_reductions(root, synced)
    root.num_scheduled -= 1
    if not root.is_scheduled:
        drop_prefetched(root)
        end_pass(root, "schedule", synchronize=bool(synced))
    root.do.run_hooks(synced)


def synchronize(root: RootState, units: Sequence[UnitState]) -> None:
    """Reduce all gradients of these units into `param.grad`. Collective.

    Args:
        root: Root of the units.
        units: Some of the units, parents before children.
    """
    if root.engine is not Engine.RESTING and root.do.engine_run == -1:
        # Another rank may have finished the backward that failed here.
        repair(root)
    # With ZeRO-2, every backward reduces all units, also those that some rank skipped, so that no
    # gradient is left.
    is_pending = root.ranks_may_differ and root.has_unreduced
    if is_pending and root.engine is Engine.RESTING and root.is_between_passes:
        free_outdated(root)
    for unit in reversed(units):
        unit.do.collect_assigned()
        if is_pending and any([group.accumulates_unreduced for group in unit.groups]):
            root.pending.add(unit)
        _reduce_rest(root, unit, synchronize=True, is_shared=is_pending)
    drain(root)
    _end_reductions(root, units)
    root.weight_version += 1  # as after a synchronized backward
    root.do.run_hooks(units[::-1])


def discard(root: RootState, units: Iterable[UnitState]) -> None:
    """Discard gradients that earlier backwards left to a later one, as `zero_grad` does.

    A backward or schedule that is under way, or a repair, deals with its own gradients.

    Args:
        root: Root of the units.
        units: Some of its units.
    """
    if root.engine is Engine.RESTING and not root.is_scheduled:
        for unit in units:
            root.pending.discard(unit)
            for group in unit.groups:
                if group.has_gradient or group.has_partial or group.is_owed:
                    group.abandon()


def _end_reductions(root: RootState, synced: Sequence[UnitState]) -> None:
    """End reductions that were waited for, and drop gradients to which no rank contributed.

    Args:
        root: The root.
        synced: Units whose gradients are synchronized.
    """
    root.do.end_reductions()
    root.has_unreduced = len(synced) < len(root.units)


def end_pass(root: RootState, kind: str = "", *, synchronize: bool = False) -> None:
    """End a backward, a schedule or an evaluation.

    Args:
        root: The root.
        kind: Kind of the pass, for reports; empty for an evaluation.
        synchronize: Whether gradients were synchronized.
    """
    if kind:
        root.is_early, root.num_to_compare[True] = False, 0
        root.is_after_backward = True
        # An optimizer without torch's step hooks may step now.
        root.weight_version += synchronize
    name = f"synchronized {kind}" if synchronize else kind
    root.do.end_allocations(name, no_pending_backward=not root.has_pending_backward)


def end_nested_pass(root: RootState) -> None:
    """End a pass inside a backward, if one is under way."""
    if root.nested is not None:
        root.gathers, root.pass_has_grad = root.nested.gathers, root.nested.pass_has_grad
        root.nested = None


def _forget(root: RootState) -> None:
    end_nested_pass(root)
    if root in root.process.under_way:
        root.process.under_way.remove(root)
    root.engine, root.run, root.position = Engine.RESTING, -1, UNKNOWN
    root.unit = None
    root.deferred.clear()
    root.recomputed.clear()


# -- after an exception ----------------------------------------------------------------------------


def reset(roots: Sequence[RootState]) -> None:
    """Repair on every rank, after a backward that failed on some of them. Collective.

    The machine does not know of a backward that failed before it reached a unit, such as in the
    loss. If ranks may differ, the other ranks have reduced all units.

    Args:
        roots: Roots whose forwards belong to one loss.
    """
    for root in roots:
        current = root.current
        expects_backward = current.turn.first >= 0 and not current.is_over
        if root.engine is Engine.RESTING and expects_backward and not root.is_scheduled:
            root.engine, root.passed = Engine.FAILED, current
            root.synced = _syncing(root)
            current.begin_backward()
            # All of them together, as in one run of the engine.
            root.process.under_way.append(root)
    for root in roots:
        repair(root)


def repair(root: RootState) -> None:
    """Reset the units after a failed forward or backward.

    Drops the gradients of a failed backward that were collected but not reduced. Also drops
    gradients whose reduction was under way: it may have written them after a `zero_grad`. After a
    failed forward, no gradient is dropped. Roots in the same backward are repaired together, since
    ranks that did not fail reduced their units in order.
    """
    together = _together(root)
    failed = [e for e in together if e.engine is not Engine.RESTING or e.is_scheduled]
    with root.do.repairing():
        found = [_reduce_late(each) for each in failed]
        # Another rank may have finished this backward, in the order of `end`.
        shared = [each for each in failed if each.ranks_may_differ and not each.is_scheduled]
        for each in shared:
            drain(each)
        for each, before in zip(failed, found, strict=True):
            is_shared = each in shared
            each.do.drop_gradients(before, is_shared=is_shared)
            if is_shared:
                each.weight_version += bool(each.synced)
                each.has_unreduced = len(each.synced) < len(each.units)
            each.inner.clear()
            each.outer.clear()
    for each in together:
        each.num_scheduled = 0
        each.pending.clear()
        _forget(each)
        each.gathers.prefetched.clear()
        each.gathers.requested.clear()
    for each in together:
        end_forward(each)
        each.forward_failed = False
        each.is_after_backward = True
        for unit in each.units:
            _make_idle(unit)
    units = [unit for each in together for unit in each.units]
    try:
        # Raises if user code wrote gathered weights since the exception.
        free_all(units)
    finally:
        for unit in units:
            unit.do.settle()


def abandon(root: RootState) -> None:
    """Drop whatever is under way, without communication. The root is not used again."""
    if root in root.process.under_way:
        root.process.under_way.remove(root)
    root.engine = Engine.RESTING
    for unit in root.units:
        _make_idle(unit)
        unit.is_gathered, unit.first_number = False, root.process.numbers.next()
        unit.do.abandon()


def unknown(unit: UnitState) -> RuntimeError:
    """Return the error for a gradient of a forward from before the unit was abandoned."""
    return RuntimeError(
        f"a gradient reached a forward of {unit.do.name} from before abort() or rebuild(), "
        "whose weights are gone; run the forward again"
    )


def _make_idle(unit: UnitState) -> None:
    unit.phase = Phase.IDLE
    unit.num_pending_backwards = unit.num_users = 0
    unit.is_recomputed = unit.was_recomputed = False
    unit.end_forward()
    unit.do.restore_inputs()


def _reduce_late(root: RootState) -> object:
    """Reduce units that this rank did not reduce in a failed backward. Collective.

    Otherwise the reductions of a rank that did would pair with those of the next backward.

    Returns:
        The gradients that unfinished reductions write, from before.
    """
    dropped = [group for reduction in (*root.inner, *root.outer) for group in reduction.groups]
    # Of the unit whose reduction failed: all groups, and the reduction, if ranks compared it.
    failed: Sequence[GroupCommands] = ()
    begun: Reduction | None = None
    late: list[UnitState] = []
    if root.ranks_may_differ and not root.is_scheduled:
        # Ranks that follow one schedule reduce without this order.
        late = [*root.in_turn, *root.passed.due(is_left=True)]
        if root.in_turn:
            failed = late[0].groups
            if root.inner and all(group in failed for group in root.inner[-1].groups):
                begun = root.inner.pop()
    root.in_turn = []
    for unit in late:
        reduced = unit in root.synced
        dropped += [g for g in unit.groups if reduced or not g.accumulates_unreduced]
    before = root.do.snapshot(dropped)
    for group in failed:
        if begun is None or group not in begun.groups:
            # A gradient of the group may be the reason why its reduction failed.
            group.abandon()
    for unit in late:
        root.pending.add(unit)
        _reduce(root, unit, synchronize=unit in root.synced, begun=begun)
        begun = None
    return before


def end_forward(root: RootState, *, failed: bool = False) -> None:
    """End the forward that began the pass.

    Args:
        root: The root.
        failed: Whether it ended in an exception. Collectives under way are left to `repair`:
            waiting for them could block on other ranks and delay the exception.
    """
    unit = root.pass_unit if root.nested is None else root.nested.unit
    if unit is not None and root.pass_has_grad and (unit.is_root or not root.current.has_root):
        root.current.turn.last = root.process.numbers.next()
        # Units that run next belong to the next forward of the root, as on ranks without an error.
        root.current.is_over |= failed and unit.is_root
    if root.nested is None:
        root.pass_unit = None
    end_nested_pass(root)
    root.forward_failed |= failed


def defer(forward: Forward) -> None:
    """Let the backward of a forward be ended from outside."""
    forward.unit.root.deferred[forward.number] = forward
