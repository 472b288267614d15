"""How long operations take, from the bytes they move and the products they compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron_fsdp_v2.plan.machine import Machine

__all__ = ["COPY_IN", "Costs", "RooflineCosts", "flops_of"]

COPY_IN = "fsdp::all_gather_copy_in"
"""An operation of FSDP2's."""

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
"""Operations that move no bytes, besides views, which are not asked about."""


class Costs(Protocol):
    """How long operations take."""

    def seconds(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        """Time of an operation.

        Args:
            func: What was called.
            args: Its arguments.
            kwargs: Those given by name.
            result: What it returned.
        """
        ...


@dataclass(frozen=True, slots=True)
class RooflineCosts:
    """Products at the rate of a machine, everything else at the bandwidth of its memory.

    Attributes:
        machine: For its `flops` and the part of them that is reached.
        memory_bandwidth: Bytes per second of a GPU's memory; infinite to count products alone.
        memory_efficiency: Part of it that is reached.
    """

    machine: Machine
    memory_bandwidth: float
    memory_efficiency: float = 0.8

    def seconds(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        """See `Costs.seconds`."""
        if func.overloadpacket in _FREE:
            return 0.0
        flops = flops_of(func, args, kwargs, result)
        if flops:
            return self.machine.compute_seconds(flops)
        # Of the whole buffer it fills this rank's part.
        moved = 2 * _nbytes(args[0]) if func.name() == COPY_IN else _nbytes((args, kwargs, result))
        return moved / (self.memory_bandwidth * self.memory_efficiency)


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Operations of a matrix product or of attention; 0 of everything else.

    Of causal attention half is counted, as kernels skip the rest.
    """
    packet = func.overloadpacket
    if packet in _ATTENTION:
        return _ATTENTION[packet](args, kwargs)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0.0


def _attention(products: float, query: int, causal: int) -> Callable[[Any, Any], float]:
    """Counts `products` of queries and keys.

    Args:
        products: How many there are, each of `2 * width` operations for a pair.
        query: Position of the queries among the arguments, which keys follow.
        causal: Position of whether later keys are left out.
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
    # Its scores are computed again: five products.
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(5, 1, 7),
}


def _nbytes(values: Any) -> float:
    """Bytes of all tensors among values; of one that is there twice, or expanded, those it has."""
    sizes: dict[tuple[int, int, torch.Size], int] = {}
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            strides = zip(value.shape, value.stride(), strict=True)
            numel = math.prod(size for size, stride in strides if stride)
            key = value.untyped_storage()._cdata, int(value.storage_offset()), value.shape
            sizes[key] = numel * value.element_size()
    return float(sum(sizes.values()))
