"""Events of a step: what hooks, schedules and users report, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.runtime.machine import reductions, weights
from megatron_fsdp_v2.runtime.machine.commands import GroupCommands
from megatron_fsdp_v2.runtime.machine.orders import ExecutionOrder, Gathers, Pass, PrefetchLimit
from megatron_fsdp_v2.runtime.machine.state import (
    Engine,
    Forward,
    Nested,
    Phase,
    RootState,
    UnitState,
)

# -- passes ----------------------------------------------------------------------------------------


def begin_pass(unit: UnitState, *, has_grad: bool) -> None:
    """Begin a pass (not a recomputation). Collective.

    Repairs the state that an exception left, and refreshes stale weights.

    If ranks may run different units, a backward reduces all units once per root pass. Units that
    run outside the root's forward, before or after it, then belong to its root pass, since another
    rank may skip them. Otherwise every forward of the root begins a new root pass.

    Args:
        unit: The root's unit, or a unit that runs outside the root's forward.
        has_grad: Whether gradients are enabled.
    """
    root, do = unit.root, unit.root.do
    unit.do.check_pass()
    is_capturing = do.is_capturing
    if is_capturing:
        begin_capture(root)
    root.is_captured = is_capturing
    graph_replayed(root)
    if do.has_new_values():
        root.is_checked = False
    for each in root.units:
        # Before `free` registers the sharded parameters in place of assigned ones.
        if each.is_gathered:
            weights.free_if_changed(each)
    if root.needs_repair:
        reductions.repair(root)
    if has_grad:
        if unit.is_root:
            unit.do.check_owned()
        do.check_hooks()
        if root.is_after_backward:
            do.forget_casts()
    weights.free_outdated(root)
    _begin_pass(unit, has_grad=has_grad)
    _refresh(root)


def _continue_pass(root: RootState, *, has_grad: bool) -> None:
    """Begin another pass inside a forward that ran a backward, such as a whole training step.

    An optimizer may have stepped since. Collective.
    """
    weights.free_outdated(root)
    _begin_root_pass(root)
    root.current.has_root = True
    if has_grad or root.pass_has_grad:
        root.current.expect_backward()
        if root.is_after_backward:
            root.do.forget_casts()
            root.is_after_backward = False
    _refresh(root)


def _begin_pass(unit: UnitState, *, has_grad: bool) -> None:
    root = unit.root
    root.pass_unit = unit
    has_pending = root.has_pending_backward
    if has_grad or not has_pending:
        # Otherwise memory of the backward would be freed for another stream than its own.
        root.do.begin_stream()
    root.pass_has_grad = has_grad
    root.is_early = root.num_to_compare[has_grad] > 0
    root.num_to_compare[has_grad] -= 1
    root.is_after_backward &= not has_grad
    kind = "forward" if has_grad else "evaluation"
    name = kind if unit.is_root else f"{kind} of {unit.fqn}"
    root.do.begin_allocations(name, no_pending_backward=not has_pending)
    root.gathers.begin_forward(unit)
    # An evaluation between a forward and its backward begins no root pass.
    has_root, current = unit.is_root and has_grad, root.current
    if (has_root and (current.has_root or current.has_forwards)) or current.is_over:
        _begin_root_pass(root)
    root.current.has_root |= has_root
    if has_grad:
        root.current.expect_backward()


def _begin_root_pass(root: RootState) -> None:
    root.current = root.new_pass()
    # Later forwards belong to another pass, whose backward has an order of its own.
    root.gathers.backward = ExecutionOrder()


def _begin_nested_pass(unit: UnitState, *, has_grad: bool) -> None:
    """Begin a pass inside the backward under way, such as a forward in a tensor hook.

    The pass prefetches nothing and does not change the expected order of the backward. Its buffers
    are part of the backward's allocation trace.
    """
    root = unit.root
    reductions.finish_others(root)
    root.nested = Nested(unit, root.gathers, root.pass_has_grad)
    root.gathers = Gathers(PrefetchLimit(units=0))
    root.pass_has_grad = has_grad
    if root.current.is_over:
        root.current = root.new_pass()
        # Later forwards belong to another pass; its backward does not reverse earlier forwards.
        root.nested.gathers.backward.ran = []
    if has_grad:
        root.current.expect_backward()


def _refresh(root: RootState) -> None:
    """Refresh what is refreshed when a pass begins, not at a unit's use. Collective."""
    do = root.do
    if do.engine_run != -1 and (not (root.ranks_may_differ and root.is_checked) or do.has_stale()):
        reductions.finish_others(root)
    if not (root.ranks_may_differ or root.has_formats):
        return
    if not root.is_checked:
        weights.check_units(root)
    if root.has_formats:
        do.write_stale()
    if root.ranks_may_differ:
        # Ranks may run different units, so every rank refreshes all groups here, not
        # at a unit's use: a rank that skips a unit still reduces with the others.
        do.refresh_all(async_op=root.gathers.limit.units != 0)


