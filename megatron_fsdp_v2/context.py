"""What the units of one root share: execution order, queues of communication, allocator."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from megatron_fsdp_v2.allocator import Allocator
    from megatron_fsdp_v2.comm import Communicator, Ticket
    from megatron_fsdp_v2.param_group import ParameterGroup

__all__ = ["Context", "ExecutionOrder", "Reduction", "ReductionQueue", "in_backward"]

MAX_LIVE_UNITS = 2
"""Units with gathered weights, and units with full gradient buffers, at any time."""


def in_backward() -> bool:
    """Whether the calling thread is inside the autograd engine: a forward is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


class Reshardable(Protocol):
    """What the context needs to know of a unit."""

    def unshard(self, *, async_op: bool) -> None:
        """Start gathering."""
        ...

    def reshard(self) -> None:
        """Drop gathered weights."""
        ...


class ExecutionOrder[UnitT: Reshardable]:
    """The order units ran in, as a guess of the order they will run in.

    A wrong guess costs a gather for nothing, never a result: it is symmetric on all ranks as long
    as they run the same units, and what was gathered in vain is dropped.
    """

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

    def record(self, unit: UnitT) -> UnitT | None:
        """Note that a unit runs now; return the one that ran after it in the last pass."""
        self._current.append(weakref.ref(unit))
        for position in range(self._cursor, len(self._last)):
            if self._last[position]() is unit:
                self._cursor = position + 1
                return self._at(self._last, position + 1)
        return None

    def begin_reversed(self) -> None:
        """Start walking the current pass from its end."""
        self._cursor = len(self._current) - 1

    def before(self, unit: UnitT) -> UnitT | None:
        """The unit that ran before this one in the current pass."""
        for position in range(min(self._cursor, len(self._current) - 1), -1, -1):
            if self._current[position]() is unit:
                self._cursor = position - 1
                return self._at(self._current, position - 1)
        return None

    @staticmethod
    def _at(order: list[weakref.ref[UnitT]], position: int) -> UnitT | None:
        return order[position]() if 0 <= position < len(order) else None


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
        for group, ticket in self._outer:
            ticket.wait()
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


class Context[UnitT: Reshardable]:
    """State shared by the units under one root.

    Attributes:
        communicator: Issues collectives.
        allocator: Makes temporary buffers.
        enable_unshard_prefetch: Gather the next unit while this one computes.
        enable_async_reduce_grad: Reduce a unit's gradients while the next one computes.
        forward_order: Order of forwards.
        reductions: Gradient reductions under way.
        weights_epoch: Counts events after which main weights may have changed.
        finalizer_queued: Whether the end of the running backward is taken care of.
    """

    def __init__(
        self,
        communicator: Communicator,
        allocator: Allocator,
        *,
        enable_unshard_prefetch: bool,
        enable_async_reduce_grad: bool,
    ) -> None:
        self.communicator = communicator
        self.allocator = allocator
        self.enable_unshard_prefetch = enable_unshard_prefetch
        self.enable_async_reduce_grad = enable_async_reduce_grad
        self.forward_order: ExecutionOrder[UnitT] = ExecutionOrder()
        self.backward_order: ExecutionOrder[UnitT] = ExecutionOrder()
        self.reductions = ReductionQueue()
        self.weights_epoch = 0
        self.finalizer_queued = False
        self._units: list[weakref.ref[UnitT]] = []
        self._prefetched: weakref.ref[UnitT] | None = None
        self._recomputed: deque[weakref.ref[UnitT]] = deque()

    def add_unit(self, unit: UnitT) -> None:
        """Register a unit. Units hold the context; the context holds units weakly."""
        self._units.append(weakref.ref(unit))

    def units(self) -> list[UnitT]:
        """Live units, children before parents."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    def begin_forward(self) -> None:
        """Note that the root's forward starts (not a recomputation)."""
        self.forward_order.begin()
        self.backward_order.begin()

    def prefetch(self, unit: UnitT | None) -> None:
        """Start gathering a unit ahead of its use, one at a time."""
        if unit is None or not self.enable_unshard_prefetch:
            return
        unit.unshard(async_op=True)
        self._prefetched = weakref.ref(unit)

    def arrive(self, unit: UnitT) -> None:
        """A unit is about to be used: drop a prefetched one that is not it."""
        prefetched = None if self._prefetched is None else self._prefetched()
        self._prefetched = None
        if prefetched is not None and prefetched is not unit:
            prefetched.reshard()

    def keep_recomputed(self, unit: UnitT) -> None:
        """Leave a recomputed unit gathered for its backward, the latest few of them."""
        self._recomputed = deque(
            ref for ref in self._recomputed if ref() is not None and ref() is not unit
        )
        self._recomputed.append(weakref.ref(unit))
        while len(self._recomputed) > MAX_LIVE_UNITS:
            oldest = self._recomputed.popleft()()
            if oldest is not None:
                oldest.reshard()

    def forget_recomputed(self, unit: UnitT | None = None) -> None:
        """A unit's own backward takes over from here, or (without one) the whole backward ends."""
        if unit is None:
            self._recomputed.clear()
        elif self._recomputed:
            self._recomputed = deque(ref for ref in self._recomputed if ref() is not unit)
