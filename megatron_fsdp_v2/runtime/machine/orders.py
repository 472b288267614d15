"""Orders: of uses, which predict gathers ahead, and of the reductions of a pass."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(slots=True, eq=False, kw_only=True)
class UnitFacts:
    """What orders have to know about a unit.

    Attributes:
        nbytes: Bytes of gathered weights per use; 0 if no use needs a gather.
        is_gone: Whether its modules were deleted.
    """

    nbytes: int = 0
    is_gone: bool = False


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

    def fitting[UnitT: UnitFacts](self, following: Iterable[UnitT]) -> list[UnitT]:
        """Return the first of the next units that fit into the limit.

        Args:
            following: The next units, in order, perhaps with deleted ones.
        """
        ahead: list[UnitT] = []
        total = 0
        for unit in following:
            if unit.is_gone:
                continue
            total += unit.nbytes
            is_too_much = self.nbytes is not None and total > self.nbytes
            if len(ahead) == self.units or (ahead and is_too_much):
                break
            ahead.append(unit)
        return ahead


# -- order of uses ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class ExecutionOrder[UnitT: UnitFacts]:
    """Order in which units ran, as a prediction of the next pass.

    A misprediction costs an unnecessary gather and changes no result: it is the same on all ranks
    if they run the same units, and a mispredicted prefetch is dropped.

    Attributes:
        expected: Units in the predicted order.
        ran: Units that ran in this pass.
        following: Index of the first expected unit that has not run yet.
    """

    expected: list[UnitT] = field(default_factory=list)
    ran: list[UnitT] = field(default_factory=list)
    following: int = 0

    MAX_RUNS: ClassVar[int] = 1 << 14
    """Maximum number of runs kept. A pass of units outside the root's forward may never end."""

    def begin(self) -> None:
        """Start a new pass, predicted to repeat the last one."""
        self.expected, self.ran, self.following = self.ran or self.expected, [], 0

    def begin_reversed(self) -> None:
        """Start a pass that is predicted to reverse the units run so far."""
        self.expected, self.following = self.ran[::-1], 0

    def note(self, unit: UnitT) -> None:
        """Record a run of a unit, if it is part of the order."""
        if not unit.nbytes:
            return
        if len(self.ran) == self.MAX_RUNS:
            del self.ran[: self.MAX_RUNS // 2]
        self.ran.append(unit)

    def after(self, unit: UnitT) -> Iterator[UnitT]:
        """Return the units expected after a unit that runs now; empty if it was not expected.

        Lazy, since callers read only a few; a unit that needs no gather is part of no order.
        """
        if unit.nbytes:
            for position in range(self.following, len(self.expected)):
                if self.expected[position] is unit:
                    self.following = position + 1
                    break
            else:
                return iter(())
        return itertools.islice(self.expected, self.following, None)


@dataclass(slots=True, eq=False)
class Gathers[UnitT: UnitFacts]:
    """Expected order of uses, and the units gathered ahead.

    Attributes:
        limit: Limit of gathers ahead of the running unit.
        num_uses: Uses of units that have begun in the current pass.
        forwards: Order of each kind of pass, by the unit that it begins with.
        forward: Order of the pass under way.
        backward: Order of the backward under way.
        schedule: Order of the uses that a schedule reports.
        prefetched: Units gathered ahead as predicted, in order.
        requested: Units gathered ahead because a user chose them.
    """

    limit: PrefetchLimit
    num_uses: int = 0
    forwards: dict[UnitT, ExecutionOrder[UnitT]] = field(default_factory=dict)
    forward: ExecutionOrder[UnitT] = field(default_factory=ExecutionOrder)
    backward: ExecutionOrder[UnitT] = field(default_factory=ExecutionOrder)
    schedule: ExecutionOrder[UnitT] = field(default_factory=ExecutionOrder)
    prefetched: deque[UnitT] = field(default_factory=deque)
    requested: list[UnitT] = field(default_factory=list)

    def begin_forward(self, first: UnitT) -> None:
        """Begin a pass, predicted by the last pass that began with the same unit.

        Args:
            first: The unit that the pass begins with.
        """
        self.num_uses = 0
        self.forward = self.forwards.setdefault(first, ExecutionOrder())
        self.forward.begin()

    def begin_backward(self) -> None:
        """Begin a backward, predicted to reverse the order of forwards."""
        self.num_uses = 0
        self.backward.begin_reversed()

    def begin_schedule(self) -> None:
        """Begin a schedule, which reports uses one by one, forwards and backwards."""
        self.num_uses = 0
        self.schedule.begin()


# -- passes and the order of their reductions ------------------------------------------------------


@dataclass(slots=True, eq=False)
class Turn:
    """When a pass is reduced, among the passes of all roots.

    Attributes:
        first: Number of its first forward; -1 if it has none.
        last: Number of the end of the root's forward; the largest one is reduced first.
    """

    first: int = -1
    last: int = -1


@dataclass(slots=True, eq=False)
class Numbers:
    """Counts the forwards of all roots, and lists the passes that are not reduced yet.

    Attributes:
        next: Returns the next number of the beginnings and ends of forwards, of all roots.
        unreduced: Turns of passes whose units are reduced in order, and are not all reduced yet.
    """

    next: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__)
    unreduced: list[Turn] = field(default_factory=list)