# -- forwards --------------------------------------------------------------------------------------


def recomputes(unit: UnitState) -> bool:
    """Return whether a forward that begins now is a recomputation.

    A recomputation repeats a forward of the pass whose backward is under way, and uses the weights
    of that forward. Any other forward inside a backward, such as one in a tensor hook, is a pass of
    its own; `RootState.refreshes` tells whether that pass refreshes stale weights.
    """
    root = unit.root
    return root.belongs_to_backward and unit in root.passed.recomputable


def begin_forward(unit: UnitState, *, has_grad: bool, is_packed: bool) -> None:
    """Gather the weights of a unit whose forward begins. Collective.

    Args:
        unit: The unit.
        has_grad: Whether gradients are enabled.
        is_packed: Whether hooks pack saved tensors, as in a non-reentrant checkpoint.
    """
    with unit.root.report(unit.fqn, "pre_forward"):
        root = unit.root
        inside = is_in_backward(root)
        again = inside and recomputes(unit)
        if unit.has_begun and again and unit.phase is Phase.FORWARD:
            # The last forward did not end, such as after KeyboardInterrupt, which runs no hooks.
            unit.move(Phase.IDLE)
        unit.has_begun, unit.is_recomputing = True, again
        if inside:
            if not (again or root.nested is not None):
                _begin_nested_pass(unit, has_grad=has_grad)
        elif unit.is_root or root.pass_unit is None:
            begin_pass(unit, has_grad=has_grad)
        else:
            if root.do.is_capturing:
                root.do.check_captured_pass(unit.do, "forward")
            if root.current.is_over:
                _continue_pass(root, has_grad=has_grad)
        unit.has_begun, unit.passed = True, root.current  # a repair ends all forwards
        unit.is_gathered_around = inside and unit.is_gathered
        if unit.phase is not Phase.BACKWARD:
            unit.move(Phase.FORWARD)
        weights.before_use(unit)
        if again:
            unit.is_recomputed = unit.was_recomputed = True
            if not is_packed:
                # A reentrant one, whose graph replaces that of the forward.
                root.do.forget_casts()
            reductions.prepare_recomputation(unit)
        elif unit.is_gathered and not unit.is_gathered_around:
            weights.free_if_changed(unit)
        weights.gather_for(unit, WeightUse.FORWARD)
        if not again:
            gathers = root.gathers
            gathers.forward.note(unit)
            weights.look_ahead(unit, gathers.forward, unit.settings.forward_prefetch)
            if root.pass_has_grad or has_grad:
                root.current.begin_forward(unit.reduced_with)


def begin_graph(unit: UnitState) -> Forward:
    """Begin a forward's graph, and return the record that its backward refers to."""
    root, again = unit.root, unit.is_recomputing
    number = root.process.numbers.next()
    begins = root.position if again else number
    passed = root.passed if again else root.current
    return Forward(unit, passed, number, begins, begins, again, root.nested is not None)


def end_graph(forward: Forward) -> None:
    """Note that the outputs of a forward exist."""
    if not forward.is_recomputed:
        root = forward.unit.root
        forward.ends = root.process.numbers.next()
        if forward.passed.is_over:
            # A backward ran inside it, such as that of a training step. What it computed since then
            # is part of another pass, on every rank.
            forward.passed = root.current


