"""Parameters that model code replaced, converted or tied after they were sharded."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of
from megatron_fsdp_v2.params.attributes import propagate_attributes
from megatron_fsdp_v2.params.registration import find_owner_slot, in_functional_call, mark_stale

if TYPE_CHECKING:
    from megatron_fsdp_v2.dtensor.row_shards import ShardedGroup
    from megatron_fsdp_v2.params.members import Members

__all__ = ["ExternalChanges"]


class ExternalChanges:
    """Finds what stands where a group's parameters belong, and takes it in.

    Model code may replace a parameter (`load_state_dict(assign=True)`), a conversion may give it
    other storage. Values move into the flat buffer; a replaced DTensor takes the place of the one
    it came from, so that an optimizer built on it steps the right weights.
    """

    def __init__(self, owner: ShardedGroup, members: Members) -> None:
        """Watch the parameters of a group.

        Args:
            owner: The group; held weakly.
            members: Its parameters; a replaced one is put into the list of sharded ones.
        """
        self._owner = weakref.ref(owner)
        self._members = members
        self._sharded = members.sharded
        # Rows of the main weights.
        self._views = [local_of(param) for param in members.sharded]

    def sync(self) -> None:
        """Take in what was done to parameters since they were sharded.

        Raises:
            ValueError: Shape, dtype or identity changed in a way that has no meaning here.
        """
        if not all(map(operator.is_, map(local_of, self._sharded), self._views)):
            for index, param in enumerate(self._sharded):
                if local_of(param) is not self._views[index]:
                    self._rebind(index, param)
        found = list(self._replaced())
        for index, module, attribute, other in found:
            self._replace(index, f"{attribute} of {type(module).__name__}", other)
        if found:
            self._members.registrations.install(self._sharded)

    def is_replaced(self) -> bool:
        """Whether something else stands where one of the parameters belongs."""
        return next(self._replaced(), None) is not None

    def _replaced(self) -> Iterator[tuple[int, nn.Module, str, torch.Tensor | None]]:
        places = self._members.registrations
        for index, module, attribute, other in places.unexpected(self._sharded):
            if other is not self._members.gathered[index]:
                yield index, module, attribute, other

    def _label(self, index: int) -> str:
        return f"parameter {self._members.label(index)}"

    def _rebind(self, index: int, param: nn.Parameter) -> None:
        """Have a DTensor whose local tensor was replaced use the flat buffer again."""
        view, local = self._views[index], local_of(param)
        if local.dtype != view.dtype or local.shape != view.shape or local.device != view.device:
            raise ValueError(
                f"{self._label(index)} was changed after fully_shard: "
                f"from {tuple(view.shape)} {view.dtype} {view.device} here to "
                f"{tuple(local.shape)} {local.dtype} {local.device}; convert a model before "
                "sharding it, and set compute dtypes with a MixedPrecisionPolicy"
            )
        if local.data_ptr() != view.data_ptr():
            with torch.no_grad():
                view.copy_(local)
        cast("UnevenDTensor", param)._local_tensor = view

    def _replace(self, index: int, place: str, other: torch.Tensor | None) -> None:
        """Take the values, and if possible the object, that stand where a parameter belongs."""
        own = self._sharded[index]
        name = f"{self._label(index)} (registered as {place})"
        if other is None:
            raise ValueError(f"{name} was removed after fully_shard; remove it before")
        if not isinstance(other, nn.Parameter) or in_functional_call():
            raise ValueError(
                f"{name} was replaced for one call (torch.func.functional_call), and a sharded "
                "module computes with its own parameters; to run it with other values, load them "
                "with load_state_dict, run it, and load its own back"
            )
        if self._belongs_elsewhere(other, index):
            raise ValueError(f"{name} was tied to another one after fully_shard; tie them before")
        if other.shape != own.shape:
            raise ValueError(
                f"{name} was replaced after fully_shard: shape {tuple(own.shape)} before, "
                f"{tuple(other.shape)} now; build the model as it should be before sharding it"
            )
        if not isinstance(other, UnevenDTensor) or other.row_shards.holders.stored:
            if other.dtype != own.dtype:
                raise ValueError(
                    f"{name} changed from {own.dtype} to {other.dtype}; keep its dtype"
                )
            with torch.no_grad():
                own.copy_(other)
            self._mark_stale(other, index, "before the parameter was sharded again")
            return
        if other.row_shards != self._members.row_shards[index]:
            raise ValueError(f"{name} was replaced by a DTensor that is sharded differently")
        self._rebind(index, other)
        propagate_attributes(own, other)
        self._sharded[index] = other
        self._mark_stale(own, index, "before the parameter was replaced")

    def _mark_stale(self, param: torch.Tensor, index: int, since: str) -> None:
        owner = self._owner()
        assert owner is not None
        mark_stale(param, owner, index, since)

    def _belongs_elsewhere(self, param: nn.Parameter, index: int) -> bool:
        """Whether a parameter stands, or stood, for another slot than this one."""
        slot = find_owner_slot(param)
        if slot is not None:
            return slot[0] != self._owner() or slot[1].index != index
        if not isinstance(param, UnevenDTensor):
            return False
        owner = param.row_shards.holders.group()
        return owner is not None and owner.holds(param)
