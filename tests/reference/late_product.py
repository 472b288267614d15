"""A matrix product with a delayed weight gradient, as in Transformer Engine's modules."""

from __future__ import annotations

from typing import Any

import torch


class LateProduct(torch.autograd.Function):
    """`x @ weight.t()` for `x` of any number of dimensions.

    The backward calls the function `leave` with `weight`, the gradient of the product and `x`, the
    latter two as matrices; `leave` may return a placeholder for the weight's gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, leave: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.leave = weight, leave
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        placeholder = ctx.leave(ctx.weight, grad.flatten(0, -2), x.flatten(0, -2))
        return grad @ weight, placeholder, None