def end_unit_forward(unit: UnitState, *, has_grad: bool) -> None:
    """Free the weights of a unit whose forward ends, and count a pending backward.

    Args:
        unit: The unit.
        has_grad: Whether gradients are enabled.
    """
    with unit.root.report(unit.fqn, "post_forward"):
        if unit.is_recomputing:
            _end_recomputation(unit)
            return
        root = unit.root
        unit.pending_modules.clear()
        is_nested, pass_has_grad = root.nested is not None, root.pass_has_grad
        if not is_nested or unit.phase is Phase.FORWARD:
            unit.move(Phase.IDLE)
        if root.current.is_over and not is_nested:
            # Another rank may run units after a training step inside this forward.
            _continue_pass(root, has_grad=has_grad)
        ends_pass = root.is_pass_of(unit)
        if ends_pass:
            # Prefetched weights would be stale if an optimizer stepped next.
            weights.drop_prefetched(root)
            if root.ranks_may_differ:
                # The pass may have skipped units whose weights are being refreshed. A capture has
                # to wait for its own refreshes, and cannot wait for earlier ones.
                root.do.wait_for_refreshes()
            reductions.end_forward(root)
        # A unit to be recomputed runs its first forward without grad, in a pass with grad.
        if has_grad or pass_has_grad:
            root.current.add_use(unit.reduced_with)
            # A forward that ran its own backward expects no further backward.
            if unit.passed is None or not unit.passed.is_over:
                root.gathers.backward.note(unit)
                unit.num_pending_backwards += 1
        if unit.reshards_after_forward(has_grad=has_grad) and not unit.is_gathered_around:
            weights.free_after_use(unit, root.gathers.forward)
        if ends_pass and not (has_grad or is_nested):
            reductions.end_pass(root)
            root.do.wait_for_host_memory()


def fail_forward(unit: UnitState) -> None:
    """Return a unit to IDLE after a forward that raised."""
    was_recomputing, is_kept = unit.is_recomputing, unit.is_gathered_around
    unit.end_forward()
    if was_recomputing:
        # A recomputation may stop early by an exception, once all saved tensors are recomputed.
        _end_recomputation(unit)
        return
    if unit.phase is Phase.FORWARD:
        unit.move(Phase.IDLE)
        if not is_kept:
            weights.free(unit, after_error=True)
    if unit.root.is_pass_of(unit):
        reductions.end_forward(unit.root, failed=True)


def _end_recomputation(unit: UnitState) -> None:
    """Return to IDLE after a recomputation, and stay gathered for the backward."""
    if unit.phase is Phase.FORWARD:
        unit.move(Phase.IDLE)
        # `prepare_recomputation` removed an earlier entry, so the unit becomes the newest one.
        unit.root.recomputed[unit] = None


# -- forwards of units with several modules --------------------------------------------------------


def enter_module(unit: UnitState, module: int, *, has_grad: bool, is_packed: bool) -> bool:
    """Begin the unit's forward with the first of its modules that runs. Collective.

    A recomputation runs a single module, for its own backward.

    Args:
        unit: The unit.
        module: The module that is about to run.
        has_grad: Whether gradients are enabled.
        is_packed: Whether hooks pack saved tensors.

    Returns:
        Whether the unit's forward begins with the module.
    """
    several = len(unit.modules) > 1 and not recomputes(unit)
    begins = not several or module not in unit.pending_modules
    if begins:
        if several and unit.pending_modules:
            # The module ran already: a new forward begins, and the previous one skipped the others.
            end_unit_forward(unit, has_grad=has_grad)
        begin_forward(unit, has_grad=has_grad, is_packed=is_packed)
        if several:
            unit.pending_modules.update(unit.modules)
    root = unit.root
    # The backward may have to repeat a forward that records no graph (reentrant checkpoints), or
    # saves its tensors through hooks (non-reentrant ones).
    if root.pass_has_grad and not unit.is_recomputing and (is_packed or not has_grad):
        root.current.recomputable.add(unit)
    return begins


def leave_module(unit: UnitState, module: int, *, has_grad: bool) -> bool:
    """Note that one of several modules of a unit has run.

    Returns:
        Whether the unit's forward ends with it.
    """
    unit.pending_modules.discard(module)
    if unit.pending_modules and not has_grad and unit.root.pass_has_grad:
        # The recomputation of this module has a backward of its own.
        unit.root.current.add_use(unit.reduced_with)
    return not unit.pending_modules


# -- backwards -------------------------------------------------------------------------------------


