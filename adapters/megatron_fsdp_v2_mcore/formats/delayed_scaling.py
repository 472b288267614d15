"""The delayed-scaling state that Transformer Engine's modules keep between steps.

A module has a scale for every tensor it quantizes, and a history of the largest magnitudes (amax)
from which scales are computed. Neither is a parameter or buffer of the module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

from megatron_fsdp_v2_mcore.formats.products import num_products

__all__ = ["allocate", "amax_group", "live_state"]

_DIRECTIONS = {"fwd": "scaling_fwd", "bwd": "scaling_bwd"}


def allocate(module: nn.Module) -> None:
    """Allocate the state that a module's first forward would allocate. Idempotent.

    Call it inside `autocast`, whose recipe determines the state.
    """
    if not isinstance(module, TransformerEngineBaseModule):
        return
    module.init_fp8_metadata(num_gemms=num_products(module))


def live_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state tensors that a module uses, not copies; empty if it has none.

    Returns:
        `scale_fwd` and `scale_bwd`, fp32 of shape `(tensors,)`, and `amax_history_fwd` and
        `amax_history_bwd`, fp32 of shape `(steps, tensors)`. Three tensors are quantized for each
        product in the forward, and two in the backward.
    """
    if not isinstance(module, TransformerEngineBaseModule):
        return {}
    if isinstance(module, DotProductAttention) and not _quantizes_attention(module):
        return {}
    found: dict[str, torch.Tensor] = {}
    for direction, key in _DIRECTIONS.items():
        state = module.fp8_meta.get(key)
        scale = getattr(state, "scale", None)
        history = getattr(state, "amax_history", None)
        if scale is None or history is None:
            return {}
        found[f"scale_{direction}"] = scale
        found[f"amax_history_{direction}"] = history
    return found


def amax_group(module: nn.Module) -> Any:
    """Return the group over which amaxes are reduced; None before the module's first use in FP8."""
    return getattr(module, "fp8_meta", {}).get("fp8_group")


def _quantizes_attention(module: Any) -> bool:
    recipe = module.fp8_meta.get("recipe")
    return bool(getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False))
