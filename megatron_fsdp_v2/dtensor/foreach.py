"""Foreach and fused operations on lists of sharded tensors, run on the rows that are here.

DTensor's own dispatch has no rule for some of them, wants one mesh and no plain tensors in a list,
and takes longer over the others than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils

from megatron_fsdp_v2.dtensor.norms import cut_axes
from megatron_fsdp_v2.dtensor.sharded_rows import ShardedRows, rows_like, rows_of

__all__ = ["add_to_rows", "choose_foreach_for", "run_on_rows"]

# Reductions, and a product of matrices (torch 2.15).
_OF_WHOLE_TENSORS = ("_foreach_max", "_foreach_mm", "_foreach_norm", "_foreach_powsum")


def choose_foreach_for(kind: type[torch.Tensor]) -> None:
    """Let optimizers and gradient clipping take their foreach and fused implementations.

    They do for types that are in two lists, one of `torch.optim` and one of `torch.nn.utils`, to
    which `torch.distributed.tensor` adds DTensor. Subclasses do not count: without this, steps and
    clipping are loops over parameters.

    Args:
        kind: The tensor class; its lists may have plain tensors and DTensors among them.
    """
    for module in (optimizers, _foreach_utils):
        types: list[type] | None = getattr(module, "_foreach_supported_types", None)
        if types is not None and kind not in types:
            types.append(kind)


def run_on_rows(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise operation on lists of tensors on their local rows.

    Args:
        func: The operation; in place if its name ends with an underscore.
        args: Its arguments, of which those that are lists of tensors are used place by place.
        kwargs: Likewise.

    Returns:
        What it returns, with results sharded like their first operand; `NotImplemented` where
        local rows are not enough, or autograd has to see it.

    Raises:
        ValueError: Two tensors of one place have different rows.
    """
    name, values = func.__name__, (*args, *kwargs.values())
    lists = [value for value in values if _is_tensor_list(value)]
    if name in _OF_WHOLE_TENSORS or not lists or lists[0] is not args[0]:
        return NotImplemented
    if torch.is_grad_enabled() and any(item.requires_grad for items in lists for item in items):
        return NotImplemented
    first = lists[0]
    if any(isinstance(value, DTensor) and cut_axes(value) for value in values) or not all(
        len(items) == len(first) and all(map(_fits, first, items, [name] * len(first)))
        for items in lists
    ):
        return NotImplemented
    results = func(*map(_local, args), **{key: _local(value) for key, value in kwargs.items()})
    if name.endswith("_"):
        # In-place foreach and fused operations move no version counter by themselves.
        torch.autograd.graph.increment_version(
            [item for item in first if isinstance(item, DTensor)]
        )
        return args[0]
    pairs = zip(results, first, strict=True)
    return type(results)(
        [rows_like(result, like) if isinstance(like, DTensor) else result for result, like in pairs]
    )


def add_to_rows(
    params: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], *, alpha: float
) -> None:
    """Add plain tensors to the rows that this rank holds, in place, in one operation.

    Args:
        params: Parameters, sharded or not; their version counters move.
        rows: As many rows as this rank holds of each.
        alpha: Factor of `rows`.
    """
    torch._foreach_add_([rows_of(param) for param in params], list(rows), alpha=alpha)
    torch.autograd.graph.increment_version(params)


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], torch.Tensor)


def _fits(mine: Any, other: Any, name: str) -> bool:
    """Whether the local part of a tensor is what that of another one is computed with."""
    if isinstance(mine, ShardedRows) and isinstance(other, ShardedRows):
        if mine._row_shards is not other._row_shards and not (
            mine._row_shards == other._row_shards and mine.device_mesh == other.device_mesh
        ):
            raise ValueError(
                f"{name} mixes two tensors of shapes {tuple(mine.shape)} and {tuple(other.shape)} "
                "whose rows are sharded differently; gather one with full_tensor() and copy_() it "
                "over first"
            )
        return True
    if isinstance(other, DTensor) and cut_axes(other):
        return (
            type(mine) is type(other) is DTensor
            and mine.shape == other.shape
            and mine._spec.placements == other._spec.placements
            and mine.device_mesh == other.device_mesh
            # What is still to be summed up has no elements to compute with.
            and not any(placement.is_partial() for placement in other.placements)
        )
    return other.numel() == 1 or not (isinstance(mine, DTensor) and cut_axes(mine))


def _local(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value._local_tensor
    if isinstance(value, list | tuple):
        return [item._local_tensor if isinstance(item, DTensor) else item for item in value]
    return value
