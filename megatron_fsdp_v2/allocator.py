"""Temporary flat buffers: gathered weights and gradients that live for part of a step."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

__all__ = ["Allocator", "PlainAllocator", "TemporaryBuffer", "alias_of"]


@runtime_checkable
class TemporaryBuffer(Protocol):
    """A flat buffer that is given memory and loses it, again and again.

    `tensor` is one object for the buffer's whole life, and so are the views made of it: autograd
    saves views of gathered weights in the forward, and finds them refilled in the backward.
    """

    tensor: torch.Tensor

    @property
    def is_live(self) -> bool:
        """Whether the buffer has memory now."""
        ...

    def acquire(self) -> torch.Tensor:
        """Give the buffer memory, with undefined content. Harmless if it has some."""
        ...

    def release(self) -> None:
        """Take the memory away. Harmless if there is none."""
        ...


class Allocator(Protocol):
    """Makes temporary buffers."""

    def buffer(
        self, name: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> TemporaryBuffer:
        """Make a buffer of `numel` elements that has no memory yet.

        Args:
            name: What it holds, for reports, such as `layers.3/model_weight`.
            numel: Elements.
            dtype: Element type.
            device: Where it lives.
        """
        ...


class _ResizedBuffer:
    """A buffer whose storage is resized to nothing and back.

    The caching allocator of a GPU serves both from its free lists; on a CPU it is malloc.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = self.tensor.untyped_storage().nbytes()
        self._live = True
        self.release()

    @property
    def is_live(self) -> bool:
        return self._live

    def acquire(self) -> torch.Tensor:
        if not self._live:
            self.tensor.untyped_storage().resize_(self._nbytes)
            self._live = True
        return self.tensor

    def release(self) -> None:
        if self._live:
            self.tensor.untyped_storage().resize_(0)
            self._live = False


class PlainAllocator:
    """Gives every buffer memory of its own from torch's allocator for the device."""

    def buffer(
        self, name: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> TemporaryBuffer:
        """Make a buffer of `numel` elements that has no memory yet."""
        del name
        return _ResizedBuffer(numel, dtype, device)


def alias_of(flat: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous view of a flat tensor's storage with a version counter of its own.

    Collectives and casts write gathered weights through the flat tensor. Autograd must not take
    that for a modification of the weights it saved, so it sees this alias instead.

    Args:
        flat: A flat buffer; its storage may be empty at the moment.
        offset: First element, counted from the start of `flat`.
        shape: Shape of the alias.
    """
    alias = torch.empty(0, dtype=flat.dtype, device=flat.device)
    stride = torch.empty(shape, device="meta").stride()
    storage = flat.untyped_storage()
    nbytes = storage.nbytes()
    alias.set_(storage, flat.storage_offset() + offset, shape, stride)
    if storage.nbytes() != nbytes:
        # `set_` makes an empty storage as large as the alias; it is to stay empty.
        storage.resize_(nbytes)
    return alias
