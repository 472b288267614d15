"""When a step gathers and reduces: the rules, stated once, of units and groups of any kind.

A training follows them with units that hold tensors (`context.py`, `reduction_queue.py`), a plan
with units that hold numbers (`plan/schedule.py`); so both issue the same collectives in the same
order.

* **Order**: units are expected in the order of the last pass, backwards in the reverse order of
  the forwards that they are of (`ExecutionOrder`).
* **Prefetch**: once a unit is gathered, the next ones are on their way, as many as a limit of units
  or bytes allows (`PrefetchLimit`); whatever was expected before a unit that is used now, and was
  not used, is dropped (`GatherSchedule`).
* **Buckets**: where a number of bytes is given, small units that follow each other are gathered in
  one collective, and reduced in one (`buckets`).
* **Turns**: a unit is reduced once in a backward, after the last use of its parameters
  (`OrderedReductions`).
* **Drain**: the oldest reduction is waited for before one more full gradient buffer is given
  memory than there may be; the outer axis comes then, with a bound of its own
  (`ReductionSchedule`).

Nothing here knows tensors or process groups. Units are held weakly, so that a model can go.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "NOTHING_AHEAD",
    "Drain",
    "ExecutionOrder",
    "GatherSchedule",
    "Gatherable",
    "OrderedReductions",
    "PrefetchLimit",
    "Reduction",
    "ReductionSchedule",
    "RootPass",
]


# -- order and prefetch -----------------------------------------------------------------------


class Gatherable(Protocol):
    """What the schedule needs to know of a unit."""

    @property
    def is_unsharded(self) -> bool:
        """Whether its weights are gathered, or on their way."""
        ...

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of gathered weights that one use of it takes; 0 where it has no need to gather."""
        ...

    def prefetch(self) -> None:
        """Start gathering ahead of use, if there is room."""
        ...

    def reshard(self) -> None:
        """Drop gathered weights."""
        ...


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
        number, total = 0, 0
        for size in itertools.islice(sizes, self.units):
            total += size
            if number and self.nbytes is not None and total > self.nbytes:
                break
            number += 1
        return number

    def split[UnitT: Gatherable](
        self, following: Iterable[UnitT]
    ) -> tuple[Sequence[UnitT], Iterable[UnitT]]:
        """The units that may be gathered ahead of those that come next, and the others."""
        left = iter(following)
        if self.nbytes is None:
            return list(itertools.islice(left, self.units)), left
        ahead: list[UnitT] = []
        total = 0
        for unit in left:
            total += unit.gathered_nbytes
            if len(ahead) == self.units or (ahead and total > self.nbytes):
                return ahead, itertools.chain([unit], left)
            ahead.append(unit)
        return ahead, left

    def most(self, sizes: Iterable[int]) -> int:
        """How many may be gathered at most, with those of a bucket that the last one begins.

        Args:
            sizes: See `count`.
        """
        sizes = list(sizes)
        number = self.count(sizes)
        if not number or not self.bucket_nbytes:
            return number
        total = sizes[number - 1]
        for size in sizes[number:]:
            total += size
            if not size or total > self.bucket_nbytes:
                break
            number += 1
        return number

    @classmethod
    def of(
        cls, units: int | None, nbytes: int | None, bucket_nbytes: int | None = None
    ) -> PrefetchLimit:
        """What was asked for: a number of units, of bytes, both, or neither for one unit."""
        units = 1 if units is None and nbytes is None else units
        return cls(units, nbytes, bucket_nbytes or 0)


NOTHING_AHEAD = PrefetchLimit(0)


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


type Together = Callable[[], AbstractContextManager[object]]
"""A context in which collectives are put off to its end, and issued in one."""


