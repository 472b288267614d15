"""Norms that Megatron supports only on a GPU: zero-centered weights, and sequence parallelism."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, override

import torch
from torch import nn
from torch.nn import functional

__all__ = ["ZeroCenteredLayerNorm", "ZeroCenteredRMSNorm", "normalize", "with_every_option"]


def normalize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    config: Any,
) -> torch.Tensor:
    """Apply the norm that a configuration names to the last dimension of `x`.

    Args:
        x: Input.
        weight: Scale factor; with `layernorm_zero_centered_gamma`, the factor minus one.
        bias: Shift; None for an RMS norm.
        eps: Added to the variance.
        config: Megatron's transformer configuration.

    Returns:
        A tensor of the dtype of `x`.
    """
    shape, kind = weight.shape, x.dtype
    if config.layernorm_zero_centered_gamma:
        # Transformer Engine also adds one in fp32: near 1, bf16 has only three digits.
        x, weight = x.float(), weight.float() + 1
        bias = None if bias is None else bias.float()
    if config.normalization == "RMSNorm":
        return functional.rms_norm(x, shape, weight, eps).to(kind)
    return functional.layer_norm(x, shape, weight, bias, eps).to(kind)


class ZeroCenteredLayerNorm(nn.LayerNorm):
    """A layer norm that stores its weight minus one, as Transformer Engine and apex define it.

    Weight decay then moves the factor towards one instead of zero.

    Args:
        config: Megatron's transformer configuration.
        hidden_size: Length of the normalized dimension.
        eps: Added to the variance.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.config = config

    @override
    def reset_parameters(self) -> None:
        """Set weight and bias to zero: a factor of one and no shift."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension of `x`; the result has its dtype."""
        return normalize(x, self.weight, self.bias, self.eps, self.config)


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """An RMS norm that stores its weight minus one; see `ZeroCenteredLayerNorm`."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.config = config

    @override
    def reset_parameters(self) -> None:
        """Set the weight to zero: a factor of one."""
        nn.init.zeros_(self.weight)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension of `x`; the result has its dtype."""
        return normalize(x, self.weight, None, float(self.eps or 0), self.config)


_ZERO_CENTERED = {"LayerNorm": ZeroCenteredLayerNorm, "RMSNorm": ZeroCenteredRMSNorm}


def with_every_option(make_norm: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `WrappedTorchNorm.__new__` to support sequence parallelism and zero-centered weights."""

    def make_norm_with_options(
        cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any
    ) -> Any:
        # A norm is applied per token and needs no other part of the sequence. Only the gradients of
        # its weights are partial; Megatron sums the gradients of parameters with this attribute.
        plain = copy.copy(config)
        plain.sequence_parallel = False
        plain.layernorm_zero_centered_gamma = False
        norm = make_norm(cls, plain, hidden_size, eps, *args, **kwargs)
        if config.layernorm_zero_centered_gamma:
            norm = _ZERO_CENTERED[config.normalization](config, hidden_size, eps)
        if config.sequence_parallel:
            for param in norm.parameters():
                param.sequence_parallel = True
        return norm

    return make_norm_with_options
