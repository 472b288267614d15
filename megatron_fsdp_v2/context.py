"""What the units of one root share: execution order, queues of communication, allocator."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from megatron_fsdp_v2.reduction_queue import MAX_LIVE_UNITS, ReductionQueue, Turns, TurnTaker

if TYPE_CHECKING:
    from megatron_fsdp_v2.allocator import Allocator
    from megatron_fsdp_v2.comm_interface import Communicator
    from megatron_fsdp_v2.rank_checks import CheckRanks

__all__ = ["Context", "ExecutionOrder"]


class Reshardable(TurnTaker, Protocol):
    """What the context needs to know of a unit."""

    def prefetch(self) -> None:
        """Start gathering ahead of use, if there is room."""
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


class Context[UnitT: Reshardable]:
    """State shared by the units under one root.

    Attributes:
        communicator: Issues collectives.
        allocator: Makes temporary buffers.
        enable_unshard_prefetch: Gather the next unit while this one computes.
        enable_async_reduce_grad: Reduce a unit's gradients while the next one computes.
        check_ranks: How often ranks compare what they do; see `fully_shard`.
        forward_order: Order of forwards in this pass and the last.
        backward_order: Order of forwards in this pass, which the backward reverses.
        reductions: Gradient reductions under way.
        turns: Order of reductions where ranks may run different units; None where they may not.
        weights_epoch: Counts events after which main weights may have changed.
        finalizer_queued: Whether the end of the running backward is taken care of.
        has_unsynced: Whether a backward left gradients to be synchronised.
        pass_has_grad: Whether the latest forward of the root was made for a backward.
        is_checked: Whether ranks have compared what they sharded.
    """

    def __init__(
        self,
        communicator: Communicator,
        allocator: Allocator,
        *,
        enable_unshard_prefetch: bool,
        enable_async_reduce_grad: bool,
        check_ranks: CheckRanks,
    ) -> None:
        self.communicator = communicator
        self.allocator = allocator
        self.enable_unshard_prefetch = enable_unshard_prefetch
        self.enable_async_reduce_grad = enable_async_reduce_grad
        self.check_ranks = check_ranks
        self.forward_order: ExecutionOrder[UnitT] = ExecutionOrder()
        self.backward_order: ExecutionOrder[UnitT] = ExecutionOrder()
        self.reductions = ReductionQueue()
        self.turns: Turns[UnitT] | None = None
        self.weights_epoch = 0
        self.finalizer_queued = False
        self.has_unsynced = False
        self.pass_has_grad = False
        self.is_checked = False
        self._units: list[weakref.ref[UnitT]] = []
        self._prefetched: weakref.ref[UnitT] | None = None
        self._requested: list[weakref.ref[UnitT]] = []
        self._recomputed: deque[weakref.ref[UnitT]] = deque()

    def set_units(self, units: Sequence[UnitT], *, takes_turns: bool) -> None:
        """Register the units, parents before children as `modules()` lists them.

        Units hold the context; the context holds units weakly.

        Args:
            units: All units under the root, the root's own first.
            takes_turns: Whether ranks may run different units.
        """
        self._units = [weakref.ref(unit) for unit in units]
        self.turns = Turns(list(reversed(units))) if takes_turns else None

    def units(self) -> list[UnitT]:
        """Live units, parents before children."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    def begin_forward(self, *, has_grad: bool) -> None:
        """Note that the root's forward starts (not a recomputation)."""
        self.pass_has_grad = has_grad
        self.allocator.begin_pass(
            "forward" if has_grad else "evaluation", is_quiet=self._is_quiet()
        )
        self.forward_order.begin()
        self.backward_order.begin()

    def end_pass(self, name: str) -> None:
        """Note that a backward, or a forward that has none, is over.

        Args:
            name: What is over, for reports; empty for an evaluation.
        """
        self.allocator.end_pass(name, is_quiet=self._is_quiet())

    def _is_quiet(self) -> bool:
        """Whether no backward is still to come, as far as the root can tell."""
        root = self._units[0]() if self._units else None
        return root is None or not root.is_expected_back

    def begin_backward(self) -> None:
        """Note that a backward starts."""
        self.finalizer_queued = True
        self.backward_order.begin_reversed()
        if self.turns is not None:
            self.turns.begin()

    def prefetch(self, unit: UnitT | None) -> None:
        """Start gathering a unit ahead of its use, because it came next the last time."""
        if unit is None or not self.enable_unshard_prefetch:
            return
        unit.prefetch()
        self._prefetched = weakref.ref(unit)

    def prefetch_requested(self, units: list[weakref.ref[UnitT]]) -> None:
        """Start gathering the units a user asked for; they stay until they ran or the pass ends."""
        if not self.enable_unshard_prefetch:
            return
        for ref in units:
            unit = ref()
            if unit is not None:
                unit.prefetch()
                self._requested.append(ref)

    def arrive(self, unit: UnitT) -> None:
        """A unit is about to be used: drop a prefetched one that is not it."""
        prefetched = None if self._prefetched is None else self._prefetched()
        self._prefetched = None
        if prefetched is not None and prefetched is not unit:
            prefetched.reshard()
        if self._requested:
            self._requested = [ref for ref in self._requested if ref() is not unit]

    def drop_prefetched(self) -> None:
        """The pass is over: nothing gathered in vain may outlive it."""
        for ref in [self._prefetched, *self._requested]:
            unit = None if ref is None else ref()
            if unit is not None:
                unit.reshard()
        self._prefetched = None
        self._requested = []

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