class ExecutionOrder[UnitT: Gatherable]:
    """The order units ran in, as a guess of the order they will run in.

    A wrong guess costs a gather for nothing, never a result: it is symmetric on all ranks as long
    as they run the same units, and a mispredicted prefetch is dropped.
    """

    MOST = 1 << 14
    """Runs of a pass that are kept: units that run outside of their root make one without end."""

    def __init__(self) -> None:
        self._last: list[weakref.ref[UnitT]] = []
        self._current: list[weakref.ref[UnitT]] = []
        self._cursor = 0

    def begin(self) -> None:
        """Start a new pass; what was recorded becomes the guess."""
        if self._current:
            self._last = self._current
            self._current = []
        self._cursor = 0

    def record(self, unit: UnitT) -> Iterable[UnitT]:
        """Note that a unit runs now; return the ones that ran after it in the last pass."""
        self.note(unit)
        for position in range(self._cursor, len(self._last)):
            if self._last[position]() is unit:
                self._cursor = position + 1
                return self._live(self._last, range(position + 1, len(self._last)))
        return ()

    def note(self, unit: UnitT) -> None:
        """Note that a unit runs now."""
        if len(self._current) == self.MOST:
            del self._current[: self.MOST // 2]
        self._current.append(weakref.ref(unit))

    def begin_reversed(self) -> None:
        """Start walking the current pass from its end."""
        self._cursor = len(self._current) - 1

    def before(self, unit: UnitT) -> Iterable[UnitT]:
        """The units that ran before this one in the current pass, the latest first."""
        for position in range(min(self._cursor, len(self._current) - 1), -1, -1):
            if self._current[position]() is unit:
                self._cursor = position - 1
                return self._live(self._current, range(position - 1, -1, -1))
        return ()

    def beginning(self, limit: PrefetchLimit) -> list[UnitT]:
        """The unit that the latest pass began with, and those after it.

        Args:
            limit: How many of those.
        """
        refs = self._current or self._last
        first = refs[0]() if refs else None
        if first is None:
            return []
        ahead, _ = limit.split(self._live(refs, range(1, len(refs))))
        return [first, *ahead]

    @staticmethod
    def _live(refs: list[weakref.ref[UnitT]], positions: range) -> Iterator[UnitT]:
        """The units at these positions, one by one: few of them are asked for."""
        return (unit for position in positions if (unit := refs[position]()) is not None)


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

    def before_pass(self, first: UnitT) -> list[UnitT]:
        """What can be gathered before a pass begins: what the last one of its kind began with.

        Args:
            first: The unit it will begin with.
        """
        order = self._forward_orders.get(first)
        return [] if order is None or self.limit.is_none else order.beginning(self.limit)

    def gather_before_pass(self, units: Sequence[UnitT]) -> Sequence[UnitT]:
        """Gather units ahead of a pass; it drops them where it begins with others.

        Args:
            units: The first of those that `before_pass` says.

        Returns:
            Those that were not gathered before.
        """
        units = [unit for unit in units if not unit.is_unsharded]
        self.num_uses = 0
        self._prefetch(units)
        return units

    def first_units(self) -> Iterable[UnitT]:
        """The units that passes began with."""
        return self._forward_orders.keys()

    def forget_backwards(self) -> None:
        """Forwards from here on have backwards of their own."""
        self._backward_order.begin()

    def expect_backward(self, unit: UnitT) -> None:
        """A unit's forward is over, and a backward of it is to come."""
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
        if not unit.is_unsharded or any(ref() is unit for ref in self._prefetched):
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
        self._look_ahead(self._forward_order.record(unit), chosen)

    def in_backward(self, unit: UnitT, chosen: Sequence[weakref.ref[UnitT]] = ()) -> None:
        """Likewise for its backward."""
        self._look_ahead(self._backward_order.before(unit), chosen)

    def in_schedule(self, unit: UnitT) -> None:
        """Likewise for a use that a schedule tells, be it a forward or a backward."""
        self._look_ahead(self._scheduled_order.record(unit), ())

    def _look_ahead(self, following: Iterable[UnitT], chosen: Sequence[weakref.ref[UnitT]]) -> None:
        if self.limit.is_none:
            return
        if chosen:
            # They stay until they ran or the pass ends.
            for ref in chosen:
                requested = ref()
                if requested is not None:
                    requested.prefetch()
                    self._requested.append(ref)
            return
        ahead, further = self.limit.split(following)
        # One that is in use, or kept for its backward, is not this list's to drop.
        due = [unit for unit in ahead if not unit.is_unsharded]
        if not self.limit.bucket_nbytes:
            self._prefetch(due)
        elif due:
            self._prefetch_in_buckets(due, further)

    def _prefetch_in_buckets(self, due: Sequence[UnitT], further: Iterable[UnitT]) -> None:
        """Gather some units ahead, and with the last ones those that come next."""
        more = itertools.takewhile(lambda u: u.gathered_nbytes and not u.is_unsharded, further)
        num_due, nbytes = len(due), self.limit.bucket_nbytes
        for bucket in buckets(itertools.chain(due, more), lambda u: u.gathered_nbytes, nbytes):
            if num_due <= 0:
                return
            num_due -= len(bucket)
            with self._together():
                self._prefetch(bucket)

    def _prefetch(self, units: Sequence[UnitT]) -> None:
        for unit in units:
            # Also one that has no room: it is expected all the same.
            unit.prefetch()
            self._prefetched.append(weakref.ref(unit))

    def drop_prefetched(self) -> None:
        """The pass is over: no mispredicted prefetch may outlive it."""
        for ref in [*self._prefetched, *self._requested]:
            unit = ref()
            if unit is not None:
                unit.reshard()
        self._prefetched.clear()
        self._requested = []


# -- turns ------------------------------------------------------------------------------------


class RootPass[UnitT]:
    """One forward of the root, and runs of units outside of it: how often each unit ran.

    What a backward has to wait for before a unit's gradients are complete. The graph of the
    forward holds it, so it goes when no backward can come any more.

    Attributes:
        has_root: Whether the root ran in it.
        is_over: Whether a backward of it has begun, so that later forwards are another pass.
    """

    def __init__(self) -> None:
        self._uses: weakref.WeakKeyDictionary[UnitT, int] = weakref.WeakKeyDictionary()
        self.has_root = False
        self.is_over = False

    def add_use(self, *units: UnitT) -> None:
        """Note that a unit ran once more.

        Args:
            units: That unit, and the owner of every group of others that it computes with.
        """
        for unit in units:
            self._uses[unit] = self._uses.get(unit, 0) + 1

    def num_uses(self, unit: UnitT) -> int:
        """How often it ran."""
        return self._uses.get(unit, 0)


class OrderedReductions[UnitT]:
    """When each unit is reduced in a backward, so that ranks do the same.

    Once, after the last of its uses: a rank may use the unit's parameters more often than another,
    and then gradients arrive in other places.

    Where no use of a unit needs a gather (ZeRO-0, 1, 2), a rank may skip a unit that others run,
    or run it more often, and so there is one fixed order as well. Its reduction must pair with
    theirs all the same, and collectives pair by order alone. So the backward of one pass through
    the root reduces every unit exactly once, last registered first, which is the order backwards
    take anyhow: a unit that this rank skipped takes part without a gradient in its turn; one that
    is done before its turn waits for those that are still to come. What is uncertain (a use that
    no gradient reaches) is reduced at the end.

    Args:
        units: All units, parents before children, in the order they were registered.
        in_order: Whether they are reduced in a fixed order, and all of them.
    """

    def __init__(self, units: Sequence[UnitT], *, in_order: bool = True) -> None:
        self.in_order = in_order
        turns = list(reversed(units))
        self._order = [weakref.ref(unit) for unit in turns]
        self._positions = weakref.WeakKeyDictionary((u, i) for i, u in enumerate(turns))
        self._next = 0
        self._left = [0] * len(turns)

    def begin(self, passed: RootPass[UnitT]) -> None:
        """The backward of a pass starts."""
        self._next = 0
        units = (ref() for ref in self._order)
        self._left = [0 if unit is None else passed.num_uses(unit) for unit in units]

    def done(self, *units: UnitT) -> list[UnitT]:
        """The backward of one use is done on this rank; return the units to reduce now, in order.

        Empty where an earlier turn is still to come, or more uses of this unit.

        Args:
            units: As they were given to `RootPass.add_use`.
        """
        ready: list[UnitT] = []
        for unit in units:
            position = self._positions[unit]
            self._left[position] -= 1
            if not self.in_order:
                if self._left[position] <= 0:
                    ready.append(unit)
                continue
            while self._next < len(self._order):
                following = self._order[self._next]()
                if following is not None:
                    if self._left[self._next] > 0:
                        break
                    ready.append(following)
                self._next += 1
        return ready

    def remaining(self) -> list[UnitT]:
        """The backward is over; return the units that have to have had a turn, and had none."""
        if not self.in_order:
            return []
        left = [unit for ref in self._order[self._next :] if (unit := ref()) is not None]
        self._next = len(self._order)
        return left


# -- drain ------------------------------------------------------------------------------------


class Drain(enum.Enum):
    """Why reductions are waited for."""

    ROOM = "room"
    """Another unit takes a full gradient buffer, or a partial shard, and so many may have one."""
    END = "end"
    """What reads gradients comes next."""
    AT_ONCE = "at once"
    """Reductions are to overlap nothing."""


@dataclass(frozen=True, slots=True)
class Reduction[GroupT, WorkT]:
    """One group's reduction along the inner axis, under way.

    Attributes:
        group: Whose gradients.
        work: What tells when it is done.
        then_outer: Whether the outer axis is reduced next.
    """

    group: GroupT
    work: WorkT
    then_outer: bool


class ReductionSchedule[GroupT, WorkT](ABC):
    """Gradient reductions under way, and the bounded in-flight queue that limits their buffers.

    Whoever derives from it says what a group is, issues the collectives and waits for them.

    Args:
        together: Where there are buckets, what makes one of reductions.

    Attributes:
        max_live_grad_buffers: Units that may have full gradient buffers at a time, and units
            that may be in an outer reduction. A bucket counts as one.
        is_async: Whether they overlap what comes next.
        bucket_nbytes: Bytes of full buffers up to which units that are reduced one after the other
            are reduced in one collective; 0 for none.
        draining: Why the latest of them was waited for, or is now.
    """

    def __init__(
        self,
        max_live_grad_buffers: int,
        *,
        is_async: bool,
        bucket_nbytes: int = 0,
        together: Together = contextlib.nullcontext,
    ) -> None:
        self.max_live_grad_buffers = max_live_grad_buffers
        self.is_async = is_async
        # What is waited for at once has nothing to be put together with.
        self.bucket_nbytes = bucket_nbytes if is_async else 0
        self._together = together
        # Reductions that wait for others, until a bucket is full: group, and `then_outer`.
        self._bucket: dict[GroupT, bool] = {}
        self._bucket_total = 0
        self.draining = Drain.ROOM
        self._inner: deque[list[Reduction[GroupT, WorkT]]] = deque()
        self._outer: deque[list[tuple[GroupT, WorkT]]] = deque()

    def __len__(self) -> int:
        return len(self._inner)

    # What a group is.

    @abstractmethod
    def accumulates_unreduced(self, group: GroupT) -> bool:
        """Whether its full buffer collects gradients until they are synchronized."""

    @abstractmethod
    def has_outer_axis(self, group: GroupT) -> bool:
        """Whether a reduction along an outer axis follows."""

    @abstractmethod
    def has_partial(self, group: GroupT) -> bool:
        """Whether a shard of it waits for that one."""

    @abstractmethod
    def full_nbytes(self, group: GroupT) -> int:
        """Bytes of its full buffer."""

    # What is done with it.

    @abstractmethod
    def issue_inner(self, group: GroupT) -> WorkT:
        """Reduce it along the inner axis."""

    @abstractmethod
    def finish_inner(self, done: Sequence[Reduction[GroupT, WorkT]]) -> None:
        """Wait for the inner reductions of a unit; their full buffers are free then."""

    @abstractmethod
    def issue_outer(self, groups: Sequence[GroupT]) -> list[WorkT]:
        """Reduce groups of a unit along the outer axis."""

    @abstractmethod
    def finish_outer(self, done: Sequence[tuple[GroupT, WorkT]]) -> None:
        """Wait for the outer reductions of a unit; their partial shards are free then."""

    # The rules.

    def due(self, groups: Iterable[GroupT], *, synchronize: bool) -> list[GroupT]:
        """Which groups of a unit are reduced at the end of its backward.

        Args:
            groups: Those that have a gradient, here or on another rank.
            synchronize: Whether gradients go all the way into `param.grad`.
        """
        return [g for g in groups if synchronize or not self.accumulates_unreduced(g)]

    def reduce(self, due: Sequence[GroupT], *, synchronize: bool) -> None:
        """Reduce groups of one unit, once one more unit's reductions may be under way.

        Args:
            due: What `due` said.
            synchronize: Likewise.
        """
        if self.bucket_nbytes:
            for group in due:
                self._put_off(group, then_outer=synchronize and self.has_outer_axis(group))
            return
        if due:
            self._start({g: synchronize and self.has_outer_axis(g) for g in due})
        if not self.is_async:
            self.drain(Drain.AT_ONCE)

    def _put_off(self, group: GroupT, *, then_outer: bool) -> None:
        """Reduce a group with those that come next, if they are small.

        Where ranks run different units, they call this in the same order all the same, and what it
        does depends on nothing else.
        """
        if group in self._bucket:
            # A later gradient of it is in the same full buffer.
            self._bucket[group] |= then_outer
            return
        nbytes = self.full_nbytes(group)
        if self._bucket_total + nbytes > self.bucket_nbytes:
            self.issue_bucket()
        self._bucket[group] = then_outer
        self._bucket_total += nbytes
        if nbytes > self.bucket_nbytes:
            self.issue_bucket()

    @property
    def has_bucket(self) -> bool:
        """Whether a reduction waits for others."""
        return bool(self._bucket)

    def forget_bucket(self) -> None:
        """Leave out what waits for others."""
        self._bucket, self._bucket_total = {}, 0

    def issue_bucket(self) -> None:
        """Reduce what waits for others."""
        if self._bucket:
            bucket = self._bucket
            self.forget_bucket()
            self._start(bucket)

    def _start(self, groups: Mapping[GroupT, bool]) -> None:
        # Full buffers that collected several micro-batches are all there, and none had to wait.
        self.draining = Drain.ROOM
        while len(self._inner) >= self.max_live_grad_buffers:
            self.drain_one()
        with self._together() if self.bucket_nbytes else contextlib.nullcontext():
            self._inner.append(
                [Reduction(group, self.issue_inner(group), to) for group, to in groups.items()]
            )

    def reduce_partials(self, groups: Iterable[GroupT]) -> None:
        """Go on along the outer axis with groups whose inner reductions are all done."""
        for group in groups:
            is_waiting = group in self._bucket or self._has_inner(group)
            if self.has_partial(group) and not is_waiting:
                self._go_on([group])

    def reserve(self, group: GroupT) -> None:
        """Wait until another unit's full buffer fits, and until this group's own is free."""
        self.draining = Drain.ROOM
        while len(self._inner) >= self.max_live_grad_buffers or self._has_inner(group):
            self.drain_one()

    def drain_one(self) -> None:
        """Wait for the oldest unit's reductions, go on along the outer axis."""
        oldest = self._inner.popleft()
        self.finish_inner(oldest)
        self._go_on([reduction.group for reduction in oldest if reduction.then_outer])

    def drain(self, why: Drain = Drain.END) -> None:
        """Wait for everything."""
        self.issue_bucket()
        self.draining = why
        while self._inner:
            self.drain_one()
        while self._outer:
            self.finish_outer(self._outer.popleft())

    def groups(self) -> list[GroupT]:
        """The groups whose main gradients are being written, or that wait for others."""
        inner = [reduction.group for issued in self._inner for reduction in issued]
        inner += self._bucket
        return inner + [group for under_way in self._outer for group, _ in under_way]

    def is_in_outer(self, group: GroupT) -> bool:
        """Whether an outer reduction of a group is under way."""
        return any(other == group for under_way in self._outer for other, _ in under_way)

    def _has_inner(self, group: GroupT) -> bool:
        for issued in self._inner:
            for reduction in issued:
                if reduction.group == group:
                    return True
        return False

    def _go_on(self, groups: Sequence[GroupT]) -> None:
        if not groups:
            return
        # Or partial shards of all units would be alive at the end of a backward.
        while len(self._outer) >= self.max_live_grad_buffers:
            self.finish_outer(self._outer.popleft())
        self._outer.append(list(zip(groups, self.issue_outer(groups), strict=True)))
