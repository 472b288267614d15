"""Counts bytes of live storages on a CPU in the same way for all contenders."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, override

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Sums the live storages that were created by operations of torch.

    Sizes are read at every operation, so resized storages count with their current size. Enter the
    context before the tensors to count are created. Memory that gloo allocates is not counted.

    Attributes:
        peak: Maximum bytes so far; reset by `peak_of`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        """Current live bytes."""
        found = 0
        for key, ref in list(self._storages.items()):
            storage = ref()
            if storage is None:
                del self._storages[key]
            else:
                found += storage.nbytes()
        return found

    @contextlib.contextmanager
    def peak_of(self) -> Iterator[None]:
        """Reset `peak` to the current live bytes and update it until the end of the context."""
        self.peak = self.now
        yield
        self.peak = max(self.peak, self.now)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor operations dispatch again with the local tensors.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((result, args)):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self._note(value)
        self.peak = max(self.peak, self.now)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        # Fake tensors, which DTensors use to propagate shapes, have meta storages.
        if storage.device.type != "cpu":
            return
        if not storage.resizable():
            # This storage is part of another storage's memory, as a buffer of a traced pool is.
            return
        ref = self._storages.get(storage._cdata)
        if ref is None or ref() is not storage:
            self._storages[storage._cdata] = weakref.ref(storage)