def first_gradient(forward: Forward, *, has_grad: bool) -> None:
    """Gather weights when the first gradient reaches an output of a forward. Collective.

    Args:
        forward: The forward.
        has_grad: Whether the backward makes a graph (`create_graph=True`).

    Raises:
        RuntimeError: The backward makes a graph, and its weights are freed before a second
            differentiation.
    """
    unit = forward.unit
    root = unit.root
    if forward.number < unit.first_number:
        raise reductions.unknown(unit)
    is_begun = unit.phase is Phase.BACKWARD and unit.backward_number == forward.number
    if not is_begun or root.engine is not Engine.RUNNING:
        # A further gradient of its outputs may be one of an inner unit's, whose backward goes on.
        reductions.finish_deferred(root, forward.number)
    if unit.phase is Phase.BACKWARD:
        if forward.number < unit.backward_number and not forward.is_nested:
            # An earlier forward of a unit whose end no hook reported, such as of the root. The
            # engine runs the most recently created nodes first, so the later forward's is over.
            unit.num_pending_backwards = max(0, unit.num_pending_backwards - 1)
            unit.backward_number = forward.number
            # Other ranks may reach units of that forward, which this rank did not run.
            reductions.join(unit, forward.passed, forward.ends)
        return
    if has_grad and unit.is_collective:
        raise RuntimeError(
            f"{unit.do.name} is in a backward with create_graph=True, and its weights are dropped "
            "after it (ZeRO-3); use sharding_strategy='optim_grads' to differentiate twice"
        )
    with unit.root.report(unit.fqn, "pre_backward"):
        reductions.join(unit, forward.passed, forward.ends)
        unit.move(Phase.BACKWARD)
        unit.backward_number = forward.number
        if not forward.has_end_hook:
            reductions.defer(forward)
        unit.is_recomputed, unit.was_recomputed = unit.was_recomputed, False
        root.pending.update(unit.reduced_with)
        root.unit = unit
        root.recomputed.pop(unit, None)
        weights.before_use(unit)
        weights.gather_for(unit, WeightUse.BACKWARD)
        weights.look_ahead(unit, root.gathers.backward, unit.settings.backward_prefetch)
        # Fused kernels write gradients before their hooks run, so room is made here as well.
        reductions.make_room(root)


def last_gradient(forward: Forward, *, has_grad: bool) -> None:
    """Free weights and reduce gradients when the last node of a forward has run. Collective.

    Args:
        forward: The forward.
        has_grad: Whether the backward makes a graph.

    Raises:
        RuntimeError: The backward ran without gathered weights.
    """
    unit = forward.unit
    root = unit.root
    if unit.phase is not Phase.BACKWARD:
        unit.do.check_is_gathered()
        first_gradient(forward, has_grad=has_grad)
    root.deferred.pop(forward.number, None)
    with unit.root.report(unit.fqn, "post_backward"):
        unit.num_pending_backwards = max(0, unit.num_pending_backwards - 1)
        if forward.is_nested and forward.number > unit.backward_number:
            # The backward of an earlier forward, in which this one is nested, goes on.
            return
        if unit.settings.reshard_after_backward:
            # First: a reduction may allocate memory, and wait for earlier reductions.
            weights.free_after_use(unit, root.gathers.backward)
        reductions.end_use(root, unit.reduced_with, forward.begins)
        unit.move(Phase.IDLE)


def expect_gradient(unit: UnitState) -> None:
    """Begin a backward at a gradient that reached a weight before an output of its unit."""
    reductions.join(unit, unit.root.current)


def is_in_backward(root: RootState) -> bool:
    """Return whether what the caller does now is part of a backward that is under way.

    The caller of a backward that failed may go on before the engine's thread drops the callback.
    """
    if root.engine is Engine.RUNNING and root.do.engine_run == -1:
        engine_dropped(root)
    return root.engine is Engine.RUNNING


def engine_dropped(root: RootState) -> None:
    """Note that the engine dropped the callback at the end of its run without calling it."""
    if root.engine is Engine.RUNNING:
        root.engine = Engine.FAILED


# -- uses of sharded parameters themselves ---------------------------------------------------------


def begin_direct_use(unit: UnitState) -> tuple[Pass[UnitState], int, bool]:
    """Count a use of a sharded parameter itself, outside the forward of its unit.

    Returns:
        The pass that the use belongs to; its number; and whether it was counted: a recomputation
        repeats a use that was counted in the forward.
    """
    root = unit.root
    if is_in_backward(root) and root.nested is None:
        return root.passed, root.position, False
    if root.is_between_passes:
        # The use may begin a pass.
        weights.free_outdated(root)
    if root.current.is_over:
        if root.pass_unit is None:
            _begin_root_pass(root)
        else:
            # Inside a forward that ran a backward; another rank may run a unit there instead.
            _continue_pass(root, has_grad=True)
    passed = root.current
    passed.expect_backward()
    passed.add_direct_use(unit)
    if not passed.has_root:
        passed.turn.last = root.process.numbers.next()
    return passed, root.process.numbers.next(), True


