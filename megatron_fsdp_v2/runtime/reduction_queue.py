"""Gradient reductions: which unit's turn it is, and how many may be under way."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron_fsdp_v2.comm.interface import Work
    from megatron_fsdp_v2.params.grads import GroupGrads

__all__ = ["OrderedReductions", "Reduction", "ReductionQueue", "RootPass"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """One group's reduction along the inner axis, under way.

    Attributes:
        grads: Whose.
        work: Of the collective.
        then_outer: Whether the outer axis is reduced next.
        async_op: Whether that one is asynchronous.
    """

    grads: GroupGrads
    work: Work
    then_outer: bool
    async_op: bool


class ReductionQueue:
    """Gradient reductions under way, and the bounded in-flight queue that limits their buffers.

    Attributes:
        max_live_grad_buffers: Units that may have full gradient buffers at a time, and units
            that may be in an outer reduction.
        ranges: Makes a profiler range of the name of a group that is waited for, or None.
    """

    ranges: Callable[[str], AbstractContextManager[Any]] | None = None

    def __init__(self, max_live_grad_buffers: int) -> None:
        self.max_live_grad_buffers = max_live_grad_buffers
        self._pending: deque[list[Reduction]] = deque()
        self._outer: deque[list[tuple[GroupGrads, Work]]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def reserve_for_reduction(self) -> None:
        """Wait until one more unit's reductions may be under way."""
        # Full buffers that collected several micro-batches are all there, and none had to wait.
        while len(self._pending) >= self.max_live_grad_buffers:
            self.drain_one()

    def push(self, issued: list[Reduction]) -> None:
        """Add one unit's reductions."""
        if issued:
            self._pending.append(issued)

    def push_outer(self, grads: GroupGrads) -> None:
        """Go on along the outer axis with a group whose inner reductions are all done."""
        if not self._has_inner(grads):
            self._issue_outer([(grads, True)])

    def reserve(self, grads: GroupGrads) -> None:
        """Wait until another unit's full buffer fits, and until this group's own is free."""
        while len(self._pending) >= self.max_live_grad_buffers or self._has_inner(grads):
            self.drain_one()

    def drain_one(self) -> None:
        """Wait for the oldest unit's reductions, free its buffers, go on along the outer axis."""
        oldest, following = self._pending.popleft(), []
        with self._range(oldest[0].grads):
            for reduction in oldest:
                reduction.work.wait()
                reduction.grads.end_inner()
                if reduction.then_outer:
                    following.append((reduction.grads, reduction.async_op))
        self._issue_outer(following)

    def drain(self) -> None:
        """Wait for everything."""
        while self._pending:
            self.drain_one()
        while self._outer:
            self._drain_one_outer()

    def grads(self) -> list[GroupGrads]:
        """Those whose main gradients are being written."""
        inner = [reduction.grads for issued in self._pending for reduction in issued]
        return inner + [grads for under_way in self._outer for grads, _ in under_way]

    def abandon(self) -> None:
        """Forget everything after a failed backward; waits, since buffers may be in use."""
        for issued in self._pending:
            for reduction in issued:
                reduction.work.wait()
        for under_way in self._outer:
            for _, work in under_way:
                work.wait()
        self._pending.clear()
        self._outer.clear()

    def _range(self, grads: GroupGrads) -> AbstractContextManager[Any]:
        return nullcontext() if self.ranges is None else self.ranges(grads.name)

    def _has_inner(self, grads: GroupGrads) -> bool:
        return any(r.grads is grads for issued in self._pending for r in issued)

    def _issue_outer(self, following: list[tuple[GroupGrads, bool]]) -> None:
        if not following:
            return
        # Or partial shards of all units would be alive at the end of a backward.
        while len(self._outer) >= self.max_live_grad_buffers:
            self._drain_one_outer()
        with self._range(following[0][0]):
            issued = [
                (grads, grads.reduce_outer(async_op=is_async)) for grads, is_async in following
            ]
            self._outer.append(issued)

    def _drain_one_outer(self) -> None:
        done = self._outer.popleft()
        with self._range(done[0][0]):
            for _, work in done:
                work.wait()
        # Two reductions of one group in a backward share its partial shard: the last one frees it.
        still_used = {id(grads) for under_way in self._outer for grads, _ in under_way}
        for grads, _ in done:
            if id(grads) not in still_used:
                grads.end_outer()


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

    def add_use(self, unit: UnitT) -> None:
        """Note that a unit, or one that computes with its parameters, ran once more."""
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
        units: All units, in the order of their turns.
        in_order: Whether they are reduced in that order, and all of them.
    """

    def __init__(self, units: Sequence[UnitT], *, in_order: bool = True) -> None:
        self.in_order = in_order
        self._order = [weakref.ref(unit) for unit in units]
        self._positions = weakref.WeakKeyDictionary((u, i) for i, u in enumerate(units))
        self._next = 0
        self._left = [0] * len(units)

    def begin(self, passed: RootPass[UnitT]) -> None:
        """The backward of a pass starts."""
        self._next = 0
        units = (ref() for ref in self._order)
        self._left = [0 if unit is None else passed.num_uses(unit) for unit in units]

    def done(self, unit: UnitT) -> list[UnitT]:
        """The backward of one use is done on this rank; return the units to reduce now, in order.

        Empty where an earlier turn is still to come, or more uses of this unit.
        """
        position = self._positions[unit]
        self._left[position] -= 1
        if not self.in_order:
            return [unit] if self._left[position] <= 0 else []
        ready = []
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
