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
    def finish_outer(self, done: Sequence[Reduction[GroupGrads, Work]]) -> None:
        with self._range(done[0].group):
            for reduction in done:
                reduction.work.wait()
        for reduction in done:
            # Two reductions of one group in a backward share its partial shard: the last frees it.
            if not self.is_in_outer(reduction.group):
                reduction.group.end_outer()

    def abandon(self) -> None:
        """Forget everything after a failed backward; waits, since buffers may be in use."""
        self.forget_bucket()
        for issued in (*self._inner, *self._outer):
            for reduction in issued:
                reduction.work.wait()
        self._inner.clear()
        self._outer.clear()

    def _range(self, group: GroupGrads) -> AbstractContextManager[Any]:
        return _NO_RANGE if self.ranges is None else self.ranges(group.name)
