"""Normalization of the last dimension, forward and backward.

A tensor is viewed as `(M, K)`, where `K` is its last dimension. With `zero_centered_gamma` the
weight is stored minus one. All functions compute in fp32 and round results once; statistics are
fp32.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_cpu_rehearsal.te import quant
from megatron_cpu_rehearsal.te.enums import TORCH_DTYPES

__all__ = [
    "layernorm_bwd",
    "layernorm_fwd",
    "rmsnorm_bwd",
    "rmsnorm_bwd_add",
    "rmsnorm_fwd",
]


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1]).float()


def _factor(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.detach().float() + 1 if zero_centered else weight.detach().float()


def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Compute `(x - mean) * rsigma * weight + bias`, with `rsigma = 1 / sqrt(variance + eps)`.

    Args:
        input: `(..., K)`.
        weight: `(K,)`.
        bias: `(K,)`.
        eps: Added to the variance.
        ln_out: A tensor to write into, or None.
        quantizer: A quantizer of Transformer Engine, or None.
        otype: A `DType`.
        sm_margin: Ignored.
        zero_centered_gamma: Whether the weight is stored minus one.

    Returns:
        The result, means `(M,)` and `rsigma` `(M,)`.
    """
    del sm_margin
    x = _matrix(input)
    mean = x.mean(-1)
    centered = x - mean[:, None]
    rsigma = (centered.square().mean(-1) + eps).rsqrt()
    values = centered * rsigma[:, None] * _factor(weight, zero_centered_gamma)
    if bias is not None:
        values = values + bias.detach().float()
    return [_result(values, input, ln_out, quantizer, otype), mean, rsigma]


def _result(
    values: torch.Tensor, input: torch.Tensor, output: Any, quantizer: Any, otype: Any
) -> Any:
    dtype = otype if isinstance(otype, torch.dtype) else TORCH_DTYPES[int(otype)]
    return quant.finished(values.view(input.shape), dtype, quantizer, output)


def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Return the gradients of input `(..., K)`, weight `(K,)` and bias `(K,)`."""
    del sm_margin
    grad, normalized = _matrix(dz), (_matrix(x) - mu[:, None]) * rsigma[:, None]
    scaled = grad * _factor(gamma, zero_centered_gamma)
    along = (scaled * normalized).mean(-1, keepdim=True)
    dx = (scaled - scaled.mean(-1, keepdim=True) - normalized * along) * rsigma[:, None]
    return [
        dx.view(x.shape).to(x.dtype),
        (grad * normalized).sum(0).to(gamma.dtype),
        grad.sum(0).to(gamma.dtype),
    ]


def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Compute `x * rsigma * weight`, with `rsigma = 1 / sqrt(mean(x ** 2) + eps)`.

    Args:
        input: `(..., K)`.
        weight: `(K,)`.
        eps: Added to the mean of squares.
        ln_out: A tensor to write into, or None.
        quantizer: A quantizer of Transformer Engine, or None.
        otype: A `DType`.
        sm_margin: Ignored.
        zero_centered_gamma: Whether the weight is stored minus one.

    Returns:
        The result, None and `rsigma` `(M,)`.
    """
    del sm_margin
    x = _matrix(input)
    rsigma = (x.square().mean(-1) + eps).rsqrt()
    values = x * rsigma[:, None] * _factor(weight, zero_centered_gamma)
    return [_result(values, input, ln_out, quantizer, otype), None, rsigma]


def _rmsnorm_grads(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad, normalized = _matrix(dz), _matrix(x) * rsigma[:, None]
    scaled = grad * _factor(gamma, zero_centered_gamma)
    along = (scaled * normalized).mean(-1, keepdim=True)
    dx = (scaled - normalized * along) * rsigma[:, None]
    return dx, (grad * normalized).sum(0).to(gamma.dtype)


def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Return the gradients of input `(..., K)` and weight `(K,)`."""
    del sm_margin
    dx, dgamma = _rmsnorm_grads(dz, x, rsigma, gamma, zero_centered_gamma)
    return [dx.view(x.shape).to(x.dtype), dgamma]


def rmsnorm_bwd_add(
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """As `rmsnorm_bwd`; adds another gradient of the input before rounding."""
    del sm_margin
    dx, dgamma = _rmsnorm_grads(dz, x, rsigma, gamma, zero_centered_gamma)
    return [(dx.view(x.shape) + add.float()).to(x.dtype), dgamma]
