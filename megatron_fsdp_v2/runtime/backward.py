"""The backward of the units under one root: its pass, its reductions in flight, and its end."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_fsdp_v2._compiler import uncompiled
from megatron_fsdp_v2.comm.backends import is_capturing
from megatron_fsdp_v2.dtensor.sharded_rows import plain_attributes, raw_grad
from megatron_fsdp_v2.params.gradients import GroupGrads
from megatron_fsdp_v2.runtime.schedule import (
    AT_END,
    FORWARD_NUMBERS,
    UNKNOWN,
    RootPass,
    live,
)
from megatron_fsdp_v2.runtime.unit_checks import check_captured_pass, compare_unit

if TYPE_CHECKING:
    from megatron_fsdp_v2.runtime.context import Context
    from megatron_fsdp_v2.runtime.unit import Unit

# Backwards that began and have neither ended nor been repaired.
_UNDER_WAY: set[weakref.ref[Backward]] = set()

type _Found = list[tuple[GroupGrads, list[torch.Tensor | None]]]


class ForwardRecord:
    """One forward of a unit, held by the hooks in its graph.

    Attributes:
        passed: The forward of the root that it was part of.
        number: Sequence number; forwards that begin later have larger numbers.
        begins: Position of a backward that ends the unit's backward; see `RootPass`.
        ends: Position of a backward that begins the unit's backward.
        is_recomputed: Whether it repeats a forward.
        is_nested: Whether it ran in a pass nested in a backward.
        has_post_backward_hook: False if inputs require gradients, but no hook may mark the end of
            its backward.
    """

    def __init__(self, unit: Unit, *, is_recomputed: bool) -> None:
        context = unit.context
        self._unit = unit
        self.is_recomputed = is_recomputed
        self.passed = context.backward.passed if is_recomputed else context.root_pass
        self.is_nested = context.is_nested
        self.number = next(FORWARD_NUMBERS)
        self.begins = self.ends = context.backward.position if is_recomputed else self.number
        self.has_post_backward_hook = True

    def pre_backward(self) -> None:
        """Called when the first gradient reaches an output."""
        self._unit.pre_backward(self)

    def post_backward(self) -> None:
        """Called when the engine has run the unit's last node in the backward."""
        self._unit.post_backward(self)

    def defer_post_backward(self) -> None:
        """Called when the engine has run an input's node; other nodes of the unit may follow."""
        self._unit.context.backward.deferred[self.number] = self

    def finish(self) -> None:
        """End its backward if it is under way; the engine runs other nodes next."""
        if self._unit.is_in_backward:
            self._unit.post_backward(self)


