"""One group for what is reduced over the ranks of two mesh axes: Transformer Engine takes one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, override

import torch.distributed as dist

if TYPE_CHECKING:
    import torch

    from megatron_fsdp_v2.comm.interface import Axis

__all__ = ["AxesGroup", "group_over"]


class AxesGroup(dist.ProcessGroup):
    """The ranks of several mesh axes, for all-reduces along one axis after the other.

    It has no communicator of its own, which all ranks would have to make together: it uses those
    that the axes have. A maximum is the same, bit by bit, in whatever order it is taken.
    """

    def __init__(self, axes: Sequence[Axis]) -> None:
        """Stand for these axes, outermost first."""
        rank = 0
        for axis in axes:
            rank = rank * axis.size + axis.rank
        super().__init__(rank, math.prod(axis.size for axis in axes))  # type: ignore[call-arg]
        self._groups = [axis.group for axis in axes]

    @override
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce in place; see `torch.distributed.all_reduce`.

        Returns:
            The work of the last axis, which the others were waited for before; None for a
            synchronous call, where the backend has none.
        """
        options = dist.AllreduceOptions() if opts is None else opts
        *others, last = self._groups
        for group in others:
            work = group.allreduce(tensors, options)
            # NCCL has none for a synchronous call, which is ordered on the current stream.
            if work is not None:
                work.wait()
        return last.allreduce(tensors, options)


def group_over(axes: Sequence[Axis]) -> dist.ProcessGroup:
    """The group of one axis, or one over several. Not collective."""
    return axes[0].group if len(axes) == 1 else AxesGroup(axes)
