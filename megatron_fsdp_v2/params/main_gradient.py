"""The reduced gradient of a group, whose memory comes and goes with `param.grad`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_fsdp_v2.comm.backends import is_capturing
from megatron_fsdp_v2.dtensor.attributes import requires_grad_at_once
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of
from megatron_fsdp_v2.layout.placement import Placement
from megatron_fsdp_v2.memory.observer import MainGradientAllocated
from megatron_fsdp_v2.params.buffer import DataParallelBuffer, FlatSpec, place_in
from megatron_fsdp_v2.params.grad_buffers import GradBuffers

__all__ = ["GradientMemory", "MainGradient", "any_set"]


def _num_references(held: Sequence[object]) -> int:
    """References to the first of them; what they are where this is the only place, see `_ONE`."""
    return sys.getrefcount(held[0])


_ONE = _num_references([object()])


def any_set(grads: Sequence[torch.Tensor | None]) -> bool:
    """Whether one of them is not None."""
    # A generator would be a frame for every one of them, in every reduction.
    for grad in grads:  # noqa: SIM110
        if grad is not None:
            return True
    return False


_NUM_OWN_ATTRIBUTES = 2
"""What a sharded gradient has in its `__dict__`: its row shards and whose it is."""

_is_inference: Callable[[torch.Tensor], bool] = torch._C.TensorBase.is_inference
_num_uses: Callable[[torch.Tensor], int] = torch._C.TensorBase._use_count  # type: ignore[attr-defined]


class GradientMemory:
    """Memory of a main gradient. Every `param.grad` over it holds it, so it goes with the last.

    A `param.grad` that is set to None and that nobody else has is kept, without holding the memory:
    making a DTensor and the view in it costs more than what a step does with them. Once all are
    back, the memory is given back, and they wait for the next gradient.

    Attributes:
        flat: The flat tensor.
        views: This rank's rows of every parameter; None where it has none.
        arrival: Its end in the communication dtype, see `Collective.arrival`. Kept, since a thread
            of the communication library may hold it for longer than it uses it: whoever else is
            on this memory is found by counting tensors.
    """

    def __init__(
        self,
        main: MainGradient,
        flat: torch.Tensor,
        views: Sequence[torch.Tensor | None],
        arrival: torch.Tensor | None,
    ) -> None:
        self._main = weakref.ref(main)
        self.flat = flat
        self.views = views
        self.arrival = arrival
        self._shown: list[weakref.ref[UnevenDTensor] | None] = [None] * len(views)
        self._num_shown = 0
        # In C++, of every view; a DTensor may have one.
        self._uses = [1] * len(views)
        self._num_tensors = 1 + sum(view is not None for view in (*views, arrival))
        self._retired: dict[int, UnevenDTensor] = {}
        self._own_storage_references = self._num_storage_references()

    def show(self, index: int, grad: UnevenDTensor) -> None:
        """Take a tensor over one of the views for the gradient of that parameter; held weakly."""
        self._shown[index] = weakref.ref(grad)
        self._num_shown += 1
        self._uses[index] = _num_uses(local_of(grad))
        grad.shown_by = (self, index)

    def shown(self, index: int) -> UnevenDTensor | None:
        """What was shown last, if it lives."""
        ref = self._shown[index]
        return None if ref is None else ref()

    def shown_again(self, index: int) -> UnevenDTensor | None:
        """What was shown last, to be so again; None where another one is to be made."""
        grad = self._retired.pop(index, None)
        if grad is None:
            return self.shown(index)
        self._num_shown += 1
        grad.shown_by = (self, index)
        return grad

    def retire(self, index: int, held: list[Any]) -> None:
        """See `ShownGradient.retire`."""
        main = self._main()
        if main is None or not main.reuses or not self._is_as_made(index, held):
            return
        grad = self._retired[index] = held.pop()
        # Or it would hold what holds it.
        grad.shown_by = None
        self._num_shown -= 1
        if not self._num_shown and not self._is_viewed():
            main.rest(self)

    def _is_as_made(self, index: int, held: Sequence[UnevenDTensor]) -> bool:
        """Whether a tensor, which is in `held` alone, is as it was made and nobody has it."""
        if _num_references(held) > _ONE or _num_uses(held[0]) > 1:
            return False
        # Made in inference mode, nobody could change it afterwards.
        if requires_grad_at_once(held[0]) or _is_inference(held[0]):
            return False
        # Whoever changed what it is made of, or noted something on it, would find that again.
        if local_of(held[0]) is not self.views[index]:
            return False
        return len(vars(held[0])) <= _NUM_OWN_ATTRIBUTES and not self._is_view_held(index)

    def _is_view_held(self, index: int) -> bool:
        """Whether somebody has one of the views itself."""
        view = self.views[index : index + 1]
        is_shown = self.shown(index) is not None
        # Here, in all views, and in the DTensor.
        if _num_references(view) > _ONE + 1 + is_shown:
            return True
        return view[0] is not None and _num_uses(view[0]) > (self._uses[index] if is_shown else 1)

    def _is_viewed(self) -> bool:
        """Whether somebody has a view of it, or the flat tensor; asked when all are retired."""
        is_held = _num_references([self.flat]) > _ONE + 1 or _num_uses(self.flat) > 1
        return is_held or self._is_storage_held()

    def _is_storage_held(self) -> bool:
        """Whether somebody has the storage, or a tensor on it that was not made here."""
        if self._num_storage_references() > self._own_storage_references:
            return True
        storage = self.flat.untyped_storage()
        # The storage object itself is one more reference.
        return int(torch._C._storage_Use_Count(storage._cdata)) - 1 > self._num_tensors

    def _num_storage_references(self) -> int:
        """References to the storage object, in Python."""
        return _num_references([self.flat.untyped_storage()])

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
        for index, grad in enumerate(grads):
            shown = None if index in self._retired else self.shown(index)
            if shown is not None and shown is not grad:
                return True
            if self.views[index] is not None and self._is_view_held(index):
                return True
        return self._is_storage_held()


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
        has_rows: Of every parameter, whether rows of its gradient are here.
    """

    def __init__(self, flat: FlatSpec, buffers: GradBuffers) -> None:
        self._flat = flat
        self._buffers = buffers
        self.span = flat.span([p.main_grad for p in flat.placements])
        self.contributed = False
        self.is_offloaded = flat.host is not None
        layout = flat.layout
        places = [place_in(layout, self.span, index) for index in range(len(layout.slots))]
        # Of every parameter with rows here: shape, strides, offset.
        self._places = [
            (shape, torch.empty(shape, device="meta").stride(), offset) if 0 not in shape else None
            for offset, shape in places
        ]
        self._nbytes = 0
        comm, main = flat.dtypes.grad_comm, flat.dtypes.main_grad
        # Of one other rank: a sum is as large as what each of them sends, or larger.
        is_of_one = flat.placements[0].main_grad is Placement.SHARD and flat.grid.axes[0].size == 2
        fits = is_of_one and comm.itemsize <= main.itemsize and not self.is_offloaded
        self._arrival_dtype = comm if fits else None
        self.has_rows = [place is not None for place in self._places]
        self._memory: weakref.ref[GradientMemory] | None = None
        # While reductions are under way, and in host memory for good.
        self._held: GradientMemory | None = None
        # Between steps: without memory, with the tensors to be shown in it.
        self._resting: GradientMemory | None = None

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

    def no_rows(self, index: int) -> torch.Tensor:
        """The gradient of a parameter without rows here, which takes no memory."""
        device = torch.device("cpu") if self.is_offloaded else self._flat.device
        _, shape = place_in(self._flat.layout, self.span, index)
        return torch.empty(shape, dtype=self._flat.dtypes.main_grad, device=device)

    def begin(self, grads: Sequence[torch.Tensor | None]) -> GradientMemory:
        """Have memory for a reduction, and keep it until `end`.

        What somebody holds of gradients that no parameter has any more is not written, as with
        torch's own.

        Args:
            grads: Every `param.grad`. Where there is none, all of it is about to be written;
                where there are some, new memory is zeros.
        """
        memory = self.memory
        if not any_set(grads):
            is_usable = self.is_offloaded and memory and not memory.is_held_besides(grads)
            if memory is None or not is_usable:
                memory = self._revived() or self._new(is_overwritten=True)
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
        dtype = self._flat.dtypes.main_grad
        with self._buffers.comm.memory():
            flat = self._flat.main_memory(self.span, dtype, is_overwritten=is_overwritten)
        if self._buffers.observer.subscribers:
            self._buffers.observer.emit(MainGradientAllocated(self._buffers.full, flat))
        # `data`: a view with a version counter of its own, see `alias_of`.
        views = [place and torch.as_strided(flat, *place).data for place in self._places]
        arrival = None
        if self._arrival_dtype is not None:
            arrival = flat.view(self._arrival_dtype).narrow(0, -flat.numel(), flat.numel()).data
        memory = GradientMemory(self, flat, views, arrival)
        self._memory = weakref.ref(memory)
        return memory

    def _revived(self) -> GradientMemory | None:
        """What rests, with memory again, of undefined content; None where nothing does."""
        memory, self._resting = self._resting, None
        if self._buffers.observer.subscribers:
            return None
        if memory is not None:
            with self._buffers.comm.memory():
                memory.flat.untyped_storage().resize_(self._nbytes)
            self._memory = weakref.ref(memory)
        return memory

    @property
    def reuses(self) -> bool:
        """Whether tensors that were shown are to be shown again.

        Not with subscribers: they learn that memory is freed from the end of its storage.
        """
        return self._held is None and not self._buffers.observer.subscribers

    def rest(self, memory: GradientMemory) -> None:
        """Take the memory away; nobody has a tensor on it."""
        self._memory = None
        storage = memory.flat.untyped_storage()
        if not storage.resizable():
            # NumPy was shown it, and may be still: then it goes with the last who has it.
            return
        self._nbytes = storage.nbytes()
        storage.resize_(0)
        self._resting = memory

    def end(self) -> None:
        """Reductions are over: from now on it lives for as long as a gradient does."""
        if not self.is_offloaded:
            self._held = None

    def is_unused(self) -> bool:
        """Whether it is the sum of no gradients (see `GradBuffers.fill_missing`).

        Waits for the device. To be asked only where this rank had no gradient, and before `end`.
        """
        memory = self.memory
        if memory is not None and is_capturing(memory.flat.device):
            raise RuntimeError(
                f"{self._flat.name} had no gradient in a backward captured in a CUDA graph, "
                "so the host would wait to see whether another rank had one; capture a step that "
                "uses every trained parameter, or freeze those that it does not use"
            )
        return memory is not None and bool(((memory.flat == 0) & memory.flat.signbit()).all())
