"""Moves the memory of a sharded model to host memory and back, between training and other work.

Storages are copied to host memory, resized to 0 bytes, and later resized and filled again. So every
tensor on them stays the same object: parameters, their views, states of optimizers, and whatever
else refers to the memory. Until then Python code that reads a sharded tensor raises an error, since
a kernel would read memory that is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn, override

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from megatron_fsdp_v2.comm.backends import wait_for_all_streams
from megatron_fsdp_v2.dtensor.sharded_rows import plain_parts
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.memory.allocator import view_of
from megatron_fsdp_v2.memory.host_memory import empty_in_host_memory, is_in_host_memory
from megatron_fsdp_v2.params.group import ParameterGroup


class OffloadedTensor(UnevenDTensor):
    """A sharded tensor whose memory is in host memory. Only its description can be read."""

    def _reject(self) -> NoReturn:
        raise RuntimeError(
            f"a sharded tensor of shape {tuple(self.shape)} was moved to host memory by offload(); "
            "call reload() on its model first"
        )

    _local_tensor = property(lambda self: self._reject())

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return f"OffloadedTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


class Offloaded:
    """The memory of tensors on a device, in host memory.

    Args:
        tensors: The tensors. Those that share memory are moved together; those that are not on the
            device, or in host memory already, are left where they are.
        device: The device.
        pin_memory: Whether the host memory is pinned, so that copies are fast.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], device: torch.device, *, pin_memory: bool
    ) -> None:
        self._device = device
        self._sharded: list[torch.Tensor] = []
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            if isinstance(tensor, OffloadedTensor):
                continue
            if type(tensor) is UnevenDTensor:
                self._sharded.append(tensor)
            for plain in plain_parts(tensor):
                storage = plain.untyped_storage()
                # Empty if it was moved with another model, as an optimizer's states of both.
                if plain.device == device and storage.nbytes() and not is_in_host_memory(plain):
                    storages[storage._cdata] = storage
        wait_for_all_streams(device)
        pin_memory = pin_memory and device.type == "cuda"
        # All copies first: if host memory is exhausted, nothing has changed.
        self._copies = [(each, _copied(each, pin_memory)) for each in storages.values()]
        wait_for_all_streams(device)
        for storage, _ in self._copies:
            storage.resize_(0)
        for sharded in self._sharded:
            sharded.__class__ = OffloadedTensor

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(copy.nbytes for _, copy in self._copies)

    def reload(self) -> None:
        """Move everything back.

        Raises:
            torch.OutOfMemoryError: The device has not enough memory; nothing has changed.
        """
        try:
            for storage, copy in self._copies:
                storage.resize_(copy.nbytes)
        except BaseException:
            for storage, _ in self._copies:
                storage.resize_(0)
            raise
        for storage, copy in self._copies:
            _bytes_of(storage).copy_(copy, non_blocking=True)
        wait_for_all_streams(self._device)
        for sharded in self._sharded:
            sharded.__class__ = UnevenDTensor
        self._copies, self._sharded = [], []


def memory_of(
    groups: Iterable[ParameterGroup], optimizers: Iterable[Optimizer]
) -> Iterator[torch.Tensor]:
    """Yield the tensors of groups and of optimizers that have memory between steps."""
    for group in groups:
        yield from _tensors_of(group)
    for optimizer in optimizers:
        for leaf in tree_leaves(list(optimizer.state.values())):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def _tensors_of(group: ParameterGroup) -> Iterator[torch.Tensor]:
    yield group.main_weight.tensor
    for payload in group.payloads:
        yield payload.model.tensor
    for param in group.sharded_params:
        yield param
        if param.grad is not None:
            yield param.grad


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return view_of(storage, torch.uint8, 0, (storage.nbytes(),))


def _copied(storage: torch.UntypedStorage, pin_memory: bool) -> torch.Tensor:
    copy = empty_in_host_memory((storage.nbytes(),), torch.uint8, pin_memory=pin_memory)
    return copy.copy_(_bytes_of(storage), non_blocking=pin_memory)
