"""Temporary flat buffers for gathered weights and gradients, which live for part of a step."""

from __future__ import annotations

import abc
import enum
import weakref
from typing import Any

import torch


class BufferUse(enum.Enum):
    """Use of a temporary buffer."""

    GATHERED = "gathered"
    """Gathered weights of a unit."""
    GRADIENT = "gradient buffer"
    """Full gradients, or partial gradients between the reductions along two axes."""
    COMMUNICATION = "communication"
    """A copy in the communication dtype."""


class Memory:
    """A storage that is resized to 0 bytes and back; empty before its first use.

    On a GPU, the caching allocator serves the resizes from the free lists of the current stream; on
    a CPU, malloc does. Nothing is allocated before the first use: a model may be built on another
    stream than it trains on, and training cannot reuse memory that is cached for that stream.

    Attributes:
        storage: The storage, always the same object.
        nbytes: Size of the storage while it is in use.
        block: The pool's block that contains it; None for separate memory.
    """

    block: torch.Tensor | None = None

    def __init__(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self.storage = storage
        self.nbytes = nbytes

    def take(self) -> None:
        """Allocate the memory."""
        self.storage.resize_(self.nbytes)

    def drop(self) -> None:
        """Free the memory."""
        self.storage.resize_(0)


class Arena(abc.ABC):
    """Selects the memory of temporary buffers, in place of their own."""

    @abc.abstractmethod
    def acquire(self, buffer: TemporaryBuffer) -> None:
        """Allocate the memory of a buffer."""

    @abc.abstractmethod
    def release(self, buffer: TemporaryBuffer) -> None:
        """Free the memory of a buffer."""

    @abc.abstractmethod
    def check_not_displaced(self, buffer: TemporaryBuffer) -> None:
        """Check that saved views of a buffer refer to its memory.

        Raises:
            RuntimeError: Another buffer occupies the memory that saved views refer to.
        """


class TemporaryBuffer:
    """A flat buffer whose memory is repeatedly allocated and freed.

    `tensor` and its views stay the same objects for the buffer's whole life: autograd saves views
    of gathered weights in the forward, and the backward's gather refills them.

    Attributes:
        name: Name for reports, such as `layers.3/0/model_weight`.
        use: Use of the buffer.
        arena: Selects the buffer's memory; None: its own memory.
        key: Index of the buffer in a traced arena.
        own: The buffer's own memory.
        backing: Memory of `tensor`: `own`, or memory of a pool.
        displaced_from: Memory that saved views refer to, while another buffer uses it. Values must
            be moved to that memory before they are used. None: `backing`.
        tensor: The flat tensor.
        tracked_aliases: Weak references to its views, which move with it to other memory.
        stream: Stream on which its memory was allocated; None on a device without streams.
        is_live: Whether it has memory.
    """

    def __init__(
        self, name: str, use: BufferUse, numel: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = name
        self.use = use
        self.arena: Arena | None = None
        self.key = 0
        storage = torch.empty(0, dtype=dtype, device=device).untyped_storage()
        self.own = self.backing = Memory(storage, numel * dtype.itemsize)
        self.displaced_from: Memory | None = None
        self.tensor = view_of(storage, dtype, 0, (numel,))
        self.tracked_aliases: list[weakref.ref[torch.Tensor]] = []
        self.stream: Any = None
        self.is_live = False

    def acquire(self) -> torch.Tensor:
        """Allocate uninitialized memory. Idempotent."""
        if not self.is_live:
            if self.arena is None:
                self.own.take()
            else:
                self.arena.acquire(self)
            self.is_live = True
        return self.tensor

    def release(self) -> None:
        """Free the memory. Idempotent."""
        if self.is_live:
            self.is_live = False
            if self.arena is None:
                self.own.drop()
            else:
                self.arena.release(self)

    def aliases(self) -> list[torch.Tensor]:
        """Return the tensors that move with the buffer, the flat tensor first."""
        return [self.tensor, *(t for ref in self.tracked_aliases if (t := ref()) is not None)]

    def is_externally_referenced(self) -> bool:
        """Return whether views that autograd saved reference the backing storage.

        Always False for gradients: gloo's thread may reference a sent buffer, but no code reads it
        after the reduction.
        """
        if self.use is not BufferUse.GATHERED:
            return False
        # The storage object itself holds one reference.
        known = 1 + len(self.aliases())
        return int(torch._C._storage_Use_Count(self.backing.storage._cdata)) > known

    def move(self, backing: Memory) -> None:
        """Assign other memory to the buffer's tensors, without copying values.

        The version counters of its tensors, views and parameters do not advance.
        """
        self.tracked_aliases[:] = [ref for ref in self.tracked_aliases if ref() is not None]
        # Tensors made in inference mode cannot be assigned to `data` of other tensors.
        with torch.inference_mode(False), torch.no_grad():
            for tensor in self.aliases():
                shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
                set_data(tensor, view_of(backing.storage, tensor.dtype, offset, shape))
        self.backing = backing

    def alias(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a contiguous view with its own version counter; see `alias_of`.

        Args:
            offset: First element.
            shape: Shape of the view.
        """
        view = alias_of(self.tensor, offset, shape)
        self.track_alias(view)
        return view

    def track_alias(self, tensor: torch.Tensor) -> None:
        """Register a tensor that moves with the buffer to other memory.

        Args:
            tensor: A tensor on the buffer's storage, such as a parameter made from an alias.
        """
        self.tracked_aliases.append(weakref.ref(tensor))


class Allocator:
    """Creates temporary buffers. This base class gives every buffer its own memory."""

    def buffer(
        self, name: str, use: BufferUse, numel: int, dtype: torch.dtype, device: torch.device
    ) -> TemporaryBuffer:
        """Make a buffer of `numel` elements that has no memory yet.

        Args:
            name: Name for reports.
            use: Use of the buffer.
            numel: Number of elements.
            dtype: Element type.
            device: Device of the buffer.
        """
        buffer = TemporaryBuffer(name, use, numel, dtype, device)
        self.join(buffer)
        return buffer

    def join(self, buffer: TemporaryBuffer) -> None:
        """Take over a buffer of another allocator, with its tensor, views and memory."""

    def begin_pass(self, name: str, *, no_pending_backward: bool) -> None:
        """Begin a pass through the model.

        Args:
            name: Kind of the pass, for reports.
            no_pending_backward: Whether no forward waits for its backward.
        """

    def end_pass(self, name: str, *, no_pending_backward: bool) -> None:
        """End a pass through the model; see `begin_pass`."""


def alias_of(flat: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a contiguous view of a flat tensor's storage with its own version counter.

    Collectives and casts write gathered weights through the flat tensor. These writes must not
    count as modifications of tensors that autograd saved, so modules compute with aliases.

    Args:
        flat: A flat buffer, whose storage may be empty.
        offset: First element, relative to the start of `flat`.
        shape: Shape of the alias.
    """
    start = int(flat.storage_offset()) + offset
    return view_of(flat.untyped_storage(), flat.dtype, start, shape)


def view_of(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return a contiguous tensor on a storage, which may be empty.

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
            # A fake tensor's storage grows in `set_`.
            storage.resize_(nbytes)
        return view
    # `set_` would grow the storage to the size of the view; a view without elements leaves it
    # empty.
    start = torch.empty_like(view).set_(storage, offset, (0,), (1,))
    # Assigned to `data`, so that the result is not a view for autograd.
    view.data = torch.ops.aten._reshape_alias.default(start, shape, stride)
    return view


_BASE: Any = torch._C.TensorBase


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Assign `data` of a tensor, also of a gathered parameter, which rejects other assignments."""
    with torch._C.DisableTorchFunctionSubclass():
        _BASE.data.__set__(tensor, value)
