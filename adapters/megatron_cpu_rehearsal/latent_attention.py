"""Megatron's multi-latent attention with local layers, equivalent to Transformer Engine's.

Megatron's local specification does not match its local layers. The specification passes head widths
that local attention does not support, and shards the projections to the latents over
tensor-parallel ranks. With this sharding, all ranks but one would lose the gradient of the rotary
part of the keys, which all heads share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

__all__ = [
    "choose_normed_linear",
    "with_head_widths",
    "with_latents_on_every_rank",
]


def with_head_widths(construct: Callable[..., None]) -> Callable[..., None]:
    """Wrap `DotProductAttention.__init__` to support keys and values of different widths."""

    def construct_attention(
        self: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        if k_channels is not None and kwargs.get("softmax_scale") is None:
            kwargs["softmax_scale"] = 1 / math.sqrt(k_channels)
        construct(self, *args, **kwargs)
        if v_channels is not None:
            # Only the shape of the output depends on the width of values.
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return construct_attention


def with_latents_on_every_rank(construct: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of multi-latent attention to replicate projections to the latents."""

    def construct_attention(
        self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any
    ) -> None:
        from megatron.core.transformer.identity_op import IdentityOp

        from megatron_cpu_rehearsal.replicated_linear import (
            NormedColumnParallelLinear,
            ReplicatedLinear,
        )

        changes: dict[str, Any] = {
            "linear_q_down_proj": ReplicatedLinear,
            "linear_kv_down_proj": ReplicatedLinear,
        }
        if config.q_lora_rank is None and config.qk_layernorm:
            # Without a query latent, the norm is part of the query projection.
            changes["linear_q_proj"] = NormedColumnParallelLinear
            changes["q_layernorm"] = IdentityOp
        submodules = dataclasses.replace(submodules, **changes)
        construct(self, config, submodules, *args, **kwargs)

    return construct_attention


def choose_normed_linear(provider: Any) -> type:
    """Return the linear layer with a fused norm, which Megatron's own layers lack."""
    del provider
    from megatron_cpu_rehearsal.replicated_linear import NormedColumnParallelLinear

    return NormedColumnParallelLinear
