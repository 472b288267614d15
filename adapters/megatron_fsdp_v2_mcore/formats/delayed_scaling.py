"""The delayed-scaling state that Transformer Engine's modules keep between steps.

A module has a scale for every tensor it quantizes, and a history of the largest magnitudes (amax)
from which scales are computed. Neither is a parameter or buffer of the module. This file does not
import Transformer Engine; it recognizes the modules by their attributes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def has_fp8_state(module: nn.Module) -> bool:
    """Whether a module is one of Transformer Engine that quantizes tensors."""
    return hasattr(module, "fp8_meta")


def allocate(module: Any) -> None:
    """Allocate the state that a module's first forward would allocate. Idempotent.

    Call it inside `autocast`, whose recipe determines the state.
    """
    module.init_fp8_metadata(num_gemms=_num_gemms(module))


def live_state(module: Any) -> dict[str, torch.Tensor]:
    """Return the state tensors that a module uses, not copies; empty if it has none.

    Returns:
        `scale_fwd` and `scale_bwd`, fp32 of shape `(tensors,)`, and `amax_history_fwd` and
        `amax_history_bwd`, fp32 of shape `(steps, tensors)`. A GEMM has three quantized tensors in
        the forward and two in the backward.
    """
    recipe = module.fp8_meta.get("recipe")
    uses_fp8 = any(getattr(recipe, name, False) for name in ("fp8_dpa", "fp8_mha"))
    if _is_attention(module) and not uses_fp8:
        return {}
    found: dict[str, torch.Tensor] = {}
    for direction in ("fwd", "bwd"):
        state = module.fp8_meta.get(f"scaling_{direction}")
        for name in ("scale", "amax_history"):
            tensor = getattr(state, name, None)
            if tensor is None:
                return {}
            found[f"{name}_{direction}"] = tensor
    return found


def amax_group(module: Any) -> Any:
    """Return the group over which amaxes are reduced; None before the module's first use in FP8."""
    return module.fp8_meta.get("fp8_group")


def num_grouped_gemms(module: nn.Module) -> int | None:
    """Return the number of GEMMs with separate weights of a grouped layer; None for other modules.

    In the state of a grouped layer, the columns of each GEMM are consecutive.
    """
    number: int | None = getattr(module, "num_gemms", None)
    return number


def _num_gemms(module: nn.Module) -> int:
    """Return the number of GEMMs in a forward: two for an MLP, three for attention, else one."""
    number = num_grouped_gemms(module)
    if number is not None:
        return number
    if _is_attention(module):
        return 3
    return 2 if hasattr(module, "fc2_weight") else 1


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "unfused_attention")
