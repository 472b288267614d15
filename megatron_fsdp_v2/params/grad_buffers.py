"""The flat buffers that gradients are collected in, and the order of what is written there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_fsdp_v2.comm.interface import Communicator
from megatron_fsdp_v2.layout.placement import Placement
from megatron_fsdp_v2.memory.allocator import Allocator, BufferUse, TemporaryBuffer
from megatron_fsdp_v2.memory.observer import Observer
from megatron_fsdp_v2.params.buffer import DataParallelBuffer, FlatSpec, Span

__all__ = ["GradBuffers"]

_KINDS = {
    "main_grad": "full",
    "grad_comm": "grad_comm",
    "partial_grad": "partial",
    "outer_grad_comm": "outer_grad_comm",
    "offloading": "offloading",
}
"""Attributes that are temporary buffers, by what those are called in reports."""


class GradBuffers:
    """Memory of a group's gradients before they are reduced: it comes and goes.

    Autograd's gradients land in views of one flat temporary buffer, in the communication dtype or,
    where it keeps collecting over micro-batches, in the main gradient's dtype.

    A gradient arrives on the stream that its parameter was used on in the forward, which need not
    be the compute stream. The engine orders that with the others only when a backward ends, so it
    is done here: see `_order_write` and `wait_for_writers`.

    Attributes:
        observer: Receives events of the buffers.
        comm: Orders streams, and reduces.
        full: The whole buffer that gradients arrive in.
        whole: The same as a span of the flat buffer.
        views: Its view of every parameter.
        filled: Per parameter, whether a gradient arrived since the last reduction.
        grad_comm: Copy of it in the communication dtype, where that is another one; else None.
        partial: Shard that waits for the reduction along an outer axis; None without one.
        outer_grad_comm: Copy of that in the communication dtype, likewise.
        offloading: The sum on the device, on its way to the main gradient in host memory; None
            where that is on the device.
    """

    def __init__(
        self,
        flat: FlatSpec,
        communicator: Communicator,
        allocator: Allocator,
        *,
        keeps_collecting: bool,
    ) -> None:
        self.observer = Observer()
        self.comm = communicator
        layout, placements = flat.layout, flat.placements
        comm_dtype, main_dtype = flat.dtypes.grad_comm, flat.dtypes.main_grad
        dtype = main_dtype if keeps_collecting else comm_dtype

        def temporary(kind: str, use: BufferUse, span: Span, dtype: torch.dtype) -> TemporaryBuffer:
            numel = span.count * layout.shard_numel
            return allocator.buffer(f"{flat.name}/{kind}", use, numel, dtype, flat.device)

        def copy_of(dtype: torch.dtype, kind: str, span: Span) -> TemporaryBuffer | None:
            if dtype == comm_dtype:
                return None
            return temporary(kind, BufferUse.COMMUNICATION, span, comm_dtype)

        self.full = temporary("main_grad", BufferUse.GRADIENT, flat.whole, dtype)
        self.whole = DataParallelBuffer(layout, flat.whole, self.full.tensor, self.full)
        self.views = [self.whole.view(index) for index in range(len(layout.slots))]
        self._gaps = [self.full.alias(start, (end - start,)) for start, end in layout.gaps()]
        self.grad_comm = copy_of(dtype, "grad_comm", flat.whole)
        self.partial: TemporaryBuffer | None = None
        self.outer_grad_comm: TemporaryBuffer | None = None
        if len(placements) == 2:
            span = flat.span([Placement.REPLICATE, placements[-1].main_grad])
            self.partial = temporary("partial_grad", BufferUse.GRADIENT, span, main_dtype)
            self.outer_grad_comm = copy_of(main_dtype, "outer_grad_comm", span)
        self.offloading: TemporaryBuffer | None = None
        if flat.host is not None:
            span = flat.span([p.main_grad for p in placements])
            self.offloading = temporary("offloading", BufferUse.COMMUNICATION, span, main_dtype)
        self.filled = [False] * len(layout.slots)
        # Side streams that wrote to the full buffer, and which one wrote a parameter's gradient.
        self._writers: set[Any] = set()
        self._written_aside: dict[int, Any] = {}

    @property
    def has_gradient(self) -> bool:
        """Whether any gradient arrived since the last reduction."""
        return any(self.filled)

    def forget_filled(self) -> None:
        """Expect the first gradient of every parameter again."""
        self.filled = [False] * len(self.filled)

    # -- writing ------------------------------------------------------------------------------

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Take one parameter's gradient: written the first time, added after that.

        A sparse one, such as that of `nn.Embedding(sparse=True)`, becomes dense.
        """
        if grad.layout is not torch.strided:
            self.kernel_view(index).add_(grad)
            return
        if self.comm.has_streams:
            self._order_write(index)
        if self.filled[index]:
            self.views[index].add_(grad)
        else:
            self.views[index].copy_(grad)
            self.filled[index] = True

    def kernel_view(self, index: int) -> torch.Tensor:
        """One parameter's view for a kernel that adds to it by itself; zeroed the first time."""
        if self.comm.has_streams:
            self._order_write(index)
        if not self.filled[index]:
            self.views[index].zero_()
            self.filled[index] = True
        return self.views[index]

    def _order_write(self, index: int) -> None:
        """Order what the current stream writes of a parameter after what others wrote there."""
        side = self.comm.side_stream()
        if side is None and not self._written_aside:
            return
        writer = self._written_aside.get(index)
        if side == writer:
            return
        # Its first write, and any to what the compute stream may have written.
        after_compute = side is not None and (side not in self._writers or self.filled[index])
        self.comm.wait_for([] if writer is None else [writer], and_compute=after_compute)
        if side is None:
            del self._written_aside[index]
        else:
            self._writers.add(side)
            self._written_aside[index] = side

    def wait_for_writers(self) -> None:
        """Order what the caller does next after all that was written to the full buffer."""
        if not self.comm.has_streams:
            return
        if self._writers or self.comm.side_stream() is not None:
            self.comm.wait_for(self._writers, and_compute=True)
            self._writers.clear()
            self._written_aside.clear()

    def fill_missing(self) -> None:
        """Zero what no gradient arrived for, and the gaps between parameters.

        With no gradient at all, the zeros are negative: -0.0 is what IEEE addition leaves
        everything else as it is, so a sum is all -0.0 where every rank had none, and +0.0 or
        something else where one rank had a gradient. No rank has to be asked.
        """
        unset = self._gaps
        if not all(self.filled):
            if not any(self.filled):
                self.full.tensor.fill_(-0.0)
                return
            zipped = zip(self.views, self.filled, strict=True)
            unset = unset + [view for view, filled in zipped if not filled]
        if unset:
            torch._foreach_zero_(unset)

    # -- memory -------------------------------------------------------------------------------

    def take(self, buffer: TemporaryBuffer) -> torch.Tensor:
        """Give one of the buffers memory, if it has none."""
        if not self.comm.has_streams:
            return self.observer.acquire(buffer)
        with self.comm.memory():
            return self.observer.acquire(buffer)

    def drop(self, *buffers: TemporaryBuffer | None) -> None:
        """Take memory away from some of them; nothing reads or writes it any more."""
        for buffer in buffers:
            if buffer is not None and buffer.is_live:
                if self.comm.has_streams:
                    self.comm.settle()
                self.observer.release(buffer)

    def in_comm_dtype(self, buffer: TemporaryBuffer, copy: TemporaryBuffer) -> torch.Tensor:
        """A copy of a buffer that is communicated in its place."""
        copied = self.take(copy).copy_(buffer.tensor)
        # Two units in flight would have two buffers each otherwise.
        self.drop(buffer)
        return copied

    # -- what others put in their place -------------------------------------------------------

    def temporaries(self) -> dict[str, TemporaryBuffer]:
        """The buffers by what they hold."""
        held = {kind: getattr(self, attribute) for kind, attribute in _KINDS.items()}
        return {kind: buffer for kind, buffer in held.items() if buffer is not None}

    def replace_buffers(self, replacement: Callable[[TemporaryBuffer], TemporaryBuffer]) -> None:
        """Put another temporary buffer in the place of each one."""
        for kind, buffer in self.temporaries().items():
            setattr(self, _KINDS[kind], replacement(buffer))