class Pass[UnitT: UnitFacts]:
    """One forward of the root: uses of units, and the order in which its backward reduces them.

    A unit is reduced once in a backward, after the last use of its parameters: ranks may use them
    different numbers of times, so their gradients may arrive at different times. The autograd graph
    of the forward holds this object, which is deleted when no backward can follow.

    If uses need gathers (ZeRO-3), all ranks run the same forwards. Where gathers ahead pair,
    although a gradient misses one of a unit's several forwards, its reduction has to pair, too: it
    is reduced together with the next unit that has a single forward, once the backward has left
    all its own.

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
        numbers: Numbers of forwards of all roots.
        order: All units in the fixed order; None if every rank runs the same forwards.

    Attributes:
        recomputable: Units whose forward the backward may have to repeat.
        used_directly: Units with a parameter that was used itself, outside their forwards.
        has_root: Whether the root ran in this pass.
        is_over: Whether its backward has begun, so that later forwards are another pass.
        turn: When it is reduced, among all passes.
        is_reduced: Whether all units had their turn in the latest backward, or reduce in no fixed
            order. An attribute, since it is read for every unit.
    """

    def __init__(self, numbers: Numbers, order: Sequence[UnitT] | None = None) -> None:
        self._numbers = numbers
        self.recomputable: set[UnitT] = set()
        self.used_directly: set[UnitT] = set()
        self.has_root = False
        self.is_over = False
        self.turn = Turn()
        self.is_reduced = True
        self._order = order
        # Index of the unit whose turn is next.
        self._next = 0
        # Uses of each unit, and those whose backward is pending.
        self._uses: Counter[UnitT] = Counter()
        self._left: Counter[UnitT] = Counter()
        # Without a fixed order: the number of each unit's first forward, the units with several
        # forwards, and those of them that are not reduced yet, in order of the first forward.
        self._begun: dict[UnitT, int] = {}
        self._repeated: set[UnitT] = set()
        self._waiting: list[UnitT] = []

    def __del__(self) -> None:
        # No backward can follow, so that no other pass waits for this one.
        self._leave()

    def _enter(self) -> None:
        if self.turn not in self._numbers.unreduced:
            self._numbers.unreduced.append(self.turn)

    def _leave(self) -> None:
        if self._order is not None and self.turn in self._numbers.unreduced:
            self._numbers.unreduced.remove(self.turn)

    # -- forward --------------------------------------------------------------------------------

    def begin_forward(self, units: Sequence[UnitT]) -> None:
        """Record the beginning of a unit's forward.

        Args:
            units: See `UnitState.reduced_with`.
        """
        if self._order is not None:
            return
        for unit in units:
            if unit in self._begun:
                self._repeated.add(unit)
            else:
                self._begun[unit] = self._numbers.next()

    def add_use(self, units: Sequence[UnitT]) -> None:
        """Count a use of a unit's parameters, whose backward its reduction has to wait for.

        Args:
            units: See `UnitState.reduced_with`.
        """
        for unit in units:
            self._uses[unit] += 1

    def add_direct_use(self, unit: UnitT) -> None:
        """Count a use of a parameter itself, whose gradient may arrive on some ranks only.

        Every rank reduces the unit: the operation was collective.
        """
        self.begin_forward([unit])
        self._repeated.add(unit)
        self.used_directly.add(unit)
        self.add_use([unit])

    @property
    def has_forwards(self) -> bool:
        """Whether a unit ran, and not only parameters themselves were used.

        Always False if units are reduced in a fixed order.
        """
        return self._begun.keys() > self.used_directly

    def drop_use(self, unit: UnitT) -> None:
        """Forget a counted use whose graph was freed, if units are reduced in a fixed order.

        Otherwise a use whose result was only looked at would defer all following reductions.
        """
        if self._order is not None:
            self._uses[unit] -= 1

    def expect_backward(self) -> None:
        """Note that a forward begins whose backward reduces units in the fixed order, if any."""
        if self._order is not None:
            if self.turn.first < 0:
                self.turn.first = self._numbers.next()
            self._enter()

    # -- backward -------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Begin a backward; the graph of a forward may have several."""
        self.is_over = True
        self._next, self.is_reduced = 0, self._order is None
        self._left = self._uses.copy()
        self._waiting = [unit for unit in self._begun if unit in self._repeated]
        if self._order is not None:
            self._enter()

    def count_backward(self, units: Sequence[UnitT]) -> list[UnitT]:
        """Count the backward of one use; without a fixed order, return the units to reduce now.

        Args:
            units: See `UnitState.reduced_with`.
        """
        for unit in units:
            self._left[unit] -= 1
        if self._order is not None:
            return []
        begun, repeated, waiting = self._begun, self._repeated, self._waiting
        found = []
        if units[0] not in repeated:
            while waiting and begun[waiting[-1]] > begun.get(units[0], 0):
                found.append(waiting.pop())
        return found + [u for u in units if self._left[u] <= 0 and u not in repeated]

    def waits(self, position: int) -> bool:
        """Return whether a pass that is reduced before this pass may still receive gradients."""
        turns = self._numbers.unreduced
        return any([t.last > self.turn.last and t.first < position for t in turns])

    def due(self, *, is_left: bool) -> list[UnitT]:
        """Return the units to reduce next, up to the first unit with a pending use.

        Args:
            is_left: Whether the backward has left the pass: no pending use can follow.
        """
        if self._order is None:
            return []
        start = self._next
        while self._next < len(self._order):
            unit = self._order[self._next]
            # A unit that another module replaced may be gone.
            if not is_left and not unit.is_gone and self._left[unit] > 0:
                break
            self._next += 1
        else:
            self.is_reduced = True
            self._leave()
        return [unit for unit in self._order[start : self._next] if not unit.is_gone]
