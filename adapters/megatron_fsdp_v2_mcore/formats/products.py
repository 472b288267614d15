"""The number of GEMMs of a Transformer Engine module, which determines its number of quantizers.

This file does not import Transformer Engine; it recognizes its modules by their attributes.
"""

from __future__ import annotations

from torch import nn

__all__ = ["num_grouped", "num_products"]


def num_grouped(module: nn.Module) -> int | None:
    """Return the number of GEMMs with separate weights of a grouped layer; None for other modules.

    In the state of a grouped layer, the columns of each GEMM are consecutive.
    """
    number: int | None = getattr(module, "num_gemms", None)
    return number


def num_products(module: nn.Module) -> int:
    """Return the number of GEMMs in a forward: two for an MLP, three for attention, else one."""
    number = num_grouped(module)
    if number is not None:
        return number
    if hasattr(module, "unfused_attention"):
        return 3
    return 2 if hasattr(module, "fc2_weight") else 1
