"""Megatron's gated delta net and sparse attention in its local layers.

Megatron builds both from Transformer Engine's layers and from GPU kernels of other packages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

__all__ = [
    "causal_conv1d",
    "hadamard_rotation",
    "l2norm",
    "layer_with_l2_norms",
    "local_attention_spec",
    "local_backend",
]


def local_backend(config: Any) -> Any:
    """Choose Megatron's own layers."""
    del config
    from megatron.core.models.backends import LocalSpecProvider

    from megatron_cpu_rehearsal.replicated_linear import ReplicatedLinear

    class Provider(LocalSpecProvider):
        def linear(self) -> type:
            return ReplicatedLinear

    return Provider()


def local_attention_spec(config: Any, backend: Any = None) -> Any:
    """Specify the standard attention layers of a model with experimental attention."""
    del backend
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layer = get_gpt_layer_local_spec(
        config.num_moe_experts,
        config.moe_grouped_gemm,
        config.qk_layernorm,
        config.multi_latent_attention,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    attention = layer.submodules.self_attention
    attention.metainfo["fuse_input_layernorm"] = False
    return attention


def layer_with_l2_norms(specify: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the specification of a layer to support `--qk-l2-norm`."""

    def specify_with_norms(config: Any, vp_stage: Any) -> Any:
        from megatron.core.transformer.torch_norm import L2Norm

        layer = specify(config, vp_stage)
        if config.transformer.qk_l2_norm:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = L2Norm
        return layer

    return specify_with_norms


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Apply a causal convolution per channel, as flash-linear-attention's kernel does.

    Args:
        x: `(batch, sequence, channels)`.
        weight: `(channels, taps)`, the last tap for the token itself.
        bias: `(channels,)`.
        activation: `silu`, or its alias `swish`; None for no activation.
        others: The kernel's arguments for states and packed sequences; None or False.

    Returns:
        A tensor like `x`, and no state.

    Raises:
        NotImplementedError: A state or packed sequences are requested.
    """
    used = [name for name, value in others.items() if value is not None and value is not False]
    if used:
        raise NotImplementedError(f"causal_conv1d on a CPU does not support {', '.join(used)}")
    channels, taps = weight.shape
    padded = functional.pad(x.transpose(1, 2), (taps - 1, 0))
    result = functional.conv1d(padded, weight.unsqueeze(1), bias, groups=channels)
    if activation is not None:
        result = functional.silu(result)
    return result.transpose(1, 2), None


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Divide by the L2 norm over the last dimension, in fp32; the result has the dtype of `x`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).type_as(x)


def hadamard_rotation(x: torch.Tensor) -> torch.Tensor:
    """Multiply the last dimension by the orthonormal Hadamard matrix of its length.

    Args:
        x: A tensor whose last dimension is a power of two. The GPU kernel pads other sizes with
            zeros.

    Returns:
        A tensor like `x`, summed in fp32.

    Raises:
        ValueError: The last dimension is not a power of two.
    """
    size = x.shape[-1]
    if size & (size - 1):
        raise ValueError(
            f"--dsa-indexer-head-dim {size} is not a power of two, which the rotation of the "
            "indexer's activations needs"
        )
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        top = torch.cat([matrix, matrix], dim=1)
        matrix = torch.cat([top, torch.cat([matrix, -matrix], dim=1)])
    rotated: torch.Tensor = x.float() @ (matrix * size**-0.5)
    return rotated.type_as(x)
