"""Sizes of a sharded model's units, as the memory bound takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from megatron_fsdp_v2.diagnostics.walk import units_below
from megatron_fsdp_v2.params.formats import payload_bytes
from megatron_fsdp_v2.plan.schedule import parent_of
from megatron_fsdp_v2.plan.unit_bytes import GroupBytes, UnitBytes

if TYPE_CHECKING:
    from megatron_fsdp_v2.params.group import ParameterGroup

__all__ = ["group_bytes", "unit_bytes"]


def group_bytes(group: ParameterGroup) -> GroupBytes:
    """Bytes of a group's tensors on this rank."""
    return GroupBytes.of(
        group.layout.numel,
        [axis.size for axis in group.axes],
        group.spec.placements,
        group.spec.dtypes,
        is_trained=group.grads is not None,
        on_cpu=group.device.type == "cpu",
        reduces=group.grads is None or group.grads.reduces,
        offloaded=group.spec.offload is not None,
        payload=payload_bytes(group.spec.format_type, group.spec.dtypes),
    )


def unit_bytes(module: nn.Module) -> list[UnitBytes]:
    """Units at and below a module, as `peak_bytes` takes them. No communication.

    Raises:
        ValueError: Nothing in the module is sharded, or it is no unit itself but contains some.
    """
    named = units_below(module)
    if named[0][0]:
        raise ValueError(
            f"{type(module).__name__} is not sharded itself; pass the module that fully_shard was "
            "called on last, the root"
        )
    names = [name for name, _ in named]
    return [
        UnitBytes(
            tuple(group_bytes(group) for group in unit.groups),
            parent=names.index(parent_of(name, names)) if name else None,
            tied_gathered=sum(group_bytes(group).gathered for group in unit.tied_groups),
            # Several modules are gathered from the first that runs to the last.
            keeps_gathered=not unit.reshard_after_forward or len(unit.modules) > 1,
            recomputes=unit.is_recomputed,
        )
        for name, unit in named
    ]
