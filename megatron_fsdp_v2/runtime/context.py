"""State shared by the units of one root: collectives under way, passes, the end of a backward."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_v2._compiler import uncompiled
from megatron_fsdp_v2.comm.backends import is_capturing
from megatron_fsdp_v2.comm.rank_checks import CheckRanks
from megatron_fsdp_v2.memory.observer import Observer
from megatron_fsdp_v2.runtime.schedule import (
    AT_END,
    FORWARD_NUMBERS,
    UNKNOWN,
    GatherSchedule,
    OrderedReductions,
    PrefetchLimit,
    ReductionQueue,
    RootPass,
    live,
)
from megatron_fsdp_v2.runtime.unit_checks import check_captured_pass, compare_unit

if TYPE_CHECKING:
    from megatron_fsdp_v2.comm.interface import Communicator
    from megatron_fsdp_v2.memory.allocator import Allocator
    from megatron_fsdp_v2.params.gradients import GroupGrads
    from megatron_fsdp_v2.params.group import ParameterGroup
    from megatron_fsdp_v2.runtime.options import RuntimeOptions
    from megatron_fsdp_v2.runtime.phases import ForwardRecord
    from megatron_fsdp_v2.runtime.unit import Unit

__all__ = ["Context"]

# Contexts whose backward began and has neither ended nor been repaired.
_UNDER_WAY: weakref.WeakSet[Context] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True, slots=True)
class _NestedPass:
    """A pass nested in a backward, and what the context holds again at its end.

    Attributes:
        unit: The unit that the pass began with.
        gathers: Order of gathers of the enclosing backward.
        pass_has_grad: Whether gradients were enabled when the enclosing pass began.
    """

    unit: weakref.ref[Unit]
    gathers: GatherSchedule
    pass_has_grad: bool


class Context:
    """State shared by the units under one root.

    Attributes:
        communicator: Issues collectives.
        allocator: Makes temporary buffers.
        options: Options of the root.
        observer: Receives events of the units.
        gathers: Prefetches units.
        reductions: Gradient reductions under way.
        ordered_reductions: Order in which a backward reduces units; None for a mesh of one rank.
        weight_version: Counts events after which main weights may have changed.
        root_pass: Counts the forwards of units in the root's latest forward with gradients (not a
            recomputation), and the forwards of units that ran outside of it.
        backward_pass: The pass that the current or latest backward belongs to.
        synced_in_backward: The units that synchronized gradients when that backward began.
        has_gradient: Whether a gradient of a parameter arrived in that backward.
        has_unreduced: Whether a backward left gradients to be synchronized.
        pass_has_grad: Whether gradients were enabled when the latest pass began.
        forward_failed: Whether a pass ended in an exception.
        is_checked: Whether ranks have compared their units.
        num_registrations: Registrations of parameters at the latest check of those that no unit
            owns; see `check_owned`.
        has_formats: Whether the weight format of any group communicates.
        num_scheduled: Micro-batches under way in a schedule that runs modules part by part; see
            `ScheduledUnits`.
        graph_task: Number that the engine gave that backward.
        position: Number of the forward that the backward under way has reached.
        device: Device of the units' buffers.
        is_captured: Whether the latest pass is captured in a CUDA graph.
        has_graph: Whether a pass or a step was captured: replays change weights and run no hook.
        deferred: Forwards whose backward has to be ended from outside, by number.
    """

    def __init__(
        self, communicator: Communicator, allocator: Allocator, options: RuntimeOptions
    ) -> None:
        self.communicator = communicator
        self.allocator = allocator
        self.options = options
        self.observer = Observer()
        self.gathers: GatherSchedule = GatherSchedule(options.prefetch_limit)
        self.reductions = ReductionQueue(options, self.observer)
        self.ordered_reductions: OrderedReductions | None = None
        self.weight_version = 0
        self.root_pass: RootPass = RootPass()
        self.backward_pass = self.root_pass
        self.synced_in_backward: weakref.WeakSet[Unit] = weakref.WeakSet()
        self.has_gradient = False
        self.has_unreduced = False
        self.pass_has_grad = False
        self.forward_failed = False
        self.is_checked = False
        self.num_registrations = 0
        self.has_formats = False
        self.num_scheduled = 0
        self.graph_task = -1
        self.position = UNKNOWN
        self.device: torch.device | None = None
        self.is_captured = False
        self.has_graph = False
        self.deferred: dict[int, ForwardRecord] = {}
        self._pass_unit: Callable[[], Unit | None] = lambda: None
        self._nested: _NestedPass | None = None
        self._units: list[weakref.ref[Unit]] = []
        # Kept gathered for their backwards, the oldest one first.
        self._recomputed: dict[weakref.ref[Unit], None] = {}
        # The unit whose backward began last.
        self._in_backward: Callable[[], Unit | None] = lambda: None
        self._end_of_backward: weakref.ref[object] | None = None

    def set_units(self, units: Sequence[Unit]) -> None:
        """Register the units, parents before children as `modules()` lists them.

        Units hold the context; the context holds units weakly.

        Args:
            units: All units under the root, the root's own first.
        """
        self._units = [weakref.ref(unit) for unit in units]
        groups = self.groups()
        self.device = next((group.device for group in groups), None)
        self.has_formats = any(group.format.communicates for group in groups)
        if any(axis.size > 1 for group in groups for axis in group.axes):
            # If no use of a unit is a collective, ranks may run different units.
            may_differ = all(unit.needs_no_collective for unit in units)
            self.ordered_reductions = OrderedReductions(units, in_order=may_differ)

    def units(self) -> list[Unit]:
        """Live units, parents before children."""
        return live(self._units)

    def groups(self) -> list[ParameterGroup]:
        """Parameter groups of all live units."""
        return [group for unit in self.units() for group in unit.groups]

    def change_options(self, **changes: Any) -> None:
        """Change options of reductions, from now on."""
        self.options = self.reductions.options = dataclasses.replace(self.options, **changes)
        for unit in self.units():
            # A root that is made around these units later inherits the values.
            unit.root_options.update(changes)

    @property
    def is_capturing(self) -> bool:
        """Whether operations queued now are captured in a CUDA graph."""
        return self.device is not None and is_capturing(self.device)

    def note_replays(self) -> None:
        """Mark weights as stale if a graph may have been replayed since the last pass."""
        if self.has_graph:
            self.weight_version += 1

    @property
    def ranks_may_differ(self) -> bool:
        """Whether another rank may run other units than this one."""
        return self.ordered_reductions is not None and self.ordered_reductions.in_order

    @property
    def is_scheduled(self) -> bool:
        """Whether a schedule, not the hooks of modules, reports the uses of units."""
        return self.num_scheduled > 0

    # -- forwards -----------------------------------------------------------------------------

    @property
    def is_in_forward(self) -> bool:
        """Whether a pass is under way: a forward of the root, or of a unit outside it."""
        return self._pass_unit() is not None

    @property
    def is_nested(self) -> bool:
        """Whether the pass under way is nested in a backward of the same root."""
        return self._nested is not None

    @property
    def belongs_to_backward(self) -> bool:
        """Whether what begins now is part of the backward under way, not of a nested pass."""
        return self._nested is None and self.runs_backward

    @property
    def refreshes(self) -> bool:
        """Whether a use of a unit that begins now refreshes stale weights.

        A backward and its recomputations use the weights of their forward. Below ZeRO-3, passes
        nested in it use them too: a refresh would overwrite what the backward saved.
        """
        return not self.runs_backward or (self.is_nested and not self.ranks_may_differ)

    def is_pass_of(self, unit: Unit) -> bool:
        """Whether the pass under way began with this unit."""
        begun = self._pass_unit if self._nested is None else self._nested.unit
        return begun() is unit

    def begin_forward(self, unit: Unit, *, has_grad: bool) -> None:
        """Begin a pass (not a recomputation).

        If ranks may run different units, a backward reduces all units once per root pass. Units
        that run outside the root's forward, before or after it, then belong to its root pass, since
        another rank may skip them. Otherwise every forward of the root begins a new root pass.

        Args:
            unit: The unit that the pass begins with.
            has_grad: Whether gradients are enabled.
        """
        self._pass_unit = weakref.ref(unit)
        self.communicator.begin_pass()
        self.pass_has_grad = has_grad
        kind = "forward" if has_grad else "evaluation"
        name = kind if unit.is_root else f"{kind} of {unit.fqn}"
        self.allocator.begin_pass(name, no_pending_backward=self._no_pending_backward())
        self.gathers.begin_forward(unit)
        # An evaluation between a forward and its backward does not start another root pass.
        has_root = unit.is_root and has_grad
        is_another = has_root and (self.root_pass.has_root or not self.ranks_may_differ)
        if is_another or self.root_pass.is_over:
            self.root_pass = RootPass()
            self.gathers.forget_backwards()
        self.root_pass.has_root |= has_root
        if has_grad and self.ranks_may_differ:
            self.root_pass.begin()

    def begin_nested_pass(self, unit: Unit, *, has_grad: bool) -> None:
        """Begin a pass inside the backward under way, such as a forward in a tensor hook.

        The pass prefetches nothing and does not change the expected order of the backward. Its
        buffers are part of the backward's allocation trace.

        Args:
            unit: The unit that the pass begins with.
            has_grad: Whether gradients are enabled.
        """
        self.finish_other_reductions()
        self._nested = _NestedPass(weakref.ref(unit), self.gathers, self.pass_has_grad)
        self.gathers = GatherSchedule(PrefetchLimit(units=0))
        self.pass_has_grad = has_grad
        if self.root_pass.is_over:
            self.root_pass = RootPass()
        if has_grad and self.ranks_may_differ:
            self.root_pass.begin()

    def _end_nested_pass(self) -> None:
        if self._nested is not None:
            self.gathers, self.pass_has_grad = self._nested.gathers, self._nested.pass_has_grad
            self._nested = None

    def count_forward(self, unit: Unit) -> None:
        """Count a forward of a unit that may have a backward, to find units with several."""
        ordered = self.ordered_reductions
        has_backward = self.pass_has_grad or torch.is_grad_enabled()
        if has_backward and ordered is not None and not ordered.in_order:
            self.root_pass.begin_forward(*unit.reduced_units())

    def end_forward(self, *, failed: bool = False) -> None:
        """End the forward that began the pass.

        Args:
            failed: Whether it ended in an exception. Collectives under way are left to `repair`:
                waiting for them could block on other ranks and delay the exception.
        """
        unit = self._pass_unit() if self._nested is None else self._nested.unit()
        if (
            unit is not None
            and self.pass_has_grad
            and (unit.is_root or not self.root_pass.has_root)
        ):
            self.root_pass.turn = next(FORWARD_NUMBERS)
        if self._nested is None:
            self._pass_unit = lambda: None
        self._end_nested_pass()
        self.forward_failed |= failed

    def end_pass(self, name: str) -> None:
        """End a backward or an evaluation.

        Args:
            name: Kind of the pass, for reports; empty for an evaluation.
        """
        self.allocator.end_pass(name, no_pending_backward=self._no_pending_backward())

    def _no_pending_backward(self) -> bool:
        """Whether no unit that began a pass expects a backward."""
        return not any(unit.expects_backward for unit in self.gathers.first_units())

    # -- backwards ----------------------------------------------------------------------------

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward is under way, or failed and is not repaired yet."""
        return self._end_of_backward is not None

    @property
    def runs_backward(self) -> bool:
        """Whether a backward is under way and has not failed. Called for every gradient."""
        return self._end_of_backward is not None and self._end_of_backward() is not None

    @property
    def backward_failed(self) -> bool:
        """Whether the latest backward ended in an exception.

        The engine drops the end-of-backward callback together with the failed graph task.
        """
        return self._end_of_backward is not None and self._end_of_backward() is None

    def join_backward(self, passed: RootPass, unit: Unit, position: int = UNKNOWN) -> None:
        """Begin a backward, with a callback at its end, unless one is under way.

        Args:
            passed: The pass of the unit whose backward begins.
            unit: The unit, for error messages.
            position: Number of the forward that the engine has reached, if known.
        """
        if self.backward_failed:
            self.repair()
        if not self.is_in_backward:
            check_captured_pass(self, f"the backward of {unit.name}")
            # Only the engine holds the callback, so it is freed when the backward ends or fails.
            end = functools.partial(uncompiled(Context.finish_backward), self)
            self._end_of_backward = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
            self.has_gradient = False
            if self.ranks_may_differ:
                syncing = (unit for unit in self.units() if unit.syncs_gradients)
                self.synced_in_backward = weakref.WeakSet(syncing)
            self.gathers.begin_backward()
            self.graph_task = torch._C._current_graph_task_id()
        elif passed is self.backward_pass:
            return
        self.reduce_in_turn(position)
        self.finish_other_reductions(position)
        if self in _UNDER_WAY:
            # One backward through several forwards of the root reduces each unit once per forward.
            self.finish_ordered_reductions()
        _UNDER_WAY.add(self)
        self.backward_pass = passed
        passed.is_over = True
        self.begin_reductions()

    def finish_deferred_backwards(self, number: int) -> None:
        """End deferred backwards of forwards that began after this one.

        The engine runs the most recently created nodes first, so these backwards are over.
        """
        while self.deferred and (latest := max(self.deferred)) > number:
            self.deferred.pop(latest).finish()

    def finish_backward(self) -> None:
        """End a backward: reduce remaining gradients and bring every unit to IDLE. Collective.

        The first callback ends the backward of all roots, in order of their turns: the callbacks of
        several roots may run in another order on another rank.
        """
        if not self.is_in_backward:
            return
        self.reduce_in_turn(AT_END)
        contexts = self._in_same_backward() or [self]
        for context in contexts:
            context._finish_backward()
        # Hooks run last: they may step weights, and may raise.
        for context in contexts:
            context._run_hooks_of_synced()

    def _finish_backward(self) -> None:
        units = self.units()
        synchronize = any(unit.syncs_gradients for unit in units)
        for unit in reversed(units):
            if unit.reshard_after_backward:
                unit.reshard()
            if unit.has_pending_reduction or any([group.has_unreduced for group in unit.groups]):
                self._reduce_rest(unit, synchronize=unit.syncs_gradients)
            unit.end_backward()
        self.gathers.drop_prefetched()
        self._end_reductions()
        # An optimizer without torch's step hooks may step now.
        self.weight_version += synchronize
        self.has_unreduced = not synchronize
        self._forget_backward()
        self.end_pass("synchronized backward" if synchronize else "backward")

    def end_scheduled(self) -> None:
        """End a micro-batch's backward in a schedule: reduce remaining gradients. Collective.

        Units that other micro-batches use stay gathered.
        """
        units = self.units()
        synchronize = any(unit.syncs_gradients for unit in units)
        for unit in reversed(units):
            self._reduce_rest(unit, synchronize=unit.syncs_gradients)
        self._end_reductions()
        self.has_unreduced = not synchronize
        self.num_scheduled -= 1
        if not self.is_scheduled:
            self.gathers.drop_prefetched()
            self.weight_version += synchronize
            self.end_pass("synchronized schedule" if synchronize else "schedule")
        self._run_hooks_of_synced()
        self.has_gradient = False

    def _in_same_backward(self) -> list[Context]:
        """Return the contexts of all roots in the backward under way, in order of their turns."""
        found = [context for context in _UNDER_WAY if context.graph_task == self.graph_task]
        if len(found) > 1:
            found.sort(key=lambda context: context.backward_pass.turn, reverse=True)
        return found

    def _forget_backward(self) -> None:
        self._end_nested_pass()
        _UNDER_WAY.discard(self)
        self.graph_task, self.position = -1, UNKNOWN
        self._end_of_backward = None
        self._in_backward = lambda: None
        self.deferred.clear()
        self._recomputed.clear()

    # -- recomputations -----------------------------------------------------------------------

    def prepare_recomputation(self, unit: Unit) -> None:
        """Prepare to recompute a unit.

        Reshards the oldest recomputed units if they and this unit exceed the prefetch limit.
        """
        self._recomputed.pop(weakref.ref(unit), None)
        # These units run next in the backward, the newest first.
        waiting = live(reversed(self._recomputed))
        current = self._in_backward()
        # The recomputed region belongs to a unit whose backward has begun and that is gathered.
        is_for_another = (
            current is not None
            and current is not unit
            and current.is_unsharded
            and not unit.is_inside(current)
        )
        kept = self.gathers.limit.fitting([unit, *waiting] if is_for_another else waiting)
        for other in reversed(waiting):
            if other not in kept:
                del self._recomputed[weakref.ref(other)]
                other.reshard()

    def keep_recomputed(self, unit: Unit) -> None:
        """Leave a recomputed unit gathered for its backward."""
        ref = weakref.ref(unit)
        self._recomputed.pop(ref, None)
        self._recomputed[ref] = None

    def note_backward(self, unit: Unit) -> None:
        """Record that the backward of a unit begins, which ends its recomputation."""
        unit.has_pending_reduction = True
        for group in unit.tied_groups:
            if (owner := group.unit()) is not None:
                owner.has_pending_reduction = True
        self._in_backward = ref = weakref.ref(unit)
        self._recomputed.pop(ref, None)

    # -- reductions ---------------------------------------------------------------------------

    def finish_ordered_reductions(self) -> None:
        """Reduce the units that have not been reduced in this backward yet. Collective."""
        if self.ordered_reductions is not None:
            self.reduce_in_order(self.ordered_reductions.remaining())

    def finish_other_reductions(self, position: int = UNKNOWN) -> None:
        """Reduce all units of other roots, before this root communicates in their backward.

        Ranks that run different units may have reduced different numbers of them so far. A backward
        that may go on reduces all its units once more. Not needed among roots that reduce in turn.
        Collective.

        Args:
            position: Number of the forward that the engine has reached, if known.
        """
        task = torch._C._current_graph_task_id()
        reduces_in_turn = self.runs_backward and self.ranks_may_differ
        others = [
            context
            for context in sorted(_UNDER_WAY, key=lambda context: -context.backward_pass.turn)
            if context is not self and context.ranks_may_differ and context.runs_backward
            if not (reduces_in_turn and context.graph_task == task)
        ]
        for context in others:
            context.finish_ordered_reductions()
        for context in others:
            if context.backward_pass.first < position:
                context.reductions.drain()
                context.begin_reductions()

    def begin_reductions(self) -> None:
        """Begin to reduce all units of a backward once, or once more."""
        if self.ordered_reductions is not None:
            self.ordered_reductions.begin(self.backward_pass)

    def reduce_after(self, unit: Unit, position: int) -> None:
        """Reduce the units whose turn has come after the backward of one use. Collective.

        Args:
            unit: The unit whose backward ended.
            position: Number of the forward that the engine has reached.
        """
        ordered = self.ordered_reductions
        units = [unit] if ordered is None else ordered.count_backward(*unit.reduced_units())
        self.reduce_in_order(units)
        if ordered is not None and ordered.in_order:
            self.reduce_in_turn(position)

    def reduce_in_turn(self, position: int) -> None:
        """Reduce units whose turn has come, of all roots in the backward under way. Collective.

        Args:
            position: Number of the forward that the engine has reached.
        """
        self.position = position
        for context in self._in_same_backward():
            passed, ordered = context.backward_pass, context.ordered_reductions
            if ordered is None or not ordered.in_order:
                continue
            if passed.waits(position):
                return
            if ready := ordered.ready(uncertain=passed.first > position):
                context.reduce_in_order(ready)
            if not ordered.is_done:
                return

    def reduce_in_order(self, units: Sequence[Unit]) -> None:
        """Reduce units in turn, with or without a gradient on this rank. Collective."""
        for unit in units:
            unit.has_pending_reduction = True
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
        is_pending, unit.has_pending_reduction = unit.has_pending_reduction, False
        with unit.observed_phase("reduce_grad"):
            due = [
                group.grads
                for group in unit.groups
                if group.grads is not None
                and (group.grads.has_gradient or (is_pending and group.is_trained))
                and (synchronize or not group.grads.accumulates_unreduced)
            ]
            if due and self.options.check_ranks == CheckRanks.ALWAYS:
                has_outer = synchronize and any(grads.has_outer_axis for grads in due)
                along_all = has_outer and not self.ranks_may_differ
                # First: on a rank with gradients of the unit, their arrival made room already.
                self.reductions.make_room()
                compare_unit(self, unit, "reduce", along_all=along_all)
            self.reductions.reduce(due, synchronize=synchronize)

    def _reduce_rest(self, unit: Unit, *, synchronize: bool) -> None:
        """Reduce remaining gradients of a unit, including partial ones along the outer axis."""
        self._reduce(unit, synchronize=synchronize)
        if synchronize:
            self.reductions.reduce_partials(unit.grads())

    def _end_reductions(self) -> None:
        """Wait for all reductions, and drop gradients to which no rank contributed."""
        self.reductions.drain()
        groups = _grads_of(self.units())
        _drop_unused(groups)
        for grads in groups:
            grads.end_reductions()

    def synchronize_gradients(self, units: Sequence[Unit]) -> None:
        """Reduce all gradients of these units into `param.grad`. Collective.

        Args:
            units: Some of the units, parents before children.
        """
        # If every backward reduces (ZeRO-2), no gradient is left: units that some rank skipped were
        # reduced in their turn.
        is_pending = self.ranks_may_differ and self.has_unreduced
        for unit in reversed(units):
            if is_pending and any(grads.accumulates_unreduced for grads in unit.grads()):
                unit.has_pending_reduction = True
            self._reduce_rest(unit, synchronize=True)
        self._end_reductions()
        # As after a synchronized backward: an optimizer may step next.
        self.weight_version += 1
        self.has_unreduced = False
        _run_hooks(reversed(units), only_certain=False)

    def _run_hooks_of_synced(self) -> None:
        synced = [unit for unit in reversed(self.units()) if unit.syncs_gradients]
        # A backward to inputs alone (`torch.autograd.grad`) produces no gradient of parameters.
        _run_hooks(synced, only_certain=not self.has_gradient)

    # -- after an exception -------------------------------------------------------------------

    @property
    def needs_repair(self) -> bool:
        """Whether an exception left a pass unfinished. Call between passes."""
        if self.is_in_backward or self.is_scheduled or self.forward_failed:
            return True
        return not all(unit.is_idle for unit in self.units())

    def repair(self) -> None:
        """Reset the units after a failed forward or backward.

        Drops the gradients of a failed backward that were collected but not reduced. Also drops
        gradients whose reduction was under way: it may have written them after a `zero_grad`. After
        a failed forward, no gradient is dropped. Roots in the same backward are repaired together,
        since ranks that did not fail reduced their units in order.
        """
        contexts = self._in_same_backward() or [self]
        failed = [context for context in contexts if context.is_in_backward or context.is_scheduled]
        # `repair` may run in inference mode, and the gradients written here are used outside it.
        with torch.inference_mode(False), torch.no_grad():
            found = [context._reduce_late() for context in failed]
            for context, before in zip(failed, found, strict=True):
                context._drop_gradients(before)
        for context in contexts:
            context._reset()

    def _reset(self) -> None:
        self.num_scheduled = 0
        self._forget_backward()
        self.end_forward()
        self.forward_failed = False
        for unit in self.units():
            unit.reset_after_error()

    def _reduce_late(self) -> list[tuple[GroupGrads, list[torch.Tensor | None]]]:
        """Reduce units that this rank did not reduce in a failed backward. Collective.

        Otherwise the reductions of a rank that did would pair with those of the next backward.

        Returns:
            Groups whose gradients a reduction may have written, with those from before.
        """
        dropped = self.reductions.groups()
        ordered = self.ordered_reductions
        # Ranks that follow one schedule reduce without this order.
        late = [] if ordered is None or self.is_scheduled else ordered.remaining()
        for unit in late:
            reduced = unit in self.synced_in_backward
            dropped += [g for g in unit.grads() if reduced or not g.accumulates_unreduced]
        before = [(grads, grads.param_grads()) for grads in dropped]
        for unit in late:
            unit.has_pending_reduction = True
            self._reduce(unit, synchronize=unit in self.synced_in_backward)
        return before

    def _drop_gradients(
        self, before: Sequence[tuple[GroupGrads, list[torch.Tensor | None]]]
    ) -> None:
        if self.ranks_may_differ and not self.is_scheduled:
            # Another rank may have finished this backward.
            self.reductions.drain()
            _drop_unused(_grads_of(self.units()))
            self.weight_version += bool(self.synced_in_backward)
        self.reductions.abandon()
        for grads, found in before:
            grads.restore(found)
        for grads in _grads_of(self.units()):
            grads.abandon()


