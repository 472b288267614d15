"""Whether all ranks sharded the same units, and are about to use the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from megatron_fsdp_v2.context import Reshardable
from megatron_fsdp_v2.placement import Placement
from megatron_fsdp_v2.rank_checks import (
    CheckRanks,
    UnitRecord,
    checksum,
    compare_steps,
    compare_units,
)

if TYPE_CHECKING:
    from megatron_fsdp_v2.context import Context
    from megatron_fsdp_v2.param_group import ParameterGroup

__all__ = ["Checkable", "check_units", "compare_unit"]


class Checkable(Reshardable, Protocol):
    """What is compared of a unit."""

    fqn: str
    class_name: str
    groups: list[ParameterGroup]
    borrowed: list[ParameterGroup]

    @property
    def name(self) -> str:
        """Name and class of the module, for messages."""
        ...


def check_units[UnitT: Checkable](context: Context[UnitT]) -> None:
    """At the first use: see that all ranks sharded the same. Collective.

    Raises:
        RuntimeError: They did not, or a unit shares a parameter with another root's.
    """
    context.is_checked = True
    units = context.units()
    for unit in units:
        for group in unit.borrowed:
            if not any(group in other.groups for other in units):
                raise RuntimeError(
                    f"{unit.name} shares a parameter with {group.name}, which belongs to "
                    "another root; call fully_shard on a module that contains both"
                )
    if context.check_ranks is CheckRanks.NEVER:
        return
    by_mesh: dict[Any, list[UnitT]] = {}
    for unit in units:
        if unit.groups:
            by_mesh.setdefault(unit.groups[0].mesh, []).append(unit)
    for members in by_mesh.values():
        group = members[0].groups[0]
        compare_units([_record(unit) for unit in members], group.axes, group.device)


def _record(unit: Checkable) -> UnitRecord:
    options = [unit.class_name]
    copies = [0] * len(unit.groups[0].axes)
    for group in unit.groups:
        options += [",".join(group.names), group.layout.fingerprint, repr(group.spec)]
        if group.grads is not None and not group.grads.reduces:
            continue
        for axis, placements in enumerate(group.spec.placements):
            replicated = placements.main_weight is Placement.REPLICATE
            if replicated and group.axes[axis].size > 1:
                copies[axis] += checksum(group.main_weight.tensor)
    return UnitRecord(unit.fqn, " ".join(options), tuple(copies))


def compare_unit[UnitT: Checkable](context: Context[UnitT], unit: UnitT, action: str) -> None:
    """Before a collective: see that it is the same unit's on every rank. Collective.

    Args:
        context: The unit's.
        unit: Whose parameters are about to be communicated.
        action: `gather` or `reduce`.

    Raises:
        RuntimeError: A rank is about to do something else.
    """
    if not unit.groups:
        return
    units, group = context.units(), unit.groups[0]
    actions = ("gather", "reduce")
    names = [f"{known} {other.name}" for other in units for known in actions]
    code = units.index(unit) * len(actions) + actions.index(action)
    compare_steps(action, unit.name, code, group.axes[-1], group.device, names)
