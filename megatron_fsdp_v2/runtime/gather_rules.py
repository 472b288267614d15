"""When a step gathers: the rules, stated once, of units of any kind.

A training follows these rules and those of `reduction_rules.py` with units that hold tensors
(`context.py`, `reduction_queue.py`), a plan with units that hold numbers (`plan/schedule.py`); so
both issue the same collectives in the same order.

* **Order**: units are expected in the order of the last pass, backwards in the reverse order of
  the forwards that they are of (`ExecutionOrder`).
* **Units that gather nothing** (below ZeRO-3) are not part of that order; what is gathered ahead of
  others is so while they run, too.
* **Prefetch**: once a unit is gathered, the next ones are on their way, as many as a limit of units
  or bytes allows (`PrefetchLimit`); whatever was expected before a unit that is used now, and was
  not used, is dropped (`GatherSchedule`).
* **Buckets**: where a number of bytes is given, small units that follow each other are gathered in
  one collective (`buckets`).

Nothing here knows tensors or process groups. Units are held weakly, so that a model can go.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "NOTHING_AHEAD",
    "ExecutionOrder",
    "GatherSchedule",
    "Gatherable",
    "PrefetchLimit",
    "Together",
    "buckets",
]

type Together = Callable[[], AbstractContextManager[object]]
"""A context in which collectives are put off to its end, and issued in one."""


class Gatherable(Protocol):
    """What the schedule needs to know of a unit.

    Attributes:
        is_unsharded: Whether its weights are gathered, or on their way.
    """

    is_unsharded: bool

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of gathered weights that one use of it takes; 0 where it has no need to gather."""
        ...

    @property
    def has_one_form(self) -> bool:
        """Whether weights gathered for one use are there for every use."""
        ...

    def prefetch(self) -> None:
        """Start gathering ahead of use, if there is room; nothing where all is there."""
        ...

    def reshard(self) -> None:
        """Drop gathered weights."""
        ...


def buckets[ItemT](
    items: Iterable[ItemT], nbytes: Callable[[ItemT], int], most: int
) -> Iterator[list[ItemT]]:
    """Items that follow each other, as many together as take so many bytes at most, or one.

    Args:
        items: The items.
        nbytes: What one takes; nothing is put together with one that takes none.
        most: Bytes.
    """
    bucket: list[ItemT] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if bucket and (not size or not total or total + size > most):
            yield bucket
            bucket, total = [], 0
        bucket.append(item)
        total += size
    if bucket:
        yield bucket


@dataclass(frozen=True, slots=True)
class PrefetchLimit:
    """How much may be gathered ahead of the unit at work.

    Where there is any prefetching at all, the next unit is gathered ahead whatever it takes.

    Attributes:
        units: Units at most; 0 for none, None for any number.
        nbytes: Bytes of their gathered weights at most, of all together; None for any number.
        bucket_nbytes: Bytes of gathered weights up to which units are gathered in one collective,
            where one of them is to be gathered; 0 for none.
    """

    units: int | None = 1
    nbytes: int | None = None
    bucket_nbytes: int = 0

    @property
    def is_none(self) -> bool:
        """Whether nothing is gathered ahead."""
        return self.units == 0

    def count(self, sizes: Iterable[int]) -> int:
        """How many of the units that come next may be gathered ahead.

        Args:
            sizes: Bytes of gathered weights of each, the next one first.
        """
        return len(self.split(sizes, _itself)[0])

    def split[UnitT](
        self, following: Iterable[UnitT], nbytes: Callable[[UnitT], int]
    ) -> tuple[Sequence[UnitT], Iterable[UnitT]]:
        """The units that may be gathered ahead of those that come next, and the others.

        Args:
            following: Those that come next.
            nbytes: What gathered weights of one take.
        """
        left = iter(following)
        if self.nbytes is None:
            return list(itertools.islice(left, self.units)), left
        ahead: list[UnitT] = []
        total = 0
        for unit in left:
            total += nbytes(unit)
            if len(ahead) == self.units or (ahead and total > self.nbytes):
                return ahead, itertools.chain([unit], left)
            ahead.append(unit)
        return ahead, left

    def most(self, sizes: Iterable[int]) -> int:
        """How many may be gathered at most, with those of a bucket that the last one begins.

        Args:
            sizes: See `count`.
        """
        ahead, further = self.split(sizes, _itself)
        if not ahead or not self.bucket_nbytes:
            return len(ahead)
        last = next(buckets(itertools.chain(ahead[-1:], further), _itself, self.bucket_nbytes))
        return len(ahead) - 1 + len(last)

    @classmethod
    def of(
        cls, units: int | None, nbytes: int | None, bucket_nbytes: int | None = None
    ) -> PrefetchLimit:
        """What was asked for: a number of units, of bytes, both, or neither for one unit."""
        units = 1 if units is None and nbytes is None else units
        return cls(units, nbytes, bucket_nbytes or 0)


