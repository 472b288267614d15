"""Gradient reductions of a training: the schedule's rules, applied to groups that hold tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, override

from megatron_fsdp_v2.comm.interface import Work
from megatron_fsdp_v2.params.grads import GroupGrads
from megatron_fsdp_v2.runtime.reduction_rules import Reduction, ReductionSchedule

__all__ = ["ReductionQueue"]

_NO_RANGE: AbstractContextManager[Any] = nullcontext()


class ReductionQueue(ReductionSchedule[GroupGrads, Work]):
    """Gradient reductions under way.

    Attributes:
        ranges: Makes a profiler range of the name of a group that is waited for, or None.
    """

    ranges: Callable[[str], AbstractContextManager[Any]] | None = None

    @override
    def accumulates_unreduced(self, group: GroupGrads) -> bool:
        return group.accumulates_unreduced

    @override
    def has_outer_axis(self, group: GroupGrads) -> bool:
        return group.has_outer_axis

    @override
    def has_partial(self, group: GroupGrads) -> bool:
        return group.has_partial

    @override
    def full_nbytes(self, group: GroupGrads) -> int:
        return group.full_nbytes

    @override
    def issue_inner(self, group: GroupGrads) -> Work:
        return group.reduce(self, async_op=self.is_async)

    @override
    def finish_inner(self, done: Sequence[Reduction[GroupGrads, Work]]) -> None:
        with self._range(done[0].group):
            for reduction in done:
                reduction.work.wait()
                reduction.group.end_inner()

    @override
    def issue_outer(self, groups: Sequence[GroupGrads]) -> list[Work]:
        with self._range(groups[0]):
            return [group.reduce_outer(async_op=self.is_async) for group in groups]

    @override
    def finish_outer(self, done: Sequence[tuple[GroupGrads, Work]]) -> None:
        with self._range(done[0][0]):
            for _, work in done:
                work.wait()
        for group, _ in done:
            # Two reductions of one group in a backward share its partial shard: the last frees it.
            if not self.is_in_outer(group):
                group.end_outer()

    def abandon(self) -> None:
        """Forget everything after a failed backward; waits, since buffers may be in use."""
        self.forget_bucket()
        for issued in self._inner:
            for reduction in issued:
                reduction.work.wait()
        for under_way in self._outer:
            for _, work in under_way:
                work.wait()
        self._inner.clear()
        self._outer.clear()

    def _range(self, group: GroupGrads) -> AbstractContextManager[Any]:
        return _NO_RANGE if self.ranges is None else self.ranges(group.name)
