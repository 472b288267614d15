"""The gradients of a parameter group: from autograd into `param.grad`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_fsdp_v2.comm.interface import DONE, Axis, CommStream, Communicator, Work, store
from megatron_fsdp_v2.layout.buffer_layout import BufferLayout
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.layout.placement import AxisPlacements, Placement
from megatron_fsdp_v2.memory.allocator import Allocator, BufferUse, TemporaryBuffer
from megatron_fsdp_v2.params.buffer import DataParallelBuffer, ShardGrid, Span

__all__ = ["GroupGrads"]


class GroupGrads:
    """Full gradient buffer -> (outer-partial shard) -> main gradient.

    Autograd's gradients land in views of one flat temporary buffer, in the communication dtype. The
    inner reduction puts or adds this rank's slice of it, scaled, into the main gradient, or,
    where the reduction along an outer axis is pending, into a partial shard that waits for the
    synchronized backward and is scaled then. Where unsynchronized gradients are not sharded (DDP,
    ZeRO-1), the buffer keeps collecting, in the main gradient's dtype, until then.

    A gradient arrives on the stream that its parameter was used on in the forward, which need not
    be the compute stream. The engine orders that with the others only when a backward ends, so it
    is done here: see `_order_write` and `wait_for_writers`.

    Attributes:
        views: The full buffer's view of every parameter.
        filled: Per parameter, whether a gradient arrived since the last reduction.
        accumulates_unreduced: Whether the full buffer collects until the synchronized backward.
        reduces: Whether gradients are summed over ranks. Otherwise the main gradient is this
            rank's own, unscaled, of the rows it holds.
        scale: Factor of the sum over data-parallel ranks.
        contributed: Whether this rank had a gradient in any reduction that led to the main
            gradient as it is.
        is_being_reduced: Whether the full buffer belongs to a reduction that is under way.
    """

    def __init__(
        self,
        name: str,
        layout: BufferLayout,
        grid: ShardGrid,
        placements: Sequence[AxisPlacements],
        dtypes: GroupDtypes,
        device: torch.device,
        scale: float,
        communicator: Communicator,
        allocator: Allocator,
        *,
        reduces: bool,
    ) -> None:
        self.layout = layout
        self.reduces = reduces
        self.contributed = False
        self.is_being_reduced = False
        self._comm = communicator
        self.scale = scale
        self._device = device
        self._dtypes = dtypes
        self._inner: Axis = grid.axes[-1]
        self._inner_is_cut = placements[-1].main_grad is Placement.SHARD
        self._outer: Axis | None = grid.axes[0] if len(grid.axes) == 2 else None
        self._outer_is_cut = placements[0].main_grad is Placement.SHARD
        self.accumulates_unreduced = placements[-1].unreduced_grad is Placement.PARTIAL
        self._main_span = grid.span([p.main_grad for p in placements])
        whole = Span(0, grid.num_slices)
        buffer_dtype = dtypes.main_grad if self.accumulates_unreduced else dtypes.grad_comm

        def temporary(kind: str, use: BufferUse, numel: int, dtype: torch.dtype) -> TemporaryBuffer:
            return allocator.buffer(f"{name}/{kind}", use, numel, dtype, device)

        gradient, communication = BufferUse.GRADIENT, BufferUse.COMMUNICATION
        self._temporary = temporary("main_grad", gradient, layout.numel, buffer_dtype)
        self._full = DataParallelBuffer.over(layout, whole, self._temporary)
        self.views = [self._full.view(index) for index in range(len(layout.slots))]
        self._gaps = layout.gaps()
        self._comm_buffer: TemporaryBuffer | None = None
        if buffer_dtype != dtypes.grad_comm:
            self._comm_buffer = temporary(
                "grad_comm", communication, layout.numel, dtypes.grad_comm
            )
        self._partial: TemporaryBuffer | None = None
        self._outer_comm_buffer: TemporaryBuffer | None = None
        if self._outer is not None:
            pieces = [*(Placement.REPLICATE for _ in placements[:-1]), placements[-1].main_grad]
            numel = grid.span(pieces).count * layout.shard_numel
            self._partial = temporary("partial_grad", gradient, numel, dtypes.main_grad)
            if dtypes.main_grad != dtypes.grad_comm:
                self._outer_comm_buffer = temporary(
                    "outer_grad_comm", communication, numel, dtypes.grad_comm
                )
        self._partial_is_valid = False
        self._main: DataParallelBuffer | None = None
        self.filled = [False] * len(layout.slots)
        # Side streams that wrote to the full buffer, and which one wrote a parameter's gradient.
        self._writers: set[Any] = set()
        self._written_aside: dict[int, Any] = {}

    @property
    def is_live(self) -> bool:
        """Whether the full buffer has memory."""
        return self._temporary.is_live

    @property
    def has_gradient(self) -> bool:
        """Whether any gradient arrived since the last reduction."""
        return any(self.filled)

    @property
    def has_outer_axis(self) -> bool:
        """Whether a second reduction follows, along an outer axis."""
        return self._partial is not None and self.reduces

    @property
    def has_partial(self) -> bool:
        """Whether a shard still waits for the outer reduction."""
        return self._partial_is_valid

    @property
    def main(self) -> DataParallelBuffer:
        """The main gradient, allocated on first use and kept."""
        if self._main is None:
            self._main = DataParallelBuffer.empty(
                self.layout, self._main_span, self._dtypes.main_grad, self._device
            )
        return self._main

    @property
    def has_main(self) -> bool:
        """Whether the main gradient is allocated, from the first reduction on."""
        return self._main is not None

    @property
    def steady_nbytes(self) -> int:
        """Bytes of the main gradient, 0 before the first backward."""
        return 0 if self._main is None else self._main.nbytes

    def temporaries(self) -> dict[str, TemporaryBuffer]:
        """Its temporary buffers by what they hold."""
        held = {
            "main_grad": self._temporary,
            "grad_comm": self._comm_buffer,
            "partial_grad": self._partial,
            "outer_grad_comm": self._outer_comm_buffer,
        }
        return {kind: buffer for kind, buffer in held.items() if buffer is not None}

    def acquire(self) -> None:
        """Give the full buffer memory."""
        if not self._temporary.is_live:
            self._take(self._temporary)

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Take one parameter's gradient: written the first time, added after that.

        A sparse one, such as that of `nn.Embedding(sparse=True)`, becomes dense.
        """
        if grad.layout is not torch.strided:
            self.kernel_view(index).add_(grad)
            return
        self._order_write(index)
        if self.filled[index]:
            self.views[index].add_(grad)
        else:
            self.views[index].copy_(grad)
            self.filled[index] = True

    def kernel_view(self, index: int) -> torch.Tensor:
        """One parameter's view for a kernel that adds to it by itself; zeroed the first time."""
        self._order_write(index)
        if not self.filled[index]:
            self.views[index].zero_()
            self.filled[index] = True
        return self.views[index]

    def _order_write(self, index: int) -> None:
        """Order what the current stream writes of a parameter after what others wrote there."""
        side = self._comm.side_stream()
        if side is None and not self._written_aside:
            return
        writer = self._written_aside.get(index)
        if side == writer:
            return
        # Its first write, and any to what the compute stream may have written.
        after_compute = side is not None and (side not in self._writers or self.filled[index])
        self._comm.wait_for([] if writer is None else [writer], and_compute=after_compute)
        if side is None:
            del self._written_aside[index]
        else:
            self._writers.add(side)
            self._written_aside[index] = side

    def wait_for_writers(self) -> None:
        """Order what the caller does next after all that was written to the full buffer."""
        if self._writers or self._comm.side_stream() is not None:
            self._comm.wait_for(self._writers, and_compute=True)
            self._writers.clear()
            self._written_aside.clear()

    def fill_missing(self) -> None:
        """Zero what no gradient arrived for, and the gaps between parameters.

        With no gradient at all, the zeros are negative: -0.0 is what IEEE addition leaves
        everything else as it is, so a sum is all -0.0 where every rank had none, and +0.0 or
        something else where one rank had a gradient. No rank has to be asked.
        """
        if not self.has_gradient:
            self._temporary.tensor.fill_(-0.0)
            return
        missing = itertools.compress(self.views, (not filled for filled in self.filled))
        gaps = (self._temporary.tensor[start:end] for start, end in self._gaps)
        if unset := [*missing, *gaps]:
            torch._foreach_zero_(unset)

    def reduce_inner(self, *, accumulate: bool, async_op: bool) -> Work:
        """Reduce the full buffer along the inner axis. Collective.

        Args:
            accumulate: Whether the main gradient holds something to add to. Where an outer axis
                follows, the partial shard decides that for itself.
            async_op: Whether to return before it is done.
        """
        self.contributed = self.contributed or self.has_gradient
        self.is_being_reduced = True
        self.filled = [False] * len(self.filled)
        if not self.reduces:
            own = self._full.piece(self._main_span)
            store(self.main.tensor, own, 1.0, accumulate)
            return DONE
        if self._partial is not None:
            accumulate = self._partial_is_valid
            into = self._take(self._partial)
            self._partial_is_valid = True
        else:
            into = self.main.tensor
        full = self._temporary.tensor
        before, after = self._factors()
        if before != 1.0:
            full.mul_(before)
        if self._comm_buffer is not None:
            full = self._take(self._comm_buffer).copy_(full)
            # Two units in flight would have two buffers each otherwise.
            self._drop(self._temporary)
        collective = self._comm.reduce_scatter if self._inner_is_cut else self._comm.all_reduce
        return collective(
            into,
            full,
            self._inner,
            CommStream.REDUCE,
            scale=after if self._partial is None else 1.0,
            accumulate=accumulate,
            async_op=async_op,
        )

    def is_unused(self) -> bool:
        """Whether the main gradient is the sum of no gradients (see `fill_missing`).

        Waits for the device. To be asked only where this rank had no gradient.
        """
        main = self.main.tensor
        return bool(((main == 0) & main.signbit()).all())

    def release(self) -> None:
        """Drop the full buffer; its reduction has been waited for."""
        self.is_being_reduced = False
        self._drop(self._temporary)
        if self._comm_buffer is not None:
            self._drop(self._comm_buffer)

    def _take(self, buffer: TemporaryBuffer) -> torch.Tensor:
        with self._comm.memory():
            return buffer.acquire()

    def _drop(self, buffer: TemporaryBuffer) -> None:
        if buffer.is_live:
            self._comm.settle()
            buffer.release()

    def reduce_outer(self, *, accumulate: bool, async_op: bool) -> Work:
        """Reduce the partial shard along the outer axis into the main gradient. Collective."""
        if self._partial is None or self._outer is None or not self._partial_is_valid:
            return DONE
        self._partial_is_valid = False
        partial = self._partial.tensor
        if self._outer_comm_buffer is not None:
            partial = self._take(self._outer_comm_buffer).copy_(partial)
            self._drop(self._partial)
        collective = self._comm.reduce_scatter if self._outer_is_cut else self._comm.all_reduce
        return collective(
            self.main.tensor,
            partial,
            self._outer,
            CommStream.OUTER,
            scale=self._factors()[1],
            accumulate=accumulate,
            async_op=async_op,
        )

    def _factors(self) -> tuple[float, float]:
        """What is applied to the terms, and what to their sum; `scale` is the product.

        All of it to the sum, which is a shard where the terms are whole buffers, except for fp16:
        a sum of gradients is soon beyond its 65504. There the terms get the power of two of a
        factor below 1, which changes no bit of what does not fall below fp16's range.
        """
        if torch.float16 not in (self._dtypes.grad_comm, self._dtypes.main_grad):
            return 1.0, self.scale
        before = min(1.0, 2.0 ** (math.frexp(self.scale)[1] - 1))
        return before, self.scale / before

    def release_partial(self) -> None:
        """Drop the partial shard; its reduction has been waited for."""
        if self._partial is not None and not self._partial_is_valid:
            self._drop(self._partial)
        if self._outer_comm_buffer is not None:
            self._drop(self._outer_comm_buffer)

    def replace_buffers(self, replacement: Callable[[TemporaryBuffer], TemporaryBuffer]) -> None:
        """Put something in the place of temporary buffers that does the same, and tells of it."""
        self._temporary = replacement(self._temporary)
        if self._comm_buffer is not None:
            self._comm_buffer = replacement(self._comm_buffer)
        if self._partial is not None:
            self._partial = replacement(self._partial)
        if self._outer_comm_buffer is not None:
            self._outer_comm_buffer = replacement(self._outer_comm_buffer)

    def abandon(self) -> None:
        """Forget gradients that are not reduced yet, after a failed backward."""
        self.wait_for_writers()
        self.filled = [False] * len(self.filled)
        self._partial_is_valid = False
        self.contributed = False
        self.release()
        self.release_partial()