class Backward:
    """The backward of the units under one root, one at a time.

    It begins with the first unit that the engine reaches, and ends in a callback of the engine, or,
    for a schedule that runs modules part by part, when the schedule says so. In between, each unit
    is reduced in its turn (`RootPass`). Before the number of full gradient buffers exceeds its
    bound, the oldest reduction is waited for; the reduction along the outer axis follows, with its
    own bound. At the end, ranks tell each other which groups had gradients.

    Attributes:
        context: Context of the units.
        passed: The pass that the current or latest backward belongs to.
        position: Number of the forward that the backward has reached.
        deferred: Forwards whose backward has to be ended from outside, by number.
        num_scheduled: Micro-batches under way in a schedule that runs modules part by part; see
            `ScheduledUnits`.
        has_unreduced: Whether the latest backward left gradients to be synchronized.
        is_draining: Whether the latest wait was for all reductions, not for room.
    """

    def __init__(self, context: Context) -> None:
        # Weak, so that a deleted model frees its memory at once.
        self.context: Context = weakref.proxy(context)
        self.passed = RootPass()
        self.position = UNKNOWN
        self.deferred: dict[int, ForwardRecord] = {}
        self.num_scheduled = 0
        self.has_unreduced = False
        self.is_draining = False
        # The end-of-backward callback; the engine drops it together with a failed graph task.
        self._end: weakref.ref[object] | None = None
        self._graph_task = -1
        # Units that synchronized gradients when it began, for a repair after a failure.
        self._synced: weakref.WeakSet[Unit] = weakref.WeakSet()
        # Units whose backward began and that are not reduced yet.
        self._pending: set[weakref.ref[Unit]] = set()
        # The unit whose backward began last.
        self._unit: Callable[[], Unit | None] = lambda: None
        # Recomputed units, kept gathered for their backwards, the oldest one first.
        self._recomputed: dict[weakref.ref[Unit], None] = {}
        # Groups of each unit in a reduction along the inner axis, and whether the outer axis
        # follows; groups of each unit in a reduction along the outer axis.
        self._inner: deque[tuple[list[GroupGrads], bool]] = deque()
        self._outer: deque[list[GroupGrads]] = deque()

    @property
    def is_under_way(self) -> bool:
        """Whether a backward is under way, or failed and is not repaired yet."""
        return self._end is not None

    @property
    def is_running(self) -> bool:
        """Whether a backward is under way and has not failed. Called for every gradient."""
        return self._end is not None and self._end() is not None

    @property
    def has_failed(self) -> bool:
        """Whether the latest backward ended in an exception and is not repaired yet."""
        return self._end is not None and self._end() is None

    # -- beginning ----------------------------------------------------------------------------

    def join(self, passed: RootPass, unit: Unit, position: int = UNKNOWN) -> None:
        """Begin a backward, with a callback at its end, unless one is under way.

        Args:
            passed: The pass of the unit whose backward begins.
            unit: The unit, for error messages.
            position: Number of the forward that the engine has reached, if known.
        """
        context = self.context
        if self.has_failed:
            context.repair()
        if not self.is_under_way:
            check_captured_pass(context, f"the backward of {unit.name}")
            # Only the engine holds the callback, so it is freed when the backward ends or fails. It
            # keeps the context of a model that was deleted after its forward.
            end = functools.partial(uncompiled(_end_backward), unit.context)
            self._end = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
            if context.ranks_may_differ:
                syncing = (unit for unit in context.units() if unit.syncs_gradients)
                self._synced = weakref.WeakSet(syncing)
            context.gathers.begin_backward()
            self._graph_task = torch._C._current_graph_task_id()
        elif passed is self.passed:
            return
        self.reduce_in_turn(position)
        self.finish_others(position)
        if weakref.ref(self) in _UNDER_WAY:
            # One backward through several forwards of the root reduces each unit once per forward,
            # after the units of other roots whose turn is earlier.
            turn = self.passed.turn
            self._finish([e for e in self._together() if e.passed.turn > turn], position)
            self.reduce(self.passed.due(is_left=True))
        _UNDER_WAY.add(weakref.ref(self, _UNDER_WAY.discard))
        self.passed = passed
        passed.begin_backward()
        self._pending.update(passed.used_directly)

    def begin_unit(self, unit: Unit) -> None:
        """Record that the backward of a unit begins, which ends its recomputation."""
        self._pending.update(unit.reduced_with)
        self._unit = ref = weakref.ref(unit)
        self._recomputed.pop(ref, None)

    def begin_direct_use(self, unit: Unit, passed: RootPass, position: int) -> None:
        """Record that the gradient of a use of a sharded parameter itself has arrived.

        Args:
            unit: The unit that owns the parameter.
            passed: The pass of the use.
            position: Number of the use.
        """
        if self.has_failed:
            self.context.repair()
        self.finish_deferred(position)
        self.join(passed, unit, position)
        self._pending.add(weakref.ref(unit))  # of a recomputation too

    def finish_deferred(self, number: int) -> None:
        """End deferred backwards of forwards that began after this one.

        The engine runs the most recently created nodes first, so these backwards are over.
        """
        while self.deferred and (latest := max(self.deferred)) > number:
            self.deferred.pop(latest).finish()

    def _together(self) -> list[Backward]:
        """Return the backwards of all roots in this run of the engine, in order of their turns."""
        task = self._graph_task
        found = [each for each in live(tuple(_UNDER_WAY)) if each._graph_task == task]
        if len(found) > 1:
            found.sort(key=lambda each: each.passed.turn, reverse=True)
        return found or [self]

    # -- recomputations -----------------------------------------------------------------------

    def prepare_recomputation(self, unit: Unit) -> None:
        """Prepare to recompute a unit.

        Reshards the oldest recomputed units if they and this unit exceed the prefetch limit.
        """
        self._recomputed.pop(weakref.ref(unit), None)
        # These units run next in the backward, the newest first.
        waiting = live(reversed(self._recomputed))
        current = self._unit()
        # The recomputed region belongs to a unit whose backward has begun and that is gathered.
        is_for_another = (
            current is not None
            and current is not unit
            and current.is_unsharded
            and not unit.is_inside(current)
        )
        limit = self.context.gathers.limit
        kept = limit.fitting([unit, *waiting] if is_for_another else waiting)
        for other in reversed(waiting):
            if other not in kept:
                del self._recomputed[weakref.ref(other)]
                other.reshard()

    def keep_recomputed(self, unit: Unit) -> None:
        """Leave a recomputed unit gathered for its backward."""
        ref = weakref.ref(unit)
        self._recomputed.pop(ref, None)
        self._recomputed[ref] = None

    # -- reductions ---------------------------------------------------------------------------

    def end_use(self, refs: Sequence[weakref.ref[Unit]], position: int) -> None:
        """Reduce the units whose turn has come after the backward of one use. Collective.

        Args:
            refs: The units whose parameters were used; see `Unit.reduced_with`.
            position: Number of the forward that the engine has reached.
        """
        refs = self.passed.count_backward(refs)
        self.reduce(live([ref for ref in refs if ref in self._pending]))
        self.reduce_in_turn(position)

    def reduce_in_turn(self, position: int) -> None:
        """Reduce units whose turn has come, of all roots in the backward under way. Collective.

        Args:
            position: Number of the forward that the engine has reached.
        """
        self.position = position
        for backward in self._together():
            passed = backward.passed
            if passed.is_reduced:
                continue
            if passed.waits(position):
                return
            if due := passed.due(is_left=passed.first > position):
                backward.reduce(due)
            if not passed.is_reduced:
                return

    def finish_others(self, position: int = UNKNOWN) -> None:
        """Reduce all units of other roots, before this root communicates in their backward.

        Ranks that run different units may have reduced different numbers of them so far. A backward
        that may go on reduces all its units once more. Roots that reduce in turn are left out.
        Collective.

        Args:
            position: Number of the forward that the engine has reached, if known.
        """
        task = torch._C._current_graph_task_id()
        reduces_in_turn = self.is_running and self.context.ranks_may_differ
        others = [
            other
            for other in sorted(live(tuple(_UNDER_WAY)), key=lambda other: -other.passed.turn)
            if other is not self and other.context.ranks_may_differ and other.is_running
            if not (reduces_in_turn and other._graph_task == task)
        ]
        self._finish(others, position)

    @staticmethod
    def _finish(others: Sequence[Backward], position: int) -> None:
        for other in others:
            other.reduce(other.passed.due(is_left=True))
        for other in others:
            if other.passed.first < position:
                other._drain()
                other.passed.begin_backward()

    def reduce(self, units: Iterable[Unit]) -> None:
        """Reduce units in turn, with or without a gradient on this rank. Collective."""
        for unit in units:
            self._pending.add(weakref.ref(unit))
            self._reduce(unit, synchronize=unit.syncs_gradients)

    def _reduce(self, unit: Unit, *, synchronize: bool) -> None:
        """Reduce the gradients of a unit that arrived, if they are due. Collective.

        A unit whose backward ran takes part with all its groups: which of them got a gradient may
        differ between ranks.

        Args:
            unit: The unit.
            synchronize: Whether gradients are reduced into `param.grad`. Otherwise they stay
                unreduced between micro-batches if the strategy accumulates them.
        """
        context, ref = self.context, weakref.ref(unit)
        is_pending = ref in self._pending
        # A unit that keeps its gradient stays pending until it is reduced: another rank may have a
        # gradient of it where this rank has none.
        if synchronize or not any(grads.accumulates_unreduced for grads in unit.grads()):
            self._pending.discard(ref)
        is_async = context.options.enable_async_reduce_grad
        with unit.observed_phase("reduce_grad"):
            due = [
                group.grads
                for group in unit.groups
                if (
                    group.grads.has_gradient
                    or (is_pending and (group.is_trained or group.grads.is_owed))
                )
                and (synchronize or not group.grads.accumulates_unreduced)
            ]
            if due:
                # Buffers that accumulate micro-batches were allocated before.
                self.make_room()
                if context.compares_collectives:
                    has_outer = synchronize and any(grads.reduces_partial for grads in due)
                    along_all = has_outer and not context.ranks_may_differ
                    compare_unit(context, unit, "reduce", along_all=along_all)
                # A repair needs the reductions that were issued before one that fails.
                issued: list[GroupGrads] = []
                self._inner.append((issued, synchronize))
                for grads in due:
                    grads.reduce(async_op=is_async)
                    issued.append(grads)
            if not is_async:
                self._drain()

    def _reduce_rest(self, unit: Unit, *, synchronize: bool) -> None:
        """Reduce remaining gradients of a unit, including partial ones along the outer axis."""
        self._reduce(unit, synchronize=synchronize)
        if synchronize:
            in_flight = [grads for groups, _ in self._inner for grads in groups]
            for grads in unit.grads():
                if grads.has_partial and grads not in in_flight:
                    self._reduce_outer([grads])

    def _owe(self, unit: Unit) -> None:
        """Record the trained parameters of a unit whose gradients are synchronized later."""
        if not unit.syncs_gradients:
            for grads in unit.grads():
                grads.owe()

    def make_room(self) -> None:
        """Wait for the oldest reductions until the bound allows another full gradient buffer."""
        self.is_draining = False
        while len(self._inner) >= self.context.options.max_live_grad_buffers:
            self._finish_inner()

    def _drain(self) -> None:
        """Wait for all reductions."""
        self.is_draining = True
        while self._inner:
            self._finish_inner()
        while self._outer:
            self._finish_outer()

    def _finish_inner(self) -> None:
        """Wait for the oldest unit's reductions, and begin those along the outer axis."""
        groups, synchronize = self._inner.popleft()
        if not groups:
            return
        with self.context.observer.phase(groups[0].name, "finish_reduction"):
            for grads in groups:
                grads.end_inner()
        if following := [grads for grads in groups if synchronize and grads.reduces_partial]:
            self._reduce_outer(following)

    def _reduce_outer(self, groups: Sequence[GroupGrads]) -> None:
        options, observer = self.context.options, self.context.observer
        # Otherwise partial shards of all units would be live at the end of a backward.
        while len(self._outer) >= options.max_live_grad_buffers:
            self._finish_outer()
        issued: list[GroupGrads] = []
        self._outer.append(issued)
        with observer.phase(groups[0].name, "finish_reduction"):
            for grads in groups:
                grads.reduce_outer(async_op=options.enable_async_reduce_grad)
                issued.append(grads)

    def _finish_outer(self) -> None:
        groups = self._outer.popleft()
        if not groups:
            return
        with self.context.observer.phase(groups[0].name, "finish_reduction"):
            for grads in groups:
                grads.end_outer()

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction is in flight."""
        return bool(self._inner or self._outer)

    # -- end ----------------------------------------------------------------------------------

    def end(self) -> None:
        """End a backward: reduce remaining gradients and bring every unit to IDLE. Collective.

        The first callback ends the backward of all roots, in order of their turns: the callbacks of
        several roots may run in another order on another rank.
        """
        if not self.is_under_way:
            return
        self.reduce_in_turn(AT_END)
        together = self._together()
        for backward in together:
            backward._end_alone()
        # Hooks run last: they may step weights, and may raise.
        for backward in together:
            backward._run_hooks_of_synced()

    def _end_alone(self) -> None:
        context, units = self.context, self.context.units()
        synchronize = any(unit.syncs_gradients for unit in units)
        if context.ranks_may_differ:
            # All had their turn, also if a double backward reached some of them again since.
            self._pending.clear()
        for unit in reversed(units):
            if unit.settings.reshard_after_backward:
                unit.reshard()
            is_pending = weakref.ref(unit) in self._pending
            if is_pending or any([group.has_unreduced for group in unit.groups]):
                self._reduce_rest(unit, synchronize=unit.syncs_gradients)
            self._owe(unit)
            unit.end_backward()
        context.gathers.drop_prefetched()
        self._end_reductions(synchronize=synchronize)
        # An optimizer without torch's step hooks may step now.
        context.weight_version += synchronize
        self._forget()
        context.end_pass("synchronized backward" if synchronize else "backward")

    def end_scheduled(self) -> None:
        """End a micro-batch's backward in a schedule: reduce remaining gradients. Collective.

        Units that other micro-batches use stay gathered.
        """
        context, units = self.context, self.context.units()
        synchronize = any(unit.syncs_gradients for unit in units)
        for unit in reversed(units):
            self._reduce_rest(unit, synchronize=unit.syncs_gradients)
            self._owe(unit)
        self._end_reductions(synchronize=synchronize)
        self.num_scheduled -= 1
        if not context.is_scheduled:
            context.gathers.drop_prefetched()
            context.weight_version += synchronize
            context.end_pass("synchronized schedule" if synchronize else "schedule")
        self._run_hooks_of_synced()

    def synchronize(self, units: Sequence[Unit]) -> None:
        """Reduce all gradients of these units into `param.grad`. Collective.

        Args:
            units: Some of the units, parents before children.
        """
        # If every backward reduces (ZeRO-2), no gradient is left: units that some rank skipped were
        # reduced in their turn.
        is_pending = self.context.ranks_may_differ and self.has_unreduced
        for unit in reversed(units):
            self._collect_assigned(unit)
            if is_pending and any(grads.accumulates_unreduced for grads in unit.grads()):
                self._pending.add(weakref.ref(unit))
            self._reduce_rest(unit, synchronize=True)
        self._end_reductions(synchronize=True)
        # As after a synchronized backward: an optimizer may step next.
        self.context.weight_version += 1
        _run_hooks(reversed(units))

    def _collect_assigned(self, unit: Unit) -> None:
        """Collect gradients that were assigned to gathered parameters, not computed by a backward.

        Zero-bubble schedules of torch's pipelining assign the results of `torch.autograd.grad`.
        """
        for group in unit.groups:
            with plain_attributes():
                grads = list(map(raw_grad, group.unsharded_params))
            for index, grad in enumerate(grads):
                if grad is not None:
                    if not group.grads.is_arriving:
                        self.make_room()
                    group.grads.collect(index, group.unsharded_params[index])

    def _end_reductions(self, *, synchronize: bool) -> None:
        """Wait for all reductions, and drop gradients to which no rank contributed."""
        self._drain()
        groups = _grads_of(self.context.units())
        _end_missing(groups)
        for grads in groups:
            grads.end_reductions()
        self.has_unreduced = not synchronize

    def _run_hooks_of_synced(self) -> None:
        _run_hooks([unit for unit in reversed(self.context.units()) if unit.syncs_gradients])

    def _forget(self) -> None:
        self.context.end_nested_pass()
        _UNDER_WAY.discard(weakref.ref(self))
        self._graph_task, self.position, self._end = -1, UNKNOWN, None
        self._unit = lambda: None
        self.deferred.clear()
        self._recomputed.clear()

    # -- after an exception -------------------------------------------------------------------

    def abandon(self) -> list[Context]:
        """Drop the gradients of a failed backward that a reduction had not finished. Collective.

        Roots in the same backward are repaired together, since ranks that did not fail reduced
        their units in order.

        Returns:
            The contexts of these roots.
        """
        together = self._together()
        failed = [each for each in together if each.is_under_way or each.context.is_scheduled]
        # A repair may run in inference mode, and the gradients written here are used outside it.
        with torch.inference_mode(False), torch.no_grad():
            found = [backward._reduce_late() for backward in failed]
            for backward, before in zip(failed, found, strict=True):
                backward._drop_gradients(before)
        for backward in together:
            backward.num_scheduled = 0
            backward._pending.clear()
            backward._forget()
        return [backward.context for backward in together]

    def _reduce_late(self) -> _Found:
        """Reduce units that this rank did not reduce in a failed backward. Collective.

        Otherwise the reductions of a rank that did would pair with those of the next backward.

        Returns:
            Groups whose gradients a reduction may have written, with those from before.
        """
        dropped = [grads for groups, _ in self._inner for grads in groups]
        dropped += [grads for groups in self._outer for grads in groups]
        # Ranks that follow one schedule reduce without this order.
        late = [] if self.context.is_scheduled else self.passed.due(is_left=True)
        for unit in late:
            reduced = unit in self._synced
            dropped += [g for g in unit.grads() if reduced or not g.accumulates_unreduced]
        before = [(grads, grads.param_grads()) for grads in dropped]
        for unit in late:
            self._pending.add(weakref.ref(unit))
            self._reduce(unit, synchronize=unit in self._synced)
        return before

    def _drop_gradients(self, before: _Found) -> None:
        context = self.context
        groups = _grads_of(context.units())
        if context.ranks_may_differ and not context.is_scheduled:
            # Another rank may have finished this backward.
            self._drain()
            _end_missing(groups)
            context.weight_version += bool(self._synced)
        self._inner.clear()
        self._outer.clear()
        for grads in groups:
            grads.wait()
        for grads, found in before:
            grads.restore(found)
        for grads in groups:
            grads.abandon()


def _end_backward(context: Context) -> None:
    context.backward.end()


def _grads_of(units: Iterable[Unit]) -> list[GroupGrads]:
    return [grads for unit in units for grads in unit.grads()]


def _end_missing(groups: Iterable[GroupGrads]) -> None:
    """Set gradients that no rank had in this backward to None, after its reductions. Collective.

    Ranks sum one flag per parameter of the reduced groups, in one all-reduce for each mesh. The
    host waits for the sums only if this rank lacks a gradient that another rank may have.

    Raises:
        RuntimeError: The host would wait while a CUDA graph is captured.
    """
    by_mesh: dict[tuple[object, ...], list[GroupGrads]] = {}
    for grads in groups:
        if grads.is_written:
            by_mesh.setdefault(grads.reduced_over, []).append(grads)
    for over, written in by_mesh.items():
        context = written[0].context
        # A property is read only where needed: most groups have all their gradients.
        depends = [g for g in written if not all(g.contributed) and g.depends_on_ranks]
        found = [each for grads in written for each in grads.contributed]
        if over and not is_capturing(context.device):
            flags = torch.ones(len(found), dtype=torch.float32, device=context.device)
            for has_gradient, run in itertools.groupby(range(len(found)), found.__getitem__):
                if not has_gradient:
                    # Kernels: a copy of flags from the host would wait for the device.
                    missing = list(run)
                    flags[missing[0] : missing[-1] + 1].zero_()
            context.all_reduce(flags)
            if depends:
                found = [total > 0 for total in flags.tolist()]
        elif over and depends:
            raise RuntimeError(
                f"a parameter of {depends[0].name} had no gradient in a backward captured in a "
                "CUDA graph, so the host would wait to see whether another rank had one; capture a "
                "step that uses every trained parameter, freeze those that it does not use, or "
                "shard with on_missing_grad='zero' if some parameter of each unit is used"
            )
        flags_left = iter(found)
        for grads in written:
            grads.end_missing(list(itertools.islice(flags_left, len(grads.contributed))))


def _run_hooks(units: Iterable[Unit]) -> None:
    """Call users' post-accumulate-grad hooks."""
    with torch.no_grad():
        for grads in _grads_of(units):
            grads.run_hooks()