def direct_gradient(
    unit: UnitState, group: GroupCommands, passed: Pass[UnitState], number: int
) -> None:
    """Make room for the gradient of a use of a sharded parameter itself.

    Args:
        unit: The unit that owns the parameter.
        group: The group of the parameter.
        passed: The pass of the use.
        number: The number of the use.
    """
    root = unit.root
    if number < unit.first_number:
        raise reductions.unknown(unit)
    if not root.is_scheduled:
        reductions.finish_deferred(root, number)
        reductions.join(unit, passed, number)
        root.pending.add(unit)  # of a recomputation too
    if not group.is_arriving:
        reductions.make_room(root)


def end_direct_use(unit: UnitState, number: int) -> None:
    """Reduce what is due after the gradient of a counted direct use was added. Collective."""
    if not unit.root.is_scheduled:
        reductions.end_use(unit.root, [unit], number)


# -- schedules -------------------------------------------------------------------------------------


def begin_schedule(unit: UnitState) -> None:
    """Begin a micro-batch of a schedule that runs modules part by part. Collective.

    Args:
        unit: The root's unit.
    """
    root = unit.root
    if not root.is_scheduled:
        begin_pass(unit, has_grad=True)
        reductions.end_forward(root)
        root.gathers.begin_schedule()
    root.num_scheduled += 1


def begin_use(unit: UnitState) -> None:
    """Gather weights for a use that a schedule reports. Collective."""
    unit.num_users += 1
    weights.before_use(unit)
    weights.gather_for(unit, WeightUse.BOTH)
    # Prefetches follow the order of uses in the last step, forwards and backwards alike.
    order = unit.root.gathers.schedule
    order.note(unit)
    weights.look_ahead(unit, order)


def release(unit: UnitState, *, reshard: bool) -> None:
    """End a use that a schedule reports.

    Args:
        unit: The unit.
        reshard: Whether to free the weights after the last use.

    Raises:
        RuntimeError: The unit is not in use.
    """
    if not unit.num_users:
        raise RuntimeError(
            f"{unit.do.name} is not in use; call begin_forward or begin_backward on it first"
        )
    unit.num_users -= 1
    if reshard and not unit.num_users:
        weights.free_after_use(unit, unit.root.gathers.schedule)


# -- users -----------------------------------------------------------------------------------------


def unshard(unit: UnitState, *, async_op: bool) -> None:
    """Gather the weights of a unit for the user, who waits for them. Collective.

    Args:
        unit: The unit.
        async_op: Whether to return before the gathers are done.
    """
    begin_reading(unit.root)
    weights.gather(unit, WeightUse.BOTH, async_op=async_op)


def begin_reading(root: RootState) -> None:
    """Refresh stale weights before units are gathered for the user. Collective.

    Below ZeRO-3 those of all units, in the order of a pass: another rank may have begun one. Units
    that stayed gathered while an optimizer stepped are gathered again.
    """
    graph_replayed(root)
    if root.is_between_passes and root.refreshes:
        weights.free_outdated(root)
        _refresh(root)


def begin_capture(root: RootState) -> None:
    """Begin to capture a pass or a step of the optimizer in a CUDA graph."""
    root.do.begin_capture()
    root.has_graph = True


def graph_replayed(root: RootState) -> None:
    """Note that a captured graph, if there is one, may have been replayed and changed weights."""
    root.weight_version += root.has_graph


def weights_changed(root: RootState) -> None:
    """Note that main weights may have changed in a way that no version counter shows."""
    root.weight_version += 1


def make_idle(root: RootState) -> None:
    """Free the weights of all units, also after an exception."""
    if root.needs_repair:
        reductions.repair(root)
    weights.drop_prefetched(root)
    weights.free_all(root.units)


def adopt(root: RootState, units: Sequence[UnitState]) -> None:
    """Make units part of a new root, the root's own first, parents before children."""
    root.units = list(units)
    for unit in units:
        unit.root, unit.is_root = root, unit is units[0]
    root.current = root.new_pass()
