"""Registry of tensors that are offloaded to host memory.

If the model itself is on the CPU, as in tests, a CPU tensor is not necessarily offloaded. Code that
offloads a tensor registers it here, and code that counts memory reads the registry.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

_HOST = ("cpu", "meta")
_STORAGES = weakref.WeakValueDictionary[int, torch.UntypedStorage]()
"""Registered storages by the address of their C++ object, while they live."""


def empty_in_host_memory(
    shape: Sequence[int], dtype: torch.dtype, *, pin_memory: bool, is_meta: bool = False
) -> torch.Tensor:
    """Return an uninitialized tensor in host memory, registered as offloaded.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        pin_memory: Whether the memory is pinned, so that device copies overlap other work.
        is_meta: Whether to make a meta tensor, for plans.
    """
    device = "meta" if is_meta else "cpu"
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=pin_memory)
    register_host_memory(tensor)
    return tensor


def register_host_memory(tensor: torch.Tensor) -> None:
    """Register a tensor's storage as offloaded, for as long as it lives.

    Args:
        tensor: A plain tensor.

    Raises:
        ValueError: The tensor is on a device.
    """
    if tensor.device.type not in _HOST:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} is not in host memory; "
            "copy it to the CPU first"
        )
    storage = tensor.untyped_storage()
    _STORAGES[storage._cdata] = storage


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor's storage is registered as offloaded."""
    if tensor.device.type not in _HOST or tensor.layout is not torch.strided:
        return False
    return is_storage_in_host_memory(tensor.untyped_storage())


def storages_in_host_memory() -> list[torch.UntypedStorage]:
    """Return all storages of this process that are registered as offloaded."""
    return list(_STORAGES.values())


def is_storage_in_host_memory(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage is registered as offloaded."""
    return _STORAGES.get(storage._cdata) is storage
