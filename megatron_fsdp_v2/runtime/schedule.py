"""Schedule of gathers and reductions in a step. Units and groups issue the collectives.

* **Order**: units are expected in the order of the last pass, and backwards in the reverse order of
  forwards (`ExecutionOrder`). Units that gather nothing (below ZeRO-3) are not part of the order,
  but also start prefetches when they run.
* **Prefetch**: once a unit is gathered, gathers of the next units start, up to a limit in units or
  bytes (`PrefetchLimit`). Prefetched units that were expected before the current unit, and were not
  used, are resharded (`GatherSchedule`).
* **Ordered reductions**: a unit is reduced once in a backward, after the last use of its parameters
  (`OrderedReductions`); in a backward through several roots, one pass after the other (`RootPass`).
* **Bounded in-flight queue**: before the number of full gradient buffers exceeds its bound, the
  oldest reduction is waited for; the reduction along the outer axis follows, with its own bound
  (`ReductionQueue`).

No code here uses a tensor or a process group. Units are referenced weakly, so that a model can be
freed.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from megatron_fsdp_v2.comm.interface import Work
    from megatron_fsdp_v2.memory.observer import Observer
    from megatron_fsdp_v2.params.gradients import GroupGrads
    from megatron_fsdp_v2.runtime.options import RuntimeOptions
    from megatron_fsdp_v2.runtime.unit import Unit

__all__ = [
    "AT_END",
    "FORWARD_NUMBERS",
    "UNKNOWN",
    "ExecutionOrder",
    "GatherSchedule",
    "OrderedReductions",
    "PrefetchLimit",
    "ReductionQueue",
    "RootPass",
    "WaitReason",
    "live",
]


def live[T](refs: Iterable[Callable[[], T | None]]) -> list[T]:
    """Return the referenced objects that are not deleted."""
    return [each for ref in refs if (each := ref()) is not None]


# -- gathers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefetchLimit:
    """Limit of gathers ahead of the running unit.

    Unless `units` is 0, the next unit is always gathered ahead, whatever its size.

    Attributes:
        units: Largest number of units; 0 disables prefetching, None is no limit.
        nbytes: Largest total of gathered bytes of these units; None is no limit.
    """

    units: int | None = 1
    nbytes: int | None = None

    @property
    def is_none(self) -> bool:
        """Whether nothing is gathered ahead."""
        return self.units == 0

    def fitting(self, following: Iterable[Unit]) -> list[Unit]:
        """Return the first of the next units that fit into the limit.

        Args:
            following: The next units, in order.
        """
        if self.nbytes is None:
            return list(itertools.islice(following, self.units))
        ahead: list[Unit] = []
        total = 0
        for unit in following:
            total += unit.gathered_nbytes
            if len(ahead) == self.units or (ahead and total > self.nbytes):
                break
            ahead.append(unit)
        return ahead


class ExecutionOrder:
    """Order in which units ran, as a prediction of the next pass.

    A misprediction costs an unnecessary gather and changes no result: it is the same on all ranks
    if they run the same units, and a mispredicted prefetch is dropped.
    """

    MAX_RUNS = 1 << 14
    """Maximum number of runs kept. A pass of units outside the root's forward may never end."""

    def __init__(self) -> None:
        self._expected: list[weakref.ref[Unit]] = []
        self._ran: list[weakref.ref[Unit]] = []
        # Index of the first expected unit that has not run yet.
        self._next = 0

    def begin(self) -> None:
        """Start a new pass, predicted to repeat the last one."""
        self._expected, self._ran, self._next = self._ran or self._expected, [], 0

    def begin_reversed(self) -> None:
        """Start a pass that is predicted to reverse the units run so far."""
        self._expected, self._next = self._ran[::-1], 0

    def note(self, unit: Unit) -> None:
        """Record a run of a unit, if it is part of the order."""
        if not unit.gathered_nbytes:
            return
        if len(self._ran) == self.MAX_RUNS:
            del self._ran[: self.MAX_RUNS // 2]
        self._ran.append(weakref.ref(unit))

    def after(self, unit: Unit) -> Iterable[Unit]:
        """Return the units expected after a unit that runs now; empty if it was not expected."""
        for position in range(self._next, len(self._expected)):
            if self._expected[position]() is unit:
                self._next = position + 1
                return self.remaining()
        return ()

    def remaining(self) -> Iterable[Unit]:
        """Return the units that are still expected. Lazy, since callers read only a few."""
        left = range(self._next, len(self._expected))
        return (unit for position in left if (unit := self._expected[position]()) is not None)


class GatherSchedule:
    """Prefetches units, and drops mispredicted prefetches.

    For each use of a unit, the runtime calls `before_use`, gathers the unit, and calls one of
    `in_forward`, `in_backward` and `in_schedule`, which prefetch the next units.

    Attributes:
        limit: Limit of gathers ahead of the running unit.
        num_uses: Uses of units that have begun in the current pass.
    """

    def __init__(self, limit: PrefetchLimit) -> None:
        self.limit = limit
        self.num_uses = 0
        # Keyed by the unit that a pass begins with.
        self._forward_orders: WeakKeyDictionary[Unit, ExecutionOrder] = WeakKeyDictionary()
        self._forward_order: ExecutionOrder = ExecutionOrder()
        self._backward_order: ExecutionOrder = ExecutionOrder()
        self._scheduled_order: ExecutionOrder = ExecutionOrder()
        self._prefetched: deque[weakref.ref[Unit]] = deque()
        self._requested: list[weakref.ref[Unit]] = []

    def begin_forward(self, first: Unit) -> None:
        """Begin a pass, predicted by the last pass that began with the same unit.

        Args:
            first: The unit that the pass begins with.
        """
        self.num_uses = 0
        self._forward_order = self._forward_orders.setdefault(first, ExecutionOrder())
        self._forward_order.begin()

    def first_units(self) -> Iterable[Unit]:
        """Return the units that passes began with."""
        return self._forward_orders.keys()

    def forget_backwards(self) -> None:
        """Start a new backward order: backwards of later forwards are a separate pass."""
        self._backward_order = ExecutionOrder()

    def expect_backward(self, unit: Unit) -> None:
        """Record a unit whose forward ended and whose backward is expected."""
        self._backward_order.note(unit)

    def begin_backward(self) -> None:
        """Begin a backward, predicted to reverse the order of forwards."""
        self.num_uses = 0
        self._backward_order.begin_reversed()

    def begin_schedule(self) -> None:
        """Begin a schedule, which reports uses one by one, forwards and backwards."""
        self.num_uses = 0
        self._scheduled_order.begin()

    def before_use(self, unit: Unit) -> None:
        """Drop the prefetched units that were expected before a unit that is used now.

        If the unit was not expected, all prefetched units are dropped, unless the unit is already
        gathered for another reason.
        """
        self.num_uses += 1
        is_gathered_anyway = unit.is_unsharded and weakref.ref(unit) not in self._prefetched
        if unit.gathered_nbytes and not is_gathered_anyway:
            while self._prefetched:
                prefetched = self._prefetched.popleft()()
                if prefetched is unit:
                    break
                if prefetched is not None:
                    prefetched.reshard()
        self._requested = [ref for ref in self._requested if ref() is not unit]

    def in_forward(self, unit: Unit, chosen: Sequence[weakref.ref[Unit]] = ()) -> None:
        """Prefetch the next units after a unit is gathered for its forward.

        Args:
            unit: The unit.
            chosen: Units chosen by the user instead of the predicted ones.
        """
        self._forward_order.note(unit)
        self._look_ahead(self._forward_order, unit, chosen)

    def in_backward(self, unit: Unit, chosen: Sequence[weakref.ref[Unit]] = ()) -> None:
        """Prefetch the next units after a unit is gathered for its backward."""
        self._look_ahead(self._backward_order, unit, chosen)

    def in_schedule(self, unit: Unit) -> None:
        """Prefetch the next units after a unit is gathered for a use of a schedule."""
        self._scheduled_order.note(unit)
        self._look_ahead(self._scheduled_order, unit)

    def _look_ahead(
        self, order: ExecutionOrder, unit: Unit, chosen: Sequence[weakref.ref[Unit]] = ()
    ) -> None:
        following = order.after(unit) if unit.gathered_nbytes else order.remaining()
        if self.limit.is_none:
            return
        if chosen:
            # Chosen units stay gathered until they run or the pass ends.
            for requested in live(chosen):
                requested.prefetch()
                self._requested.append(weakref.ref(requested))
            return
        due = []
        for expected in self.limit.fitting(following):
            # A unit that is in use, or kept for its backward, must not be dropped as a
            # misprediction.
            if not expected.is_unsharded:
                due.append(expected)
            # A gathered unit may lack the payload of its next use.
            elif not expected.single_payload:
                expected.prefetch()
        self._prefetch(due)

    def _prefetch(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.prefetch()
            # Recorded once: an earlier prefetch may have been dropped by a load of weights.
            ref = weakref.ref(unit)
            if ref not in self._prefetched:
                self._prefetched.append(ref)

    def drop_prefetched(self) -> None:
        """Drop all prefetched units at the end of a pass."""
        for unit in live([*self._prefetched, *self._requested]):
            unit.reshard()
        self._prefetched.clear()
        self._requested.clear()


# -- ordered reductions ----------------------------------------------------------------------------


FORWARD_NUMBERS = itertools.count()
"""Numbers of the beginnings and ends of forwards, of all roots."""

UNKNOWN = sys.maxsize
"""Position of a backward before the first unit that it reaches."""

AT_END = -2
"""Position of a backward that has left every forward."""

# Passes whose units are reduced in order, and are not all reduced yet.
_UNREDUCED: weakref.WeakSet[RootPass] = weakref.WeakSet()


class RootPass:
    """Number of uses of each unit in one forward of the root, and in units run outside it.

    A unit's gradients are complete after as many backwards as uses. The autograd graph of the
    forward holds this object, which is deleted when no backward can follow.

    One backward may run through several roots whose ranks run different units. Passes are then
    reduced one after the other, the latest root forward first: the order is the same on all ranks,
    and that of the engine, which runs the most recently created nodes first. Forwards of all roots
    are numbered in one sequence, so that `position`, the number of the forward that the engine has
    reached, tells which passes the backward has left.

    Attributes:
        uses: Number of uses of each unit.
        recomputable: Units whose forward the backward may have to repeat.
        has_root: Whether the root ran in this pass.
        is_over: Whether its backward has begun, so that later forwards are another pass.
        begun: Number of each unit's first forward, if units are reduced without a fixed order.
        repeated: Units with more than one forward.
        first: Number of its first forward; -1 if it has none.
        turn: Number of the end of the root's forward; the largest one is reduced first.
    """

    def __init__(self) -> None:
        # Counting weak references takes a fraction of the time of a WeakKeyDictionary.
        self.uses: Counter[weakref.ref[Unit]] = Counter()
        self.recomputable: set[weakref.ref[Unit]] = set()
        self.has_root = False
        self.is_over = False
        self.begun: dict[weakref.ref[Unit], int] = {}
        self.repeated: set[weakref.ref[Unit]] = set()
        self.first = -1
        self.turn = -1

    def begin(self) -> None:
        """Record the beginning of a forward whose units are reduced in order."""
        if self.first < 0:
            self.first = next(FORWARD_NUMBERS)
        _UNREDUCED.add(self)

    def waits(self, position: int) -> bool:
        """Return whether a pass that is reduced before this pass may still receive gradients."""
        return any([p.turn > self.turn and p.first < position for p in _UNREDUCED])

    def begin_forward(self, *units: Unit) -> None:
        """Record the beginning of a unit's forward.

        Args:
            units: The arguments of `add_use`.
        """
        for ref in map(weakref.ref, units):
            if ref in self.begun:
                self.repeated.add(ref)
            else:
                self.begun[ref] = next(FORWARD_NUMBERS)

    def add_use(self, *units: Unit) -> None:
        """Count a use of a unit's parameters.

        Args:
            units: The unit, and the owners of its tied groups.
        """
        for unit in units:
            self.uses[weakref.ref(unit)] += 1


class OrderedReductions:
    """Order of reductions in a backward, the same on all ranks.

    A unit is reduced once, after the last use of its parameters: ranks may use them different
    numbers of times, so their gradients may arrive at different times.

    If uses need gathers (ZeRO-3), all ranks run the same forwards, but the gradients of a unit with
    several forwards need not reach the same ones. Such a unit is therefore reduced together with
    the next unit that has a single forward, once the backward has left all its own.

    If no use of a unit needs a gather (ZeRO-0, 1, 2), a rank may skip a unit that others run, or
    run it more often. Its reductions must still pair with theirs, and collectives pair by order. So
    the backward of one pass through the root reduces every unit exactly once in a fixed order, last
    registered first, as backwards usually run. A unit that this rank skipped takes its turn without
    a gradient; a unit that finishes before its turn waits for the units before it. Units with an
    uncertain use (a use that no gradient reaches) are reduced at the end.

    Args:
        units: All units, parents before children, in order of registration.
        in_order: Whether all units are reduced, in the fixed order.

    Attributes:
        is_done: Whether all units had their turn.
    """

    def __init__(self, units: Sequence[Unit], *, in_order: bool = True) -> None:
        self.in_order = in_order
        self.is_done = True
        self._order = [weakref.ref(unit) for unit in reversed(units)]
        # Index of the unit whose turn is next.
        self._next = 0
        # Uses of each unit whose backward is pending.
        self._left: Counter[weakref.ref[Unit]] = Counter()
        self._passed = RootPass()
        # Units with several forwards in order of the first one, not reduced yet.
        self._repeated: list[weakref.ref[Unit]] = []

    def begin(self, passed: RootPass) -> None:
        """Begin the backward of a pass."""
        self._next, self.is_done = 0, False
        self._left = passed.uses.copy()
        self._passed = passed
        if self.in_order:
            _UNREDUCED.add(passed)
        self._repeated = [ref for ref in passed.begun if ref in passed.repeated]

    def count_backward(self, *units: Unit) -> list[Unit]:
        """Count the backward of one use; without a fixed order, return the units to reduce now.

        Args:
            units: The arguments of `RootPass.add_use`.
        """
        refs = [weakref.ref(unit) for unit in units]
        for ref in refs:
            self._left[ref] -= 1
        if self.in_order:
            return []
        begun, repeated, left = self._passed.begun, self._passed.repeated, self._repeated
        found = []
        if refs[0] not in repeated:
            while left and begun[left[-1]] > begun.get(refs[0], 0):
                unit = left.pop()()
                if unit is not None and unit.has_pending_reduction:
                    found.append(unit)
        ready = zip(units, refs, strict=True)
        return found + [u for u, ref in ready if self._left[ref] <= 0 and ref not in repeated]

    def ready(self, *, uncertain: bool = False) -> list[Unit]:
        """Return the units whose turn has come, up to the first one with a pending use.

        Args:
            uncertain: Whether units with a pending use are returned as well.
        """
        start = self._next
        while self._next < len(self._order):
            ref = self._order[self._next]
            if not uncertain and self._left[ref] > 0 and ref() is not None:
                break
            self._next += 1
        else:
            self.is_done = True
            _UNREDUCED.discard(self._passed)
        return [unit for ref in self._order[start : self._next] if (unit := ref()) is not None]

    def remaining(self) -> list[Unit]:
        """Return the units whose turn is still pending at the end of a backward."""
        return self.ready(uncertain=True) if self.in_order else []


# -- bounded in-flight queue -----------------------------------------------------------------------


class WaitReason(enum.Enum):
    """Reason to wait for reductions. Reports show the value."""

    BUFFER_LIMIT = "another unit needed a full gradient buffer: see max_live_grad_buffers"
    """The bound of full gradient buffers, or of partial shards, is reached."""
    END = "the backward is over, and no computation is left to hide it"
    """Gradients are read next."""
    AT_ONCE = "overlap is off, or the next operation reads its result"
    """Asynchronous reductions are disabled."""


@dataclass(frozen=True, slots=True)
class _Reduction:
    """One group's reduction under way.

    Attributes:
        grads: The group's gradients.
        work: Handle of the collective.
        then_outer: Whether the outer axis is reduced next.
    """

    grads: GroupGrads
    work: Work
    then_outer: bool = False


@contextlib.contextmanager
def _queued(queue: deque[list[_Reduction]]) -> Iterator[list[_Reduction]]:
    """Yield a list for the reductions of one unit, and add it to a queue, also after an error."""
    issued: list[_Reduction] = []
    try:
        yield issued
    finally:
        if issued:
            queue.append(issued)


class ReductionQueue:
    """Queue of the units' gradient reductions under way, which bounds their full buffers.

    Attributes:
        options: Options of the root. `max_live_grad_buffers` bounds the units with full gradient
            buffers, and the units in an outer reduction.
        wait_reason: Reason of the latest wait for reductions.
    """

    def __init__(self, options: RuntimeOptions, observer: Observer) -> None:
        """Make an empty queue.

        Args:
            options: Options of the root.
            observer: Receives the phase `finish_reduction`.
        """
        self.options = options
        self.wait_reason = WaitReason.BUFFER_LIMIT
        self._observer = observer
        self._inner: deque[list[_Reduction]] = deque()
        self._outer: deque[list[_Reduction]] = deque()

    @property
    def is_async(self) -> bool:
        """Whether reductions overlap later computation."""
        return self.options.enable_async_reduce_grad

    def __len__(self) -> int:
        """Return the number of units in an inner reduction."""
        return len(self._inner)

    def reduce(self, due: Sequence[GroupGrads], *, synchronize: bool) -> None:
        """Reduce groups of one unit, after waiting until another unit may be in flight. Collective.

        Args:
            due: The groups; may be empty.
            synchronize: Whether gradients are reduced into `param.grad`, so that the reduction
                along an outer axis follows.
        """
        if due:
            # Needed here too: buffers that accumulate micro-batches were allocated without a wait.
            self.make_room()
            with _queued(self._inner) as issued:
                for grads in due:
                    work = grads.reduce(self, async_op=self.is_async)
                    issued.append(_Reduction(grads, work, synchronize and grads.has_outer_axis))
        if not self.is_async:
            self.drain(WaitReason.AT_ONCE)

    def reduce_partials(self, groups: Iterable[GroupGrads]) -> None:
        """Reduce groups whose inner reductions are done along the outer axis. Collective."""
        for grads in groups:
            if grads.has_partial and not self._has_inner(grads):
                self._reduce_outer([grads])

    def reserve(self, grads: GroupGrads) -> None:
        """Wait until the bound allows another full buffer, and this group's own is free."""
        self.make_room()
        while self._has_inner(grads):
            self._drain_one()

    def drain(self, why: WaitReason = WaitReason.END) -> None:
        """Wait for all reductions."""
        self.wait_reason = why
        while self._inner:
            self._drain_one()
        while self._outer:
            self._finish_outer(self._outer.popleft())

    def groups(self) -> list[GroupGrads]:
        """Return the groups whose main gradients are being written."""
        queued = (*self._inner, *self._outer)
        return [reduction.grads for issued in queued for reduction in issued]

    def abandon(self) -> None:
        """Drop all reductions after a failed backward. Waits for them, since buffers are in use."""
        for issued in (*self._inner, *self._outer):
            for reduction in issued:
                reduction.work.wait()
        self._inner.clear()
        self._outer.clear()

    def make_room(self) -> None:
        """Wait for the oldest reductions until the bound allows another unit."""
        self.wait_reason = WaitReason.BUFFER_LIMIT
        while len(self._inner) >= self.options.max_live_grad_buffers:
            self._drain_one()

    def _drain_one(self) -> None:
        """Wait for the oldest unit's reductions, and begin those along the outer axis."""
        oldest = self._inner.popleft()
        self._finish_inner(oldest)
        following = [reduction.grads for reduction in oldest if reduction.then_outer]
        if following:
            self._reduce_outer(following)

    def _finish_inner(self, done: Sequence[_Reduction]) -> None:
        with self._phase(done[0].grads):
            for reduction in done:
                reduction.work.wait()
                reduction.grads.end_inner()

    def _reduce_outer(self, groups: Sequence[GroupGrads]) -> None:
        # Otherwise partial shards of all units would be live at the end of a backward.
        while len(self._outer) >= self.options.max_live_grad_buffers:
            self._finish_outer(self._outer.popleft())
        with self._phase(groups[0]), _queued(self._outer) as issued:
            for grads in groups:
                issued.append(_Reduction(grads, grads.reduce_outer(async_op=self.is_async)))

    def _finish_outer(self, done: Sequence[_Reduction]) -> None:
        with self._phase(done[0].grads):
            for reduction in done:
                reduction.work.wait()
        for reduction in done:
            # Two reductions of one group in a backward share its partial shard; the last one frees
            # it.
            if not any(one.grads is reduction.grads for issued in self._outer for one in issued):
                reduction.grads.end_outer()

    def _has_inner(self, grads: GroupGrads) -> bool:
        return any(one.grads is grads for issued in self._inner for one in issued)

    def _phase(self, grads: GroupGrads) -> AbstractContextManager[Any]:
        return self._observer.phase(grads.name, "finish_reduction")
