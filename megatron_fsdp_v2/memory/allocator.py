"""Temporary flat buffers: gathered weights and gradients that live for part of a step."""

from __future__ import annotations

import enum
import weakref
from typing import Protocol, runtime_checkable

import torch

__all__ = [
    "Allocator",
    "BufferUse",
    "OwnMemory",
    "PlainAllocator",
    "ResizedBuffer",
    "TemporaryBuffer",
    "alias_of",
    "view_of",
]


class BufferUse(enum.Enum):
    """What a temporary buffer holds."""

    GATHERED = "gathered"
    """Weights of a unit that computes."""
    GRADIENT = "gradient buffer"
    """Gradients before they are reduced, or between the two axes of a mesh."""
    COMMUNICATION = "communication"
    """A copy in the communication dtype."""


@runtime_checkable
class TemporaryBuffer(Protocol):
    """A flat buffer that is given memory and loses it, again and again.

    `tensor` is one object for the buffer's whole life, and so are the views made of it: autograd
    saves views of gathered weights in the forward, and finds them refilled in the backward.

    Attributes:
        name: What it holds, for reports, such as `layers.3/0/model_weight`.
        use: What it is for.
        tensor: The flat tensor.
    """

    name: str
    use: BufferUse
    tensor: torch.Tensor

    @property
    def is_live(self) -> bool:
        """Whether the buffer has memory now."""
        ...

    @property
    def pool_memory(self) -> torch.Tensor | None:
        """The larger block that its memory is a part of now; None where it has its own."""
        ...

    def acquire(self) -> torch.Tensor:
        """Give the buffer memory, with undefined content. Idempotent.

        Raises:
            RuntimeError: The only memory it may use is in use.
        """
        ...

    def release(self) -> None:
        """Take the memory away. Idempotent."""
        ...

    def has_room(self) -> bool:
        """Whether `acquire` now, earlier than needed, keeps to the plan for memory."""
        ...

    def alias(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous view with a version counter of its own; see `alias_of`.

        Args:
            offset: First element.
            shape: Shape of the view.
        """
        ...

    def follow(self, tensor: torch.Tensor) -> None:
        """Have a tensor made of an alias move with the buffer, wherever its memory is.

        Args:
            tensor: A view that is not known yet, such as a parameter made of an alias.
        """
        ...


class Allocator(Protocol):
    """Makes temporary buffers."""

    def buffer(
        self,
        name: str,
        use: BufferUse,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> TemporaryBuffer:
        """Make a buffer of `numel` elements that has no memory yet.

        Args:
            name: What it holds, for reports.
            use: What it is for.
            numel: Elements.
            dtype: Element type.
            device: Where it lives.
        """
        ...

    def begin_pass(self, name: str, *, no_pending_backward: bool) -> None:
        """Note that a pass through the model begins.

        Args:
            name: What kind of pass, for reports.
            no_pending_backward: Whether no backward is still to come.
        """
        ...

    def end_pass(self, name: str, *, no_pending_backward: bool) -> None:
        """Note that a pass through the model ends; see `begin_pass`."""
        ...


class OwnMemory:
    """A storage that is resized to nothing and back, and is nothing before its first use.

    The caching allocator of a GPU serves both from its free lists; on a CPU it is malloc. Those
    lists are the stream's that was current: a model may be built on another one than it trains
    on, and memory that was had there, if only for a moment, would be of no use to the training.

    Attributes:
        storage: One object for good.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.storage = torch.empty(0, dtype=dtype, device=device).untyped_storage()
        self._nbytes = numel * dtype.itemsize

    def take(self) -> None:
        """Have memory."""
        self.storage.resize_(self._nbytes)

    def drop(self) -> None:
        """Have none."""
        self.storage.resize_(0)


class ResizedBuffer:
    """A buffer with memory of its own, which everything made of it shares.

    Attributes:
        name: See `TemporaryBuffer`.
        use: Likewise.
        tensor: Likewise.
        memory: Its memory.
        followers: Views of it, which a pool that takes it over moves.
    """

    pool_memory = None

    def __init__(
        self, name: str, use: BufferUse, numel: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = name
        self.use = use
        self.memory = OwnMemory(numel, dtype, device)
        self.tensor = view_of(self.memory.storage, dtype, 0, (numel,))
        self.followers: list[weakref.ref[torch.Tensor]] = []
        self._live = False

    @property
    def is_live(self) -> bool:
        """See `TemporaryBuffer`."""
        return self._live

    def acquire(self) -> torch.Tensor:
        """See `TemporaryBuffer`."""
        if not self._live:
            self.memory.take()
            self._live = True
        return self.tensor

    def release(self) -> None:
        """See `TemporaryBuffer`."""
        if self._live:
            self.memory.drop()
            self._live = False

    def has_room(self) -> bool:
        """See `TemporaryBuffer`."""
        return True

    def alias(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """See `TemporaryBuffer`."""
        view = alias_of(self.tensor, offset, shape)
        self.follow(view)
        return view

    def follow(self, tensor: torch.Tensor) -> None:
        """See `TemporaryBuffer`."""
        self.followers.append(weakref.ref(tensor))


class PlainAllocator:
    """Gives every buffer memory of its own from torch's allocator for the device.

    Attributes:
        successor: Makes buffers in its place, once units that it made some for belong to a root
            with another allocator.
    """

    def __init__(self) -> None:
        self.successor: Allocator | None = None

    def buffer(
        self,
        name: str,
        use: BufferUse,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> TemporaryBuffer:
        """Make a buffer of `numel` elements that has no memory yet."""
        if self.successor is not None:
            return self.successor.buffer(name, use, numel, dtype, device)
        return ResizedBuffer(name, use, numel, dtype, device)

    def begin_pass(self, name: str, *, no_pending_backward: bool) -> None:
        """Nothing to do."""

    def end_pass(self, name: str, *, no_pending_backward: bool) -> None:
        """Nothing to do."""


def alias_of(flat: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous view of a flat tensor's storage with a version counter of its own.

    Collectives and casts write gathered weights through the flat tensor. Autograd must not take
    that for a modification of the weights it saved, so it sees this alias instead.

    Args:
        flat: A flat buffer; its storage may be empty at the moment.
        offset: First element, counted from the start of `flat`.
        shape: Shape of the alias.
    """
    start = int(flat.storage_offset()) + offset
    return view_of(flat.untyped_storage(), flat.dtype, start, shape)


def view_of(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """A contiguous tensor on a storage, which may be empty at the moment.

    Args:
        storage: The storage.
        dtype: Element type.
        offset: First element.
        shape: Shape of the tensor.
    """
    view = torch.empty(0, dtype=dtype, device=storage.device)
    stride = torch.empty(shape, device="meta").stride()
    nbytes = storage.nbytes()
    if nbytes or type(view) is not torch.Tensor:
        view.set_(storage, offset, shape, stride)
        if storage.nbytes() != nbytes:
            # Of fake tensors, whose memory costs nothing.
            storage.resize_(nbytes)
        return view
    # `set_` would make the storage as large as the view; of no elements, it leaves it empty.
    start = torch.empty_like(view).set_(storage, offset, (0,), (1,))
    # Through `data`, since for autograd it would be a view otherwise.
    view.data = torch.ops.aten._reshape_alias.default(start, shape, stride)
    return view
