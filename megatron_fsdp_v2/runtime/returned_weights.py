"""Outputs of a forward that are weights, of which nothing is left once they are dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.params.autograd import tensors_within

if TYPE_CHECKING:
    from megatron_fsdp_v2.params.group import ParameterGroup
    from megatron_fsdp_v2.runtime.context import Context
    from megatron_fsdp_v2.runtime.unit_base import UnitBase

__all__ = ["check_outputs"]


def check_outputs(unit: UnitBase, output: Any, context: Context) -> None:
    """See that no output of a forward shares memory with weights that are dropped at its end.

    Few operations of torch look whether a tensor has memory: the others crash, or read what has
    been put there since.

    Args:
        unit: Whose forward ends; its weights are still gathered.
        output: What the forward returned.
        context: The unit's.

    Raises:
        RuntimeError: One does.
    """
    if not unit.gathered_nbytes or not unit.drops_after_forward:
        return
    dropped = [group for group in unit.held_groups if group.weights.gathers_for_use]
    for tensor in tensors_within(output):
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if not torch._C._has_storage(local):
            continue
        for group in dropped:
            name = group.gathered_name_at(local)
            if name is not None and local.numel() and not _is_held_around(group, unit, context):
                raise RuntimeError(
                    f"the forward of {unit.name} returns its weight {name}, or a view of it, and "
                    "drops gathered weights when it ends: whoever used that would read freed "
                    "memory. Return a copy (weight.clone()) or what is computed of it, or keep "
                    "the weights until the backward with reshard_after_forward=False or "
                    "sharding_strategy='optim_grads'"
                )


def _is_held_around(group: ParameterGroup, unit: UnitBase, context: Context) -> bool:
    """Whether a unit that runs this one holds the same weights, longer than this one."""
    return any(
        group in other.held_groups and other.is_unsharded and not other.is_idle
        for other in context.units()
        if other is not unit
    )