def _grads_of(units: Iterable[Unit]) -> list[GroupGrads]:
    return [grads for unit in units for grads in unit.grads()]


def _drop_unused(groups: Iterable[GroupGrads]) -> None:
    """Set gradients to None if no rank had one in this backward, after its reductions. Collective.

    Ranks sum one flag per reduced group, in one all-reduce for each mesh. The host waits for the
    sums only if this rank had no gradient of some group.

    Raises:
        RuntimeError: The host would wait while a CUDA graph is captured.
    """
    by_mesh: dict[tuple[object, ...], list[GroupGrads]] = {}
    for grads in groups:
        if grads.is_written:
            by_mesh.setdefault(grads.reduced_over, []).append(grads)
    for over, written in by_mesh.items():
        unused = [grads for grads in written if grads.may_be_unused]
        context = written[0].context
        if over and not is_capturing(context.device):
            flags = torch.ones(len(written), dtype=torch.float32, device=context.device)
            for index, grads in enumerate(written):
                if not grads.has_contributed:
                    # A kernel: a copy of flags from the host would wait for the device.
                    flags[index].zero_()
            context.all_reduce(flags)
            if unused:
                totals = zip(written, flags.tolist(), strict=True)
                unused = [grads for grads, total in totals if grads.may_be_unused and not total]
        elif over and unused:
            raise RuntimeError(
                f"{unused[0].name} had no gradient in a backward captured in a CUDA graph, "
                "so the host would wait to see whether another rank had one; capture a step "
                "that uses every trained parameter, or freeze those that it does not use"
            )
        for grads in unused:
            grads.drop()


def _run_hooks(units: Iterable[Unit], *, only_certain: bool) -> None:
    """Call users' post-accumulate-grad hooks."""
    with torch.no_grad():
        for grads in _grads_of(units):
            grads.run_hooks(only_certain=only_certain)
