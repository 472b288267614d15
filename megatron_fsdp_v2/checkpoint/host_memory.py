"""Host memory for the copies of asynchronous saves, reused from save to save."""

from __future__ import annotations

import threading

import torch
from torch.utils.dlpack import from_dlpack

from megatron_fsdp_v2.comm.backends import host_block, wait_for_device

__all__ = ["HostCopies", "HostMemory"]

_BLOCK = 256 << 20
"""Bytes of a block: a power of two, to which torch rounds up pinned allocations."""
_LINE = 64
"""Alignment of copies in bytes."""


class HostMemory:
    """Blocks of host memory, one set for every save under way.

    Pinning memory takes longer than filling it, so what a save used is kept for the next one: of
    several that were under way together, what the last one used. It is freed with this object.
    """

    def __init__(self) -> None:
        self._spare: list[torch.Tensor] = []
        self._is_for = ""
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes cached for the next save."""
        with self._lock:
            return sum(block.nbytes for block in self._spare)

    def lend(self, nbytes: int, device: torch.device) -> HostCopies:
        """Memory for one save.

        Args:
            nbytes: What it takes, as `HostCopies.nbytes_of` counts.
            device: Where most of the values are.
        """
        with self._lock:
            blocks, self._spare = self._spare if self._is_for == device.type else [], []
        return HostCopies(self, blocks, nbytes, device)

    def keep(self, blocks: list[torch.Tensor], device: torch.device) -> None:
        """Cache the blocks of a save, instead of those cached before."""
        with self._lock:
            self._spare, self._is_for = blocks, device.type

    def free(self) -> None:
        """Free the cached blocks."""
        with self._lock:
            self._spare = []


class HostCopies:
    """Copies of one save in host memory. Made by `HostMemory.lend`.

    Args:
        memory: Where blocks come from, and return to.
        blocks: Those of an earlier save.
        nbytes: Bytes that will be asked for.
        device: Where most of the values are.
    """

    def __init__(
        self, memory: HostMemory, blocks: list[torch.Tensor], nbytes: int, device: torch.device
    ) -> None:
        self._memory = memory
        self._free, self._used = blocks, list[torch.Tensor]()
        self._left = nbytes
        self._device = device
        self._start = 0

    @staticmethod
    def nbytes_of(tensor: torch.Tensor) -> int:
        """Bytes that a copy takes."""
        return -(-tensor.nbytes // _LINE) * _LINE

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor into a storage of its own; complete after `wait`."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return tensor.to("cpu", copy=True)
        memory = self._take(tensor)
        # Memory of a storage is what torch's writer takes without another copy.
        own = from_dlpack(memory) if tensor.numel() else memory.new_empty(0)
        copy = own.view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor, non_blocking=True)

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        nbytes = self.nbytes_of(tensor)
        if not self._used or self._start + nbytes > self._used[-1].nbytes:
            fitting = (i for i, block in enumerate(self._free) if block.nbytes >= nbytes)
            index = next(fitting, None)
            if index is None:
                block = host_block(max(nbytes, min(_BLOCK, self._left)), self._device)
            else:
                block = self._free.pop(index)
            self._used.append(block)
            self._start = 0
        memory = self._used[-1][self._start :][: tensor.nbytes]
        self._start += nbytes
        self._left -= nbytes
        return memory

    def wait(self) -> None:
        """Wait until all copies are complete."""
        wait_for_device(self._device)

    def give_back(self) -> None:
        """Return the memory for the next save. The copies must not be used any more."""
        self._memory.keep(self._used, self._device)
        self._used = []
