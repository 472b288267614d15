"""Parameters and buffers that got memory and no values yet, until a state dict is loaded.

A module on the meta device that cannot initialize itself is filled with a marker: NaN, or the
least integer. What still holds nothing else at the first forward is an error by name.
"""

from __future__ import annotations

import torch

__all__ = ["is_unset", "mark_unset"]


def mark_unset(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with what stands for no value. Booleans and complex numbers have none."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype not in _WITHOUT_MARK and not tensor.is_complex():
        tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor


def is_unset(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements, and none of them was given a value."""
    if not tensor.numel() or tensor.is_meta:
        return False
    if tensor.is_floating_point():
        return bool(tensor.isnan().all())
    if tensor.dtype in _WITHOUT_MARK or tensor.is_complex():
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())


# Their least number is one that buffers are full of.
_WITHOUT_MARK = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
