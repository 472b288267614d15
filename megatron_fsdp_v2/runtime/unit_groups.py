"""The parameter groups of a unit: its own, and those of tied parameters that other units own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_fsdp_v2.params.gradients import GroupGrads
from megatron_fsdp_v2.params.group import ParameterGroup, find_sharded
from megatron_fsdp_v2.runtime.machine.state import UnitState


class UnitGroups:
    """Parameter groups of a unit. `Unit` adds what runs: hooks, and commands of the machine.

    Attributes:
        state: State in the machine.
        class_name: Class names of its modules before sharding.
        groups: Its own parameter groups, which it gathers and reduces.
        tied_groups: Groups of other units that have a parameter tied to one of its own; gathered by
            this unit too, reduced by their owner.
        held_groups: The groups it gathers: `groups` and `tied_groups`.
        root_options: Root options passed to this unit; all others come from the root.
        unset: Names of tensors without values when the unit was made, and functions that find them.
    """

    def __init__(
        self,
        state: UnitState,
        class_name: str,
        groups: Sequence[ParameterGroup],
        tied_groups: Sequence[ParameterGroup],
        root_options: Mapping[str, Any],
    ) -> None:
        self.state = state
        self.class_name = class_name
        self.root_options = dict(root_options)
        self.unset: Sequence[tuple[str, Callable[[], torch.Tensor | None]]] = ()
        self.own(groups)
        self.hold(tied_groups)

    def __del__(self) -> None:
        # A unit whose constructor raised has no state.
        if "state" in vars(self):
            self.state.forget()

    def own(self, groups: Sequence[ParameterGroup]) -> None:
        """Set the unit's own groups; `hold` follows."""
        self.groups = list(groups)
        self.state.groups = [group.grads for group in groups]
        self.state.has_outer = any(len(group.axes) > 1 for group in groups)
        for group in groups:
            _OWNERS[group] = weakref.ref(self)

    def hold(self, tied_groups: Sequence[ParameterGroup]) -> None:
        """Set the groups of other units that the unit gathers too."""
        self.tied_groups = list(tied_groups)
        state = self.state
        self.held_groups = groups = [*self.groups, *self.tied_groups]
        owners = [unit for unit in map(owner_of, self.tied_groups) if unit is not None]
        state.reduced_with = [state, *(owner.state for owner in owners)]
        state.nbytes = sum(group.gathered_nbytes for group in groups)
        state.single_payload = all(group.single_payload for group in groups)
        state.is_collective = any(group.gathers_for_use for group in groups)

    @property
    def name(self) -> str:
        """Name and class of the module, for error messages."""
        return f"{self.fqn or 'the root'} ({self.class_name})"

    @property
    def fqn(self) -> str:
        """Names of all its modules under the root, separated by commas; empty for the root."""
        return self.state.fqn

    @property
    def is_root(self) -> bool:
        """Whether its module is the outermost one."""
        return self.state.is_root

    def grads(self) -> list[GroupGrads]:
        """Return the gradients of its groups."""
        return [group.grads for group in self.groups]

    def is_outdated(self) -> bool:
        """Return whether gathered weights are stale or changed, or some were (un)frozen."""
        version = self.state.root.weight_version
        return any(
            g.is_stale(version)
            or g.parameters.has_changed_requires_grad()
            or g.parameters.find_written()
            for g in self.held_groups
        )

    def is_changed(self) -> bool:
        """Return whether user code assigned or wrote parameters since weights were gathered."""
        version = self.state.root.weight_version
        return any([g.parameters.replaced() or g.is_stale(version) for g in self.held_groups])

    def sync(self) -> None:
        """Adopt the tensors that user code assigned to parameters and modules."""
        for group in self.held_groups:
            group.parameters.sync()

    def join_tied(self) -> None:
        """Also gather parameters of other units that the program tied to parameters of this one.

        Raises:
            ValueError: A parameter was tied to one that is sharded otherwise.
        """
        for group in self.groups:
            if group.is_held:
                continue
            for _, module, attribute, param in group.parameters.replaced():
                found = find_sharded(param)
                if found is None or found[0].is_held:
                    continue
                other, index = found
                place, label = f"{attribute} of {type(module).__name__}", other.parameters.label
                other.check_tie(
                    f"{place} was tied to {label(index)}", group.spec, type(group.format)
                )
                group.parameters.leave_site(module, attribute)
                other.parameters.add_site(index, module, attribute)
                if other not in self.held_groups:
                    self.hold([*self.tied_groups, other])


# The unit of each group, which reduces its gradients.
_OWNERS: weakref.WeakKeyDictionary[ParameterGroup, weakref.ref[UnitGroups]] = (
    weakref.WeakKeyDictionary()
)


def owner_of(group: ParameterGroup) -> UnitGroups | None:
    """Return the unit that owns a group; None before the unit is made and after its deletion."""
    ref = _OWNERS.get(group)
    return None if ref is None else ref()
