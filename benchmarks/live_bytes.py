"""Bytes of live storages on a CPU, whoever made them: one meter for all contenders."""

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
    """Adds up the storages that operations of torch have made and that still live.

    Storages are asked for their size at every operation, so those that are resized to nothing and
    back count as what they are. To be entered before anything is made that is to be counted. What
    gloo allocates by itself is not seen.

    Attributes:
        peak: The most bytes so far; reset by `peak_of`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        """Bytes that live now."""
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
        """Start `peak` again from what lives now."""
        self.peak = self.now
        yield
        self.peak = max(self.peak, self.now)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # What they hold comes by in the operations they are made of.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((result, args)):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self._note(value)
        self.peak = max(self.peak, self.now)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        # That of a fake tensor, which DTensors ask for shapes, is on no device.
        if storage.device.type != "cpu":
            return
        if not storage.resizable():
            # Lies in memory of another one, as buffers of a traced pool do in its block.
            return
        ref = self._storages.get(storage._cdata)
        if ref is None or ref() is not storage:
            self._storages[storage._cdata] = weakref.ref(storage)
