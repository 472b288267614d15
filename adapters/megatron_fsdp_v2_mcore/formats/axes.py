"""One process group for reductions over two mesh axes, since Transformer Engine takes only one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, override

import torch.distributed as dist

if TYPE_CHECKING:
    import torch

    from megatron_fsdp_v2.comm.interface import Axis


class AxesGroup(dist.ProcessGroup):
    """The ranks of several mesh axes, for all-reduces along one axis after the other.

    The group uses the communicators of the axes; a communicator of its own would have to be
    created by all ranks together. The result of a maximum is bitwise independent of the order.
    """

    def __init__(self, axes: Sequence[Axis]) -> None:
        """Create the group of these axes, outermost first."""
        rank = 0
        for axis in axes:
            rank = rank * axis.size + axis.rank
        super().__init__(rank, math.prod(axis.size for axis in axes))  # type: ignore[call-arg]
        self._groups = [axis.group for axis in axes]

    @override
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce in place; see `torch.distributed.all_reduce`.

        Returns:
            The work handle of the last axis; the others are complete. None for a synchronous call
            of a backend that returns no handle.
        """
        options = dist.AllreduceOptions() if opts is None else opts
        *others, last = self._groups
        for group in others:
            work = group.allreduce(tensors, options)
            # NCCL returns None for a synchronous call, which is ordered on the current stream.
            if work is not None:
                work.wait()
        return last.allreduce(tensors, options)


def group_over(axes: Sequence[Axis]) -> dist.ProcessGroup:
    """Return the group of one axis, or an `AxesGroup` of several. Not collective."""
    return axes[0].group if len(axes) == 1 else AxesGroup(axes)