NOTHING_AHEAD = PrefetchLimit(0)


_gathered_nbytes: Callable[[Gatherable], int] = operator.attrgetter("gathered_nbytes")


def _itself(size: int) -> int:
    return size


class ExecutionOrder[UnitT: Gatherable]:
    """The order units ran in, as a guess of the order they will run in.

    A wrong guess costs a gather for nothing, never a result: it is symmetric on all ranks as long
    as they run the same units, and a mispredicted prefetch is dropped.
    """

    MOST = 1 << 14
    """Runs of a pass that are kept: units that run outside of their root make one without end."""

    def __init__(self) -> None:
        self._expected: list[weakref.ref[UnitT]] = []
        self._ran: list[weakref.ref[UnitT]] = []
        # Of those that are expected, the first one that did not run yet.
        self._next = 0

    def begin(self) -> None:
        """Start a new pass, expected to be as the last one was."""
        self._expected, self._ran, self._next = self._ran or self._expected, [], 0

    def begin_reversed(self) -> None:
        """Start a pass that is expected to go through what has run until now from its end."""
        self._expected, self._next = self._ran[::-1], 0

    def note(self, unit: UnitT) -> None:
        """Note that a unit runs now."""
        if len(self._ran) == self.MOST:
            del self._ran[: self.MOST // 2]
        self._ran.append(weakref.ref(unit))

    def after(self, unit: UnitT) -> Iterable[UnitT]:
        """A unit runs now; return the ones that are expected after it, none if it was not."""
        for position in range(self._next, len(self._expected)):
            if self._expected[position]() is unit:
                self._next = position + 1
                return self.left()
        return ()

    def left(self) -> Iterable[UnitT]:
        """The units that are still expected, one by one: few of them are asked for."""
        left = range(self._next, len(self._expected))
        if not left:
            return ()
        return (unit for position in left if (unit := self._expected[position]()) is not None)

    def beginning(self, limit: PrefetchLimit) -> list[UnitT]:
        """The unit that the latest pass began with, and those after it.

        Args:
            limit: How many of those.
        """
        refs = self._ran or self._expected
        first = refs[0]() if refs else None
        if first is None:
            return []
        following = (unit for ref in refs[1:] if (unit := ref()) is not None)
        return [first, *limit.split(following, _gathered_nbytes)[0]]


class GatherSchedule[UnitT: Gatherable]:
    """What is gathered ahead of its use, and what of that is dropped again.

    A use of a unit is `before_use`, then its own gather, then one of `in_forward`, `in_backward`
    and `in_schedule`, which start the gathers of what comes next.

    Args:
        together: Where there are buckets, what makes one of gathers.

    Attributes:
        limit: How much is gathered ahead of the unit at work.
        num_uses: Uses of units that have begun in the pass under way.
    """

    def __init__(self, limit: PrefetchLimit, together: Together = contextlib.nullcontext) -> None:
        self.limit = limit
        self._together = together
        self.num_uses = 0
        # By the unit that a pass begins with.
        self._forward_orders: weakref.WeakKeyDictionary[UnitT, ExecutionOrder[UnitT]] = (
            weakref.WeakKeyDictionary()
        )
        self._forward_order: ExecutionOrder[UnitT] = ExecutionOrder()
        self._backward_order: ExecutionOrder[UnitT] = ExecutionOrder()
        self._scheduled_order: ExecutionOrder[UnitT] = ExecutionOrder()
        self._prefetched: deque[weakref.ref[UnitT]] = deque()
        self._requested: list[weakref.ref[UnitT]] = []

    def begin_forward(self, first: UnitT) -> None:
        """A pass begins; the last one that began with the same unit says what comes next.

        Args:
            first: The unit it begins with.
        """
        self.num_uses = 0
        self._forward_order = self._forward_orders.setdefault(first, ExecutionOrder())
        self._forward_order.begin()

    def gather_before_pass(
        self, first: UnitT, is_ready: Callable[[UnitT], bool]
    ) -> Sequence[UnitT]:
        """Gather ahead of a pass what the last one of its kind began with.

        The pass drops them where it begins with others.

        Args:
            first: The unit it will begin with.
            is_ready: Whether a unit can be gathered already. From the first one on that cannot,
                none is: order is the forward's.

        Returns:
            Those that were not gathered before.
        """
        order = self._forward_orders.get(first)
        if order is None or self.limit.is_none:
            return []
        ready = itertools.takewhile(is_ready, order.beginning(self.limit))
        units = [unit for unit in ready if not unit.is_unsharded]
        self.num_uses = 0
        self._prefetch(units)
        return units

    def first_units(self) -> Iterable[UnitT]:
        """The units that passes began with."""
        return self._forward_orders.keys()

    def forget_backwards(self) -> None:
        """Forwards from here on have backwards of their own."""
        self._backward_order = ExecutionOrder()

    def expect_backward(self, unit: UnitT) -> None:
        """A unit's forward is over, and a backward of it is to come."""
        if unit.gathered_nbytes:
            self._backward_order.note(unit)

    def begin_backward(self) -> None:
        """A backward begins: it takes the forwards in reverse."""
        self.num_uses = 0
        self._backward_order.begin_reversed()

    def begin_schedule(self) -> None:
        """A schedule begins that tells uses one by one, forwards and backwards."""
        self.num_uses = 0
        self._scheduled_order.begin()

    def before_use(self, unit: UnitT) -> None:
        """A unit is about to be used: drop those that were expected before it.

        If it was not expected at all, everything was guessed wrong, unless it was gathered anyway.
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
        if self._requested:
            self._requested = [ref for ref in self._requested if ref() is not unit]

    def in_forward(self, unit: UnitT, chosen: Sequence[weakref.ref[UnitT]] = ()) -> None:
        """A unit is gathered for its forward: start gathering what comes next.

        Args:
            unit: The unit.
            chosen: What a user asked for instead.
        """
        if unit.gathered_nbytes:
            self._forward_order.note(unit)
        self._look_ahead(self._forward_order, unit, chosen)

    def in_backward(self, unit: UnitT, chosen: Sequence[weakref.ref[UnitT]] = ()) -> None:
        """Likewise for its backward."""
        self._look_ahead(self._backward_order, unit, chosen)

    def in_schedule(self, unit: UnitT) -> None:
        """Likewise for a use that a schedule tells, be it a forward or a backward."""
        if unit.gathered_nbytes:
            self._scheduled_order.note(unit)
        self._look_ahead(self._scheduled_order, unit, ())

    def _look_ahead(
        self,
        order: ExecutionOrder[UnitT],
        unit: UnitT,
        chosen: Sequence[weakref.ref[UnitT]],
    ) -> None:
        following = order.after(unit) if unit.gathered_nbytes else order.left()
        if not (following or chosen) or self.limit.is_none:
            return
        if chosen:
            # They stay until they ran or the pass ends.
            for ref in chosen:
                requested = ref()
                if requested is not None:
                    requested.prefetch()
                    self._requested.append(ref)
            return
        ahead, further = self.limit.split(following, _gathered_nbytes)
        due = []
        for expected in ahead:
            # One that is in use, or kept for its backward, is not this list's to drop.
            if not expected.is_unsharded:
                due.append(expected)
            # It may be kept in another form than its next use needs.
            elif not expected.has_one_form:
                expected.prefetch()
        if not self.limit.bucket_nbytes:
            self._prefetch(due)
        elif due:
            self._prefetch_in_buckets(due, further)

    def _prefetch_in_buckets(self, due: Sequence[UnitT], further: Iterable[UnitT]) -> None:
        """Gather some units ahead, and with the last ones those that come next."""
        more = itertools.takewhile(lambda u: u.gathered_nbytes and not u.is_unsharded, further)
        num_due, nbytes = len(due), self.limit.bucket_nbytes
        for bucket in buckets(itertools.chain(due, more), _gathered_nbytes, nbytes):
            if num_due <= 0:
                return
            num_due -= len(bucket)
            with self.together():
                self._prefetch(bucket)

    def together(self) -> AbstractContextManager[object]:
        """Where there are buckets, a context whose gathers are one; elsewhere nothing."""
        return self._together() if self.limit.bucket_nbytes else contextlib.nullcontext()

    def _prefetch(self, units: Sequence[UnitT]) -> None:
        for unit in units:
            # Also one that has no room: it is expected all the same.
            unit.prefetch()
            # Once: it may have been gathered ahead before, and dropped by who loaded weights.
            ref = weakref.ref(unit)
            if ref not in self._prefetched:
                self._prefetched.append(ref)

    def drop_prefetched(self) -> None:
        """The pass is over: no mispredicted prefetch may outlive it."""
        for ref in [*self._prefetched, *self._requested]:
            unit = ref()
            if unit is not None:
                unit.reshard()
        self._prefetched.clear()
        self._requested = []
