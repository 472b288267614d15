"""Megatron's multi-latent attention in its local layers, as it is with Transformer Engine's.

Megatron's local specification of it has Transformer Engine's in mind: its attention is asked for
widths of heads it does not know, and it cuts the projections to the latents over tensor-parallel
ranks, where the gradient of the rotary part of the keys, which all heads share, is lost on all
ranks but one.
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
    """Make `DotProductAttention.__init__` whose values are as wide as its keys or not."""

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
            # Only what the output is reshaped to depends on it.
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return construct_attention


def with_latents_on_every_rank(construct: Callable[..., None]) -> Callable[..., None]:
    """Make the constructor of multi-latent attention that projects as Transformer Engine's does."""

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
            # There is no latent of the queries whose norm could be a module of its own.
            changes["linear_q_proj"] = NormedColumnParallelLinear
            changes["q_layernorm"] = IdentityOp
        submodules = dataclasses.replace(submodules, **changes)
        construct(self, config, submodules, *args, **kwargs)

    return construct_attention


def choose_normed_linear(provider: Any) -> type:
    """Choose the layer with a norm inside, which Megatron's own layers do not have."""
    del provider
    from megatron_cpu_rehearsal.replicated_linear import NormedColumnParallelLinear

    return NormedColumnParallelLinear
