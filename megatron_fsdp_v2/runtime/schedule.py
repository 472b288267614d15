"""Schedule of gathers and reductions in a step. Units and groups issue the collectives.

* **Order**: units are expected in the order of the last pass, and backwards in the reverse order of
  forwards (`ExecutionOrder`). Units that gather nothing (below ZeRO-3) are not part of the order,
  but also start prefetches when they run.
* **Prefetch**: once a unit is gathered, gathers of the next units start, up to a limit in units or
  bytes (`PrefetchLimit`). Prefetched units that were expected before the current unit, and were not
  used, are resharded (`GatherSchedule`).
* **Reductions**: a unit is reduced once in a backward, after the last use of its parameters; in a
  backward through several roots, one pass after the other (`RootPass`).

No code here uses a tensor or a process group. Units are referenced weakly, so that a model can be
freed.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from megatron_fsdp_v2.runtime.unit import Unit


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
        for expected in self.limit.fitting(following):
            # A unit that is in use, or kept for its backward, may lack a payload, and must not be
            # dropped as a misprediction.
            is_kept, ref = expected.is_unsharded, weakref.ref(expected)
            expected.prefetch()
            # Recorded once: an earlier prefetch may have been dropped by a load of weights.
            if not is_kept and ref not in self._prefetched:
                self._prefetched.append(ref)

    def drop_prefetched(self) -> None:
        """Drop all prefetched units at the end of a pass."""
        for unit in live([*self._prefetched, *self._requested]):
            unit.reshard()
        self._prefetched.clear()
        self._requested.clear()


# -- reductions ------------------------------------------------------------------------------------


FORWARD_NUMBERS = itertools.count()
"""Numbers of the beginnings and ends of forwards, of all roots."""

UNKNOWN = sys.maxsize
"""Position of a backward before the first unit that it reaches."""

AT_END = -2
"""Position of a backward that has left every forward."""

# Passes whose units are reduced in order, and are not all reduced yet. Read for every unit, which
# takes several times as long with a WeakSet.
_UNREDUCED: set[weakref.ref[RootPass]] = set()


class RootPass:
    """One forward of the root: uses of units, and the order in which its backward reduces them.

    A unit is reduced once in a backward, after the last use of its parameters: ranks may use them
    different numbers of times, so their gradients may arrive at different times. The autograd graph
    of the forward holds this object, which is deleted when no backward can follow.

    If uses need gathers (ZeRO-3), all ranks run the same forwards, but the gradients of a unit with
    several forwards need not reach the same ones. Such a unit is therefore reduced together with
    the next unit that has a single forward, once the backward has left all its own.

    If no use of a unit needs a gather (ZeRO-0, 1, 2), a rank may skip a unit that others run, or
    run it more often. Its reductions must still pair with theirs, and collectives pair by order. So
    the backward reduces every unit exactly once in a fixed order, last registered first, as
    backwards usually run. A unit that this rank skipped takes its turn without a gradient; a unit
    that finishes before its turn waits for the units before it. Units with an uncertain use (a use
    that no gradient reaches) are reduced at the end.

    One backward may run through several roots whose ranks run different units. Passes are then
    reduced one after the other, the latest root forward first: the order is the same on all ranks,
    and that of the engine, which runs the most recently created nodes first. Forwards of all roots
    are numbered in one sequence, so that `position`, the number of the forward that the engine has
    reached, tells which passes the backward has left.

    Args:
        order: All units in the fixed order; None if every rank runs the same forwards.

    Attributes:
        recomputable: Units whose forward the backward may have to repeat.
        used_directly: Units with a parameter that was used itself, outside their forwards.
        has_root: Whether the root ran in this pass.
        is_over: Whether its backward has begun, so that later forwards are another pass.
        first: Number of its first forward; -1 if it has none.
        turn: Number of the end of the root's forward; the largest one is reduced first.
        is_reduced: Whether all units had their turn in the latest backward.
    """

    def __init__(self, order: Sequence[weakref.ref[Unit]] | None = None) -> None:
        self.recomputable: set[weakref.ref[Unit]] = set()
        self.used_directly: set[weakref.ref[Unit]] = set()
        self.has_root = False
        self.is_over = False
        self.first = -1
        self.turn = -1
        self.is_reduced = True
        self._order = order
        # Index of the unit whose turn is next.
        self._next = 0
        # Uses of each unit, and those whose backward is pending. Counting weak references takes a
        # fraction of the time of a WeakKeyDictionary.
        self._uses: Counter[weakref.ref[Unit]] = Counter()
        self._left: Counter[weakref.ref[Unit]] = Counter()
        # Without a fixed order: the number of each unit's first forward, the units with several
        # forwards, and those of them that are not reduced yet, in order of the first forward.
        self._begun: dict[weakref.ref[Unit], int] = {}
        self._repeated: set[weakref.ref[Unit]] = set()
        self._waiting: list[weakref.ref[Unit]] = []

    # -- forward --------------------------------------------------------------------------------

    def begin_forward(self, refs: Sequence[weakref.ref[Unit]]) -> None:
        """Record the beginning of a unit's forward.

        Args:
            refs: See `Unit.reduced_with`.
        """
        if self._order is not None:
            return
        for ref in refs:
            if ref in self._begun:
                self._repeated.add(ref)
            else:
                self._begun[ref] = next(FORWARD_NUMBERS)

    def add_use(self, refs: Sequence[weakref.ref[Unit]]) -> None:
        """Count a use of a unit's parameters, whose backward its reduction has to wait for.

        Args:
            refs: See `Unit.reduced_with`.
        """
        for ref in refs:
            self._uses[ref] += 1

    def add_direct_use(self, ref: weakref.ref[Unit]) -> None:
        """Count a use of a parameter itself, whose gradient may arrive on some ranks only.

        Every rank reduces the unit: the operation was collective.
        """
        self.begin_forward([ref])
        self._repeated.add(ref)
        self.used_directly.add(ref)
        self.add_use([ref])

    @property
    def has_forwards(self) -> bool:
        """Whether a unit ran, and not only parameters themselves were used.

        Always False if units are reduced in a fixed order.
        """
        return self._begun.keys() > self.used_directly

    def drop_use(self, ref: weakref.ref[Unit]) -> None:
        """Forget a counted use whose graph was freed, if units are reduced in a fixed order.

        Otherwise a use whose result was only looked at would defer all following reductions.
        """
        if self._order is not None:
            self._uses[ref] -= 1

    def expect_backward(self) -> None:
        """Note that a forward begins whose backward reduces units in the fixed order, if any."""
        if self._order is not None:
            if self.first < 0:
                self.first = next(FORWARD_NUMBERS)
            _UNREDUCED.add(weakref.ref(self, _UNREDUCED.discard))

    # -- backward -------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Begin a backward; the graph of a forward may have several."""
        self.is_over = True
        self._next, self.is_reduced = 0, self._order is None
        self._left = self._uses.copy()
        self._waiting = [ref for ref in self._begun if ref in self._repeated]
        if self._order is not None:
            _UNREDUCED.add(weakref.ref(self, _UNREDUCED.discard))

    def count_backward(self, refs: Sequence[weakref.ref[Unit]]) -> list[weakref.ref[Unit]]:
        """Count the backward of one use; without a fixed order, return the units to reduce now.

        Args:
            refs: See `Unit.reduced_with`.
        """
        for ref in refs:
            self._left[ref] -= 1
        if self._order is not None:
            return []
        begun, repeated, waiting = self._begun, self._repeated, self._waiting
        found = []
        if refs[0] not in repeated:
            while waiting and begun[waiting[-1]] > begun.get(refs[0], 0):
                found.append(waiting.pop())
        return found + [r for r in refs if self._left[r] <= 0 and r not in repeated]

    def waits(self, position: int) -> bool:
        """Return whether a pass that is reduced before this pass may still receive gradients."""
        passes = live(tuple(_UNREDUCED))
        return any([p.turn > self.turn and p.first < position for p in passes])

    def due(self, *, is_left: bool) -> list[Unit]:
        """Return the units to reduce next, up to the first unit with a pending use.

        Args:
            is_left: Whether the backward has left the pass: no pending use can follow.
        """
        if self._order is None:
            return []
        start = self._next
        while self._next < len(self._order):
            ref = self._order[self._next]
            # A unit that another module replaced may be gone; a dead reference has no hash.
            if not is_left and ref() is not None and self._left[ref] > 0:
                break
            self._next += 1
        else:
            self.is_reduced = True
            _UNREDUCED.discard(weakref.ref(self))
        return live(self._order[start : self._next])
