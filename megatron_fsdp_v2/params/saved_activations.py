"""Activations in host memory between forward and backward, and weights where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_fsdp_v2.params.gathered_parameter import is_gathered_weight

__all__ = ["save_activations_on_cpu"]


class save_activations_on_cpu(saved_tensors_hooks):
    """`torch.autograd.graph.save_on_cpu` for sharded modules: all that autograd saves but weights.

    Torch's copies gathered weights as well, of every unit, though the backward gathers them again.

    Args:
        pin_memory: Whether to copy to pinned memory, without waiting for the copy back.
        min_nbytes: Tensors of fewer bytes stay where they are.

    Raises:
        ValueError: `min_nbytes` is negative.
    """

    def __init__(self, pin_memory: bool = False, min_nbytes: int = 0) -> None:
        if min_nbytes < 0:
            raise ValueError(f"min_nbytes is a number of bytes, got {min_nbytes}")

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.nbytes < min_nbytes or is_gathered_weight(tensor):
                return tensor
            packed = torch.empty_like(
                tensor, device="cpu", pin_memory=pin_memory and not tensor.is_sparse
            )
            return tensor.device, packed.copy_(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            device, tensor = packed
            restored: torch.Tensor = tensor.to(device, non_blocking=pin_memory)
            return restored

        super().__init__(pack, unpack)
