"""The flat buffers that gradients are collected in, and the order of what is written there."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_fsdp_v2.comm.interface import Communicator
from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from megatron_fsdp_v2.layout.placement import Placement
from megatron_fsdp_v2.memory.allocator import Allocator, BufferUse, TemporaryBuffer
from megatron_fsdp_v2.params.buffer import DataParallelBuffer, FlatSpec, place_in

__all__ = ["GradBuffers", "GradientMemory", "MainGradient"]


class GradientMemory:
    """Memory of a main gradient. Every `param.grad` over it holds it, so it goes with the last.

    Attributes:
        flat: The flat tensor.
        views: This rank's rows of every parameter; None where it has none.
    """

    __slots__ = ("__weakref__", "_shown", "flat", "views")

    def __init__(self, flat: torch.Tensor, views: Sequence[torch.Tensor | None]) -> None:
        self.flat = flat
        self.views = views
        self._shown: list[weakref.ref[torch.Tensor] | None] = [None] * len(views)

    def show(self, index: int, grad: torch.Tensor) -> None:
        """Take a tensor over one of the views for the gradient of that parameter; held weakly."""
        self._shown[index] = weakref.ref(grad)

    def shown(self, index: int) -> torch.Tensor | None:
        """What was shown last, if it lives."""
        ref = self._shown[index]
        return None if ref is None else ref()

    def owns(self, index: int, grad: torch.Tensor | None) -> bool:
        """Whether a parameter's `grad` is the tensor shown for it, or there is nothing to show."""
        if self.views[index] is None:
            return True
        return grad is not None and grad is self.shown(index)

    def is_held_besides(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether anybody has a tensor on it that no parameter has as its `grad`.

        Args:
            grads: Every `param.grad`.
        """
        shown = [self.shown(index) for index in range(len(grads))]
        if any(mine is not None and mine is not g for mine, g in zip(shown, grads, strict=True)):
            return True
        tensors = [self.flat, *(view for view in self.views if view is not None)]
        tensors += [local_of(mine) for mine in shown if mine is not None]
        # One more reference is the storage object itself.
        known = 1 + len({id(tensor) for tensor in tensors})
        return int(torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata)) > known


class MainGradient:
    """The reduced gradient of a group: what every `param.grad` is a view of.

    It has memory from a reduction until no `param.grad` is left that is on it, as the gradients of
    plain parameters have: nothing here holds it between steps, so that setting gradients to None,
    by whatever means, gives it back at once. Whoever keeps a gradient keeps the memory, and the
    next reduction is given other memory. In host memory it stays: what a device can reach there
    takes long to get.

    Attributes:
        span: Which slices are here.
        contributed: Whether this rank had a gradient in any reduction that led to it as it is.
        is_offloaded: Whether it is in host memory.
        on_memory: Called with the flat tensor whenever it is given memory.
    """

    def __init__(self, flat: FlatSpec, communicator: Communicator) -> None:
        self._flat = flat
        self._comm = communicator
        self.span = flat.span([p.main_grad for p in flat.placements])
        self.contributed = False
        self.is_offloaded = flat.host is not None
        self.on_memory: Callable[[torch.Tensor], None] | None = None
        layout = flat.layout
        places = [place_in(layout, self.span, index) for index in range(len(layout.slots))]
        self._shapes = [shape for _, shape in places]
        # Of every parameter with rows here: shape, strides, offset.
        self._places = [
            (shape, torch.empty(shape, device="meta").stride(), offset) if 0 not in shape else None
            for offset, shape in places
        ]
        self._memory: weakref.ref[GradientMemory] | None = None
        # While reductions are under way, and in host memory for good.
        self._held: GradientMemory | None = None

    @property
    def memory(self) -> GradientMemory | None:
        """What it has now; None where there is no gradient."""
        return None if self._memory is None else self._memory()

    @property
    def buffer(self) -> DataParallelBuffer | None:
        """That as a span of the flat buffer."""
        memory = self.memory
        if memory is None:
            return None
        return DataParallelBuffer(self._flat.layout, self.span, memory.flat)

    def has_rows(self, index: int) -> bool:
        """Whether rows of a parameter's gradient are here."""
        return self._places[index] is not None

    def no_rows(self, index: int) -> torch.Tensor:
        """The gradient of a parameter without rows here, which takes no memory."""
        device = torch.device("cpu") if self.is_offloaded else self._flat.device
        return torch.empty(self._shapes[index], dtype=self._flat.dtypes.main_grad, device=device)

    def begin(self, grads: Sequence[torch.Tensor | None]) -> GradientMemory:
        """Have memory for a reduction, and keep it until `end`.

        What somebody holds of gradients that no parameter has any more is not written, as with
        torch's own.

        Args:
            grads: Every `param.grad`. Where there is none, all of it is about to be written;
                where there are some, new memory is zeros.
        """
        memory = self.memory
        if all(grad is None for grad in grads):
            is_usable = self.is_offloaded and memory and not memory.is_held_besides(grads)
            if memory is None or not is_usable:
                memory = self._new(is_overwritten=True)
        elif memory is None or (
            not all(memory.owns(index, grad) for index, grad in enumerate(grads))
            and memory.is_held_besides(grads)
        ):
            memory = self._new(is_overwritten=False)
        self._held = memory
        return memory

    def _new(self, *, is_overwritten: bool) -> GradientMemory:
        if torch.is_inference_mode_enabled():
            # By a reduction asked for there; what is made in it nobody could change afterwards.
            with torch.inference_mode(False):
                return self._new(is_overwritten=is_overwritten)
        spec, dtype = self._flat, self._flat.dtypes.main_grad
        make = spec.unset if is_overwritten and not self.is_offloaded else spec.main_zeros
        with self._comm.memory():
            flat = make(self.span, dtype).tensor
        if self.on_memory is not None:
            self.on_memory(flat)
        # `data`: a view with a version counter of its own, see `alias_of`.
        views = [place and torch.as_strided(flat, *place).data for place in self._places]
        memory = GradientMemory(flat, views)
        self._memory = weakref.ref(memory)
        return memory

    def end(self) -> None:
        """Reductions are over: from now on it lives for as long as a gradient does."""
        if not self.is_offloaded:
            self._held = None

    def is_unused(self) -> bool:
        """Whether it is the sum of no gradients (see `GradBuffers.fill_missing`).

        Waits for the device. To be asked only where this rank had no gradient, and before `end`.
        """
        memory = self.memory
        return memory is not None and bool(((memory.flat == 0) & memory.flat.signbit()).all())

    def replace_communicator(self, communicator: Communicator) -> None:
        """Order streams by another one from now on."""
        self._comm = communicator


class GradBuffers:
    """Memory of a group's gradients before they are reduced: it comes and goes.

    Autograd's gradients land in views of one flat temporary buffer, in the communication dtype or,
    where it keeps collecting over micro-batches, in the main gradient's dtype.

    A gradient arrives on the stream that its parameter was used on in the forward, which need not
    be the compute stream. The engine orders that with the others only when a backward ends, so it
    is done here: see `_order_write` and `wait_for_writers`.

    Attributes:
        full: The whole buffer that gradients arrive in.
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
        self._comm = communicator
        dtypes, layout, placements = flat.dtypes, flat.layout, flat.placements
        dtype = dtypes.main_grad if keeps_collecting else dtypes.grad_comm

        def temporary(kind: str, use: BufferUse, numel: int, dtype: torch.dtype) -> TemporaryBuffer:
            return allocator.buffer(f"{flat.name}/{kind}", use, numel, dtype, flat.device)

        gradient, communication = BufferUse.GRADIENT, BufferUse.COMMUNICATION
        self.full = temporary("main_grad", gradient, layout.numel, dtype)
        whole = DataParallelBuffer.over(layout, flat.whole, self.full)
        self.views = [whole.view(index) for index in range(len(layout.slots))]
        self._gaps = layout.gaps()
        self.grad_comm: TemporaryBuffer | None = None
        if dtype != dtypes.grad_comm:
            self.grad_comm = temporary("grad_comm", communication, layout.numel, dtypes.grad_comm)
        self.partial: TemporaryBuffer | None = None
        self.outer_grad_comm: TemporaryBuffer | None = None
        if len(placements) == 2:
            pieces = [Placement.REPLICATE, placements[-1].main_grad]
            numel = flat.span(pieces).count * layout.shard_numel
            self.partial = temporary("partial_grad", gradient, numel, dtypes.main_grad)
            if dtypes.main_grad != dtypes.grad_comm:
                self.outer_grad_comm = temporary(
                    "outer_grad_comm", communication, numel, dtypes.grad_comm
                )
        self.offloading: TemporaryBuffer | None = None
        if flat.host is not None:
            numel = flat.span([p.main_grad for p in placements]).count * layout.shard_numel
            self.offloading = temporary("offloading", communication, numel, dtypes.main_grad)
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
            self.full.tensor.fill_(-0.0)
            return
        missing = itertools.compress(self.views, (not filled for filled in self.filled))
        gaps = (self.full.tensor[start:end] for start, end in self._gaps)
        if unset := [*missing, *gaps]:
            torch._foreach_zero_(unset)

    # -- memory -------------------------------------------------------------------------------

    def take(self, buffer: TemporaryBuffer) -> torch.Tensor:
        """Give one of the buffers memory, if it has none."""
        with self._comm.memory():
            return buffer.acquire()

    def drop(self, *buffers: TemporaryBuffer | None) -> None:
        """Take memory away from some of them; nothing reads or writes it any more."""
        for buffer in buffers:
            if buffer is not None and buffer.is_live:
                self._comm.settle()
                buffer.release()

    def in_comm_dtype(self, buffer: TemporaryBuffer, copy: TemporaryBuffer | None) -> torch.Tensor:
        """What of a buffer is communicated: itself, or a copy that takes its place."""
        if copy is None:
            return buffer.tensor
        copied = self.take(copy).copy_(buffer.tensor)
        # Two units in flight would have two buffers each otherwise.
        self.drop(buffer)
        return copied

    # -- what others put in their place -------------------------------------------------------

    def temporaries(self) -> dict[str, TemporaryBuffer]:
        """The buffers by what they hold."""
        held = {
            "main_grad": self.full,
            "grad_comm": self.grad_comm,
            "partial_grad": self.partial,
            "outer_grad_comm": self.outer_grad_comm,
            "offloading": self.offloading,
        }
        return {kind: buffer for kind, buffer in held.items() if buffer is not None}

    def replace_buffers(self, replacement: Callable[[TemporaryBuffer], TemporaryBuffer]) -> None:
        """Put something in the place of buffers that does the same, and tells of it."""
        self.full = replacement(self.full)
        if self.grad_comm is not None:
            self.grad_comm = replacement(self.grad_comm)
        if self.partial is not None:
            self.partial = replacement(self.partial)
        if self.outer_grad_comm is not None:
            self.outer_grad_comm = replacement(self.outer_grad_comm)
        if self.offloading is not None:
            self.offloading = replacement(self.offloading)

    def replace_communicator(self, communicator: Communicator) -> Communicator:
        """Order streams by another one from now on; return the one until now."""
        before, self._comm = self._comm, communicator
        return before
