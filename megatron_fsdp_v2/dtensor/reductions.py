"""Sums and means of sharded tensors, forward and backward, whatever rows ranks hold.

DTensor supposes even shards: it gathers a tensor for a mean over the sharded dimension, and cuts
the gradient of a sum, which is replicated, where it would have cut the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, override

import torch
import torch.nn.functional as F

from megatron_fsdp_v2.dtensor.sharded_rows import in_rows_of

__all__ = ["REDUCTIONS", "check_supposes_nothing", "reduce_rows"]

_SUMS = (torch.sum, torch.Tensor.sum)
_MEANS = (torch.mean, torch.Tensor.mean)
REDUCTIONS = frozenset({*_SUMS, *_MEANS})
"""Functions that `reduce_rows` runs."""

_OVER_ALL = ("cumprod", "cumsum", "logcumsumexp", "std", "std_mean", "var", "var_mean")
_SUPPOSE_EVEN = frozenset(
    {F.huber_loss, F.l1_loss, F.mse_loss, F.smooth_l1_loss}
    | {
        getattr(owner, name)
        for owner in (torch, torch.Tensor)
        for name in _OVER_ALL
        if hasattr(owner, name)
    }
)
"""Functions for which DTensor weighs or places shards as if all had equally many rows."""


def check_supposes_nothing(func: Callable[..., Any], args: Sequence[Any]) -> None:
    """See that a function is right for the rows that ranks hold.

    Raises:
        RuntimeError: DTensor's rule for it takes shards to be even, and they are not.
    """
    if func not in _SUPPOSE_EVEN:
        return
    for arg in args:
        shards = getattr(arg, "row_shards", None)
        if shards is None or shards.is_replicated:
            continue
        if len({end - start for start, end in shards.row_ranges}) > 1:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} of a sharded tensor of shape "
                f"{tuple(arg.shape)} would be wrong: DTensor takes shards to have equally many "
                "rows, and these do not. Put it together from sums, as in (a - b).square().mean(), "
                "or compute with full_tensor()"
            )


def reduce_rows(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a sum or a mean.

    Args:
        func: One of `REDUCTIONS`.
        args: Its arguments, the first being an `UnevenDTensor`.
        kwargs: Likewise.

    Returns:
        What DTensor returns for a sum, divided for a mean. Its gradient arrives at the tensor as
        rows that this rank holds.
    """
    source, *more = args
    if torch.is_grad_enabled() and source.requires_grad:
        source = _GradientInRows.apply(source)  # type: ignore[no-untyped-call]
    if func in _SUMS or not _can_be_averaged(source, kwargs):
        return func(source, *more, **kwargs)
    total = torch.sum(source, *more, **kwargs)
    return total / (source.numel() // total.numel()) if total.numel() else total


def _can_be_averaged(source: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype") or source.dtype
    return (dtype.is_floating_point or dtype.is_complex) and "out" not in kwargs


class _GradientInRows(torch.autograd.Function):
    """Hands a tensor on as it is, and its gradient back as rows that this rank holds."""

    @staticmethod
    @override
    def forward(ctx: Any, source: Any) -> Any:
        ctx.like = source
        return source.detach()

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        return in_rows_of(ctx.like, grads[0])
