"""Gradient reductions of a training: the schedule's rules, applied to groups that hold tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, override

from megatron_fsdp_v2.comm.interface import Work
from megatron_fsdp_v2.memory.observer import Observer
from megatron_fsdp_v2.params.grads import GroupGrads
from megatron_fsdp_v2.runtime.gather_rules import Together
from megatron_fsdp_v2.runtime.reduction_rules import Reduction, ReductionSchedule

__all__ = ["ReductionQueue"]


class ReductionQueue(ReductionSchedule[GroupGrads, Work]):
    """Gradient reductions under way; see `ReductionSchedule` for the other arguments.

    Args:
        observer: Receives the phase `finish_reduction`.
    """

    def __init__(
        self,
        max_live_grad_buffers: int,
        *,
        is_async: bool,
        bucket_nbytes: int,
        together: Together,
        observer: Observer,
    ) -> None:
        super().__init__(
            max_live_grad_buffers, is_async=is_async, bucket_nbytes=bucket_nbytes, together=together
        )
        self._observer = observer

    @override
    def issue_inner(self, group: GroupGrads) -> Work:
        return group.reduce(self, async_op=self.is_async)

    @override
    def finish_inner(self, done: Sequence[Reduction[GroupGrads, Work]]) -> None:
        with self._phase(done[0].group):
            for reduction in done:
                reduction.work.wait()
                reduction.group.end_inner()

    @override
    def issue_outer(self, groups: Sequence[GroupGrads]) -> list[Work]:
        with self._phase(groups[0]):
            return [group.reduce_outer(async_op=self.is_async) for group in groups]

    @override
    def finish_outer(self, done: Sequence[Reduction[GroupGrads, Work]]) -> None:
        with self._phase(done[0].group):
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

    def _phase(self, group: GroupGrads) -> AbstractContextManager[Any]:
        return self._observer.phase(group.name, "finish_reduction")
