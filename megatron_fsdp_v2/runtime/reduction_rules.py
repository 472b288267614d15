"""When a step reduces: the rules, stated once, of groups of any kind. See `gather_rules.py`.

* **Turns**: a unit is reduced once in a backward, after the last use of its parameters
  (`OrderedReductions`).
* **Drain**: the oldest reduction is waited for before one more full gradient buffer is given
  memory than there may be; the outer axis comes then, with a bound of its own
  (`ReductionSchedule`).
* **Buckets**: where a number of bytes is given, small units that follow each other are reduced in
  one collective.

Nothing here knows tensors or process groups. Units are held weakly, so that a model can go.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_fsdp_v2.runtime.gather_rules import Together

__all__ = ["Drain", "OrderedReductions", "Reducible", "Reduction", "ReductionSchedule", "RootPass"]


_ONE_BY_ONE: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


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
        # By weak references, which cost a tenth of what a WeakKeyDictionary does.
        self._uses: dict[weakref.ref[UnitT], int] = {}
        self.has_root = False
        self.is_over = False

    def add_use(self, *units: UnitT) -> None:
        """Note that a unit ran once more.

        Args:
            units: That unit, and the owner of every group of others that it computes with.
        """
        for unit in units:
            ref = weakref.ref(unit)
            self._uses[ref] = self._uses.get(ref, 0) + 1

    def num_uses(self, unit: UnitT) -> int:
        """How often it ran."""
        return self._uses.get(weakref.ref(unit), 0)


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
        self._positions = {ref: position for position, ref in enumerate(self._order)}
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
            position = self._positions[weakref.ref(unit)]
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


class Reducible(Protocol):
    """What the schedule needs to know of a group."""

    @property
    def accumulates_unreduced(self) -> bool:
        """Whether its full buffer collects gradients until they are synchronized."""
        ...

    @property
    def has_outer_axis(self) -> bool:
        """Whether a reduction along an outer axis follows."""
        ...

    @property
    def has_partial(self) -> bool:
        """Whether a shard of it waits for that one."""
        ...

    @property
    def full_nbytes(self) -> int:
        """Bytes of its full buffer."""
        ...


@dataclass(frozen=True, slots=True)
class Reduction[GroupT, WorkT]:
    """One group's reduction under way.

    Attributes:
        group: Whose gradients.
        work: What tells when it is done.
        then_outer: Whether the outer axis is reduced next.
    """

    group: GroupT
    work: WorkT
    then_outer: bool = False


class ReductionSchedule[GroupT: Reducible, WorkT](ABC):
    """Gradient reductions under way, and the bounded in-flight queue that limits their buffers.

    Whoever derives from it issues the collectives and waits for them.

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
        self._outer: deque[list[Reduction[GroupT, WorkT]]] = deque()

    def __len__(self) -> int:
        return len(self._inner)

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
    def finish_outer(self, done: Sequence[Reduction[GroupT, WorkT]]) -> None:
        """Wait for the outer reductions of a unit; their partial shards are free then."""

    # The rules.

    def due(self, groups: Iterable[GroupT], *, synchronize: bool) -> Mapping[GroupT, bool]:
        """Which groups of a unit are reduced at the end of its backward, and each how far.

        Args:
            groups: Those that have a gradient, here or on another rank.
            synchronize: Whether gradients go all the way into `param.grad`.

        Returns:
            Of each, whether the outer axis is reduced next.
        """
        found: dict[GroupT, bool] = {}
        for group in groups:
            if synchronize or not group.accumulates_unreduced:
                then_outer = synchronize and group.has_outer_axis
                known = self._bucket.get(group)
                # One that waits for others to be reduced that far does so with all it has.
                if known is None or (then_outer and not known):
                    found[group] = then_outer
        return found

    def reduce(self, due: Mapping[GroupT, bool]) -> None:
        """Reduce groups of one unit, once one more unit's reductions may be under way.

        Args:
            due: What `due` said.
        """
        if self.bucket_nbytes:
            for group, then_outer in due.items():
                self._put_off(group, then_outer=then_outer)
            return
        if due:
            self._start(due)
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
        nbytes = group.full_nbytes
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
        with self._together() if self.bucket_nbytes else _ONE_BY_ONE:
            self._inner.append(
                [Reduction(group, self.issue_inner(group), to) for group, to in groups.items()]
            )

    def reduce_partials(self, groups: Iterable[GroupT]) -> None:
        """Go on along the outer axis with groups whose inner reductions are all done."""
        for group in groups:
            is_waiting = group in self._bucket or self._has_inner(group)
            if group.has_partial and not is_waiting:
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
        following = [reduction.group for reduction in oldest if reduction.then_outer]
        if following:
            self._go_on(following)

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
        inner, outer = (
            [reduction.group for issued in queue for reduction in issued]
            for queue in (self._inner, self._outer)
        )
        return [*inner, *self._bucket, *outer]

    def is_in_outer(self, group: GroupT) -> bool:
        """Whether an outer reduction of a group is under way."""
        return any(reduction.group == group for issued in self._outer for reduction in issued)

    def _has_inner(self, group: GroupT) -> bool:
        for issued in self._inner:
            for reduction in issued:
                if reduction.group == group:
                    return True
        return False

    def _go_on(self, groups: Sequence[GroupT]) -> None:
        # Or partial shards of all units would be alive at the end of a backward.
        while len(self._outer) >= self.max_live_grad_buffers:
            self.finish_outer(self._outer.popleft())
        works = self.issue_outer(groups)
        self._outer.append([*map(Reduction, groups, works)])
