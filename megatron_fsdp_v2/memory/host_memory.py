"""Tensors that are kept in host memory so that a device need not hold them.

A CPU tensor does not say whether it is one: where the model itself is on the CPU, as in a
rehearsal, all of its tensors are there. So whoever offloads a tensor says so
here, and what counts memory asks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

__all__ = [
    "empty_in_host_memory",
    "is_in_host_memory",
    "is_storage_in_host_memory",
    "keep_in_host_memory",
    "storages_in_host_memory",
]

_STORAGES: dict[int, weakref.ref[torch.UntypedStorage]] = {}


def empty_in_host_memory(
    shape: Sequence[int], dtype: torch.dtype, *, pin_memory: bool
) -> torch.Tensor:
    """A tensor without values in host memory, known as offloaded.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        pin_memory: Whether a device can read and write it by itself, beside other work.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pin_memory)
    keep_in_host_memory(tensor)
    return tensor


def keep_in_host_memory(tensor: torch.Tensor) -> None:
    """Make a tensor's storage known as offloaded, for as long as it lives.

    Args:
        tensor: A plain tensor.

    Raises:
        ValueError: It is on a device.
    """
    if tensor.device.type != "cpu":
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} is not in host memory; "
            "copy it to the CPU first"
        )
    storage = tensor.untyped_storage()
    key = storage._cdata
    known = _STORAGES.get(key)
    if known is not None and known() is storage:
        return

    def forget(ref: weakref.ref[torch.UntypedStorage]) -> None:
        # Another storage may have its address by now.
        if _STORAGES.get(key) is ref:
            del _STORAGES[key]

    _STORAGES[key] = weakref.ref(storage, forget)


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's storage is known as offloaded."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return is_storage_in_host_memory(tensor.untyped_storage())


def storages_in_host_memory() -> list[torch.UntypedStorage]:
    """All storages of this process that are known as offloaded."""
    found = (ref() for ref in list(_STORAGES.values()))
    return [storage for storage in found if storage is not None]


def is_storage_in_host_memory(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is known as offloaded."""
    known = _STORAGES.get(storage._cdata)
    return known is not None and known() is storage
