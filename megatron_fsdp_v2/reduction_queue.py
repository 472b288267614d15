"""Gradient reductions: which unit's turn it is, and how many may be under way."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_fsdp_v2.comm_interface import Ticket
    from megatron_fsdp_v2.param_group import ParameterGroup

__all__ = ["MAX_LIVE_UNITS", "Reduction", "ReductionQueue", "TurnTaker", "Turns"]

MAX_LIVE_UNITS = 2
"""Units with gathered weights, and units with full gradient buffers, at any time."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """One group's reduction along the inner axis, under way.

    Attributes:
        group: Whose gradients.
        ticket: Of the collective.
        then_outer: Whether the outer axis is reduced next.
        async_op: Whether that one is asynchronous.
    """

    group: ParameterGroup
    ticket: Ticket
    then_outer: bool
    async_op: bool


class ReductionQueue:
    """Gradient reductions under way, and the sliding drain that bounds their buffers."""

    def __init__(self) -> None:
        self._pending: deque[list[Reduction]] = deque()
        self._outer: list[tuple[ParameterGroup, Ticket]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def push(self, issued: list[Reduction]) -> None:
        """Add one unit's reductions."""
        if issued:
            self._pending.append(issued)

    def push_outer(self, group: ParameterGroup) -> None:
        """Go on along the outer axis with a group whose inner reductions are all done."""
        if any(r.group is group for issued in self._pending for r in issued):
            return
        self._outer.append((group, group.reduce_outer(async_op=True)))

    def make_room(self, group: ParameterGroup) -> None:
        """Wait until another unit's full buffer fits, and until this group's own is free."""
        while len(self._pending) >= MAX_LIVE_UNITS or any(
            reduction.group is group for issued in self._pending for reduction in issued
        ):
            self.drain_one()

    def drain_one(self) -> None:
        """Wait for the oldest unit's reductions, free its buffers, go on along the outer axis."""
        for reduction in self._pending.popleft():
            reduction.ticket.wait()
            grads = reduction.group.grads
            assert grads is not None
            grads.release()
            if reduction.then_outer:
                ticket = reduction.group.reduce_outer(async_op=reduction.async_op)
                self._outer.append((reduction.group, ticket))

    def drain(self) -> None:
        """Wait for everything."""
        while self._pending:
            self.drain_one()
        # All of them first: two reductions of one group in a backward share its partial shard.
        for _, ticket in self._outer:
            ticket.wait()
        for group, _ in self._outer:
            assert group.grads is not None
            group.grads.release_partial()
        self._outer.clear()

    def abandon(self) -> None:
        """Forget everything after a failed backward; waits, since buffers may be in use."""
        for issued in self._pending:
            for reduction in issued:
                reduction.ticket.wait()
        for _, ticket in self._outer:
            ticket.wait()
        self._pending.clear()
        self._outer.clear()


class TurnTaker(Protocol):
    """What `Turns` needs to know of a unit."""

    @property
    def is_expected_back(self) -> bool:
        """Whether its backward is under way or still to come, after a forward of this rank."""
        ...


class Turns[UnitT: TurnTaker]:
    """One fixed order of reductions for ranks that may not run the same units.

    Where no use of a unit needs a gather (ZeRO-0, 1, 2), a rank may skip a unit that others run.
    Its reduction must pair with theirs all the same, and collectives pair by order alone. So every
    backward reduces every unit once, last registered first, which is the order backwards take
    anyhow: a unit that this rank skipped takes part without a gradient in its turn; one that is
    done before its turn waits for those that are expected back. Reductions after a unit's turn (a
    module used twice) go out as they come.
    """

    def __init__(self, units: Sequence[UnitT]) -> None:
        self._order = [weakref.ref(unit) for unit in units]
        self._positions = weakref.WeakKeyDictionary((u, i) for i, u in enumerate(units))
        self._next = 0
        self._done: set[int] = set()

    def begin(self) -> None:
        """A backward starts."""
        self._next = 0
        self._done.clear()

    def done(self, unit: UnitT) -> list[UnitT]:
        """A unit's backward is done on this rank; return the units to reduce now, in order."""
        position = self._positions[unit]
        if position < self._next:
            return [unit]
        self._done.add(position)
        ready = []
        while self._next < len(self._order):
            following = self._order[self._next]()
            if following is not None:
                if self._next not in self._done and following.is_expected_back:
                    break
                ready.append(following)
            self._next += 1
        return ready

    def rest(self) -> list[UnitT]:
        """The backward is over; return the units that had no turn yet, in order."""
        left = [unit for ref in self._order[self._next :] if (unit := ref()) is not None]
        self._next = len(self._order)
        return left
