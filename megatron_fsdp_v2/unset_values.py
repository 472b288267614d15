"""Parameters and buffers that got memory and no values yet, until a state dict is loaded.

A module on the meta device that cannot initialize itself is filled with a marker: NaN, or the
least integer. What still holds nothing else at the first forward is an error by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import nn

    from megatron_fsdp_v2.param_group import ParameterGroup
    from megatron_fsdp_v2.unit import Unit

__all__ = [
    "buffer_of",
    "check_has_values",
    "is_unset",
    "mark_unset",
    "parameter_of",
    "unset_like",
]


def unset_like(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a tensor, without values."""
    made = torch.empty_like(like, device=device)
    return mark_unset(made)


def mark_unset(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with what stands for no value. Booleans and complex numbers have none."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype not in _WITHOUT_MARK and not tensor.is_complex():
        tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor


def is_unset(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements, and none of them was given a value."""
    if not tensor.numel() or tensor.is_meta:
        return False
    if tensor.is_floating_point():
        return bool(tensor.isnan().all())
    if tensor.dtype in _WITHOUT_MARK or tensor.is_complex():
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())


# Their least number is one that buffers are full of.
_WITHOUT_MARK = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def buffer_of(module: nn.Module, attribute: str) -> Callable[[], torch.Tensor | None]:
    """Looks up a buffer of a module, which is held weakly."""
    ref = weakref.ref(module)

    def current() -> torch.Tensor | None:
        owner = ref()
        return None if owner is None else owner._buffers.get(attribute)

    return current


def parameter_of(group: ParameterGroup, index: int) -> Callable[[], torch.Tensor | None]:
    """Looks up this rank's rows of a parameter in its group, which is held weakly."""
    ref = weakref.ref(group)

    def current() -> torch.Tensor | None:
        owner = ref()
        return None if owner is None else owner.main_weight.view(index)

    return current


def check_has_values(unit: Unit) -> None:
    """Before a unit's first forward: see that what had no values has some. Collective.

    Raises:
        RuntimeError: Something has none, on some rank.
    """
    waiting: Sequence[tuple[str, Any]] = unit.unset
    for group in unit.groups:
        group.settle_changes()
    found = [tensor is not None and is_unset(tensor) for tensor in (get() for _, get in waiting)]
    # A rank that holds no row of a parameter hears of it from those that do.
    for group in unit.groups[:1]:
        table = torch.tensor(found, dtype=torch.int32, device=group.device)
        for axis in group.axes:
            if axis.size > 1:
                dist.all_reduce(table, op=dist.ReduceOp.MAX, group=axis.group)
        found = [bool(one) for one in table.tolist()]
    names = [name for (name, _), is_missing in zip(waiting, found, strict=True) if is_missing]
    if names:
        raise RuntimeError(
            f"{', '.join(names)} of unit {unit.name} had no values on the meta device and got none "
            "since: load a state dict, define reset_parameters() on the module that has it, or "
            "give fully_shard a param_init_fn"
        )
    unit.unset = []
