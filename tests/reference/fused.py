"""A linear layer whose kernel adds its weight gradient to the flat buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2 import FSDPModule


class FusedProduct(torch.autograd.Function):
    """The product of Megatron's and Transformer Engine's fused linear layers.

    The kind `add` is Megatron's. `overwrite` reads `overwrite_main_grad` in the forward, as
    Transformer Engine does from 2.15 on, and `late` in the backward, as older versions do. `none`
    is like `late` and returns no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, kind: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.kind = weight, kind
        ctx.overwrites = weight.overwrite_main_grad if kind == "overwrite" else None
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        product = grad.t() @ x
        if ctx.kind == "add":
            ctx.weight.get_main_grad().add_(product)
        else:
            overwrites = ctx.overwrites
            if overwrites is None:
                overwrites = ctx.weight.overwrite_main_grad
            target = ctx.weight.main_grad
            target.copy_(product) if overwrites else target.add_(product)
        ctx.weight.grad_added_to_main_grad = True
        # A placeholder with invalid values, which must be dropped.
        dummy = None if ctx.kind == "none" else torch.full_like(weight, float("nan"))
        if getattr(weight, "zero_out_wgrad", False):
            dummy = torch.zeros_like(weight)
        return grad @ weight, dummy, None


class FusedLinear(nn.Module):
    """A linear layer with a bias, fused where it is sharded.

    Args:
        width: Width of the input and of the output.
        kind: See `FusedProduct`.
        times: Uses of the weight in a forward.
        tied: Whether the weight has one more use, without a fused kernel.
    """

    def __init__(self, width: int, kind: str, times: int = 1, tied: bool = False) -> None:
        super().__init__()
        self.kind, self.times, self.tied = kind, times, tied
        self.weight = nn.Parameter(torch.randn(width, width) * 0.3)
        self.bias = nn.Parameter(torch.randn(width))
        if tied:
            # Megatron marks a weight that has a use without a fused kernel.
            self.weight.zero_out_wgrad = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tied:
            x = x @ self.weight.t().cos()
        for _ in range(self.times):
            if isinstance(self, FSDPModule):
                x = FusedProduct.apply(x, self.weight, self.kind) + self.bias
            else:
                x = x @ self.weight.t() + self.bias
        return x
