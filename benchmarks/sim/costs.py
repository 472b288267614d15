"""Times of operations: matrix products, attention, and the bytes that other operations move."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron_fsdp_v2.plan import Machine

__all__ = ["COPY_IN", "RooflineCosts"]

COPY_IN = "fsdp::all_gather_copy_in"
"""The operation of FSDP2 that fills its gather buffer."""

_aten = torch.ops.aten
_FREE = frozenset(
    {
        _aten._local_scalar_dense,
        _aten.empty,
        _aten.empty_like,
        _aten.empty_strided,
        _aten.is_same_size,
        _aten.new_empty,
        _aten.new_empty_strided,
        _aten.resize_,
        _aten.set_,
    }
)
"""Operations that move no bytes, except views, for which `seconds` is not called."""


@dataclass(frozen=True, slots=True)
class RooflineCosts:
    """Cost model: FLOP/s limit matrix products, memory bandwidth limits all other operations.

    Attributes:
        machine: Machine with its FLOP/s and their efficiency.
        memory_bandwidth: Bytes per second of a GPU's memory; infinite to time products alone.
        memory_efficiency: Fraction of the bandwidth that is reached.
    """

    machine: Machine
    memory_bandwidth: float
    memory_efficiency: float = 0.8

    def seconds(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        """Return the seconds of an operation.

        Args:
            func: The operator overload.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            result: Its result.
        """
        if func.overloadpacket in _FREE:
            return 0.0
        flops = _flops_of(func, args, kwargs, result)
        if flops:
            return self.machine.compute_seconds(flops)
        # COPY_IN fills this rank's part of the whole buffer.
        moved = 2 * _nbytes(args[0]) if func.name() == COPY_IN else _nbytes((args, kwargs, result))
        return moved / (self.memory_bandwidth * self.memory_efficiency)


def _flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the FLOPs of a matrix product or of attention; 0 for other operations.

    Causal attention counts half, since kernels skip the other half.
    """
    packet = func.overloadpacket
    if packet in _ATTENTION:
        return _ATTENTION[packet](args, kwargs)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0.0


def _attention(products: float, query: int, causal: int) -> Callable[[Any, Any], float]:
    """Return a function that counts the FLOPs of attention.

    Args:
        products: Number of matrix products, each of `2 * width` FLOPs for a query and a key.
        query: Position of the queries among the arguments; keys follow.
        causal: Position of the flag for causal attention.
    """

    def count(args: Any, kwargs: Any) -> float:
        *batch, length, width = args[query].shape
        others = args[query + 1].shape[-2]
        is_causal = args[causal] if len(args) > causal else kwargs.get("is_causal", False)
        pairs = math.prod(batch) * length * others * (0.5 if is_causal else 1.0)
        return float(products * 2 * pairs * width)

    return count


_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention(2, 0, 4),
    # Five products, since the backward computes the scores again.
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(5, 1, 7),
}


def _nbytes(values: Any) -> float:
    """Return the bytes of all tensors among values; each storage range counts once."""
    sizes: dict[tuple[int, int, torch.Size], int] = {}
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            strides = zip(value.shape, value.stride(), strict=True)
            numel = math.prod(size for size, stride in strides if stride)
            key = value.untyped_storage()._cdata, int(value.storage_offset()), value.shape
            sizes[key] = numel * value.element_size()
    return float(sum(sizes.values()))
