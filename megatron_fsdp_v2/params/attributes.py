"""What others wrote on a parameter travels to what the parameter becomes."""

from __future__ import annotations

import inspect
import types
from collections.abc import Set as AbstractSet

import torch

__all__ = ["propagate_attributes"]

_OWN_ATTRIBUTES = frozenset(
    {"_is_param", "_row_shards", "_local_tensor", "_spec", "_owner_slot", "empty_grad"}
    | {"main_grad", "grad_added_to_main_grad", "overwrite_main_grad", "get_main_grad"}
)


def propagate_attributes(
    source: torch.Tensor, target: torch.Tensor, besides: AbstractSet[str] = frozenset()
) -> None:
    """Hand on what others wrote on a parameter: whatever is in its `__dict__`.

    A rule and not a list: model code marks parameters (`sequence_parallel`, `allreduce`, ...) and
    optimizers read the marks. What torch and this package keep there themselves stays behind. A
    method of the parameter becomes one of the other, or it would keep the original's memory.

    Args:
        source: Where they are.
        target: Where they are to be as well.
        besides: Names of what else stays behind.
    """
    for name, value in vars(source).items():
        if name in _OWN_ATTRIBUTES or name in besides:
            continue
        if inspect.ismethod(value) and value.__self__ is source:
            value = types.MethodType(value.__func__, target)  # noqa: PLW2901
        setattr(target, name, value)
