"""How many products a module of Transformer Engine does, by which it counts its quantizers.

Transformer Engine is not imported: a module of its kind is known by what it has.
"""

from __future__ import annotations

from torch import nn

__all__ = ["num_grouped", "num_products"]


def num_grouped(module: nn.Module) -> int | None:
    """How many products a grouped layer does with weights of its own; None for other modules.

    Of its state, each product has the columns that belong to it one after the other.
    """
    number: int | None = getattr(module, "num_gemms", None)
    return number


def num_products(module: nn.Module) -> int:
    """Products of a module's forward: one of most, two of an MLP, three of attention."""
    number = num_grouped(module)
    if number is not None:
        return number
    if hasattr(module, "unfused_attention"):
        return 3
    return 2 if hasattr(module, "fc2_weight") else 1
