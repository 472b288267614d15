"""Rows of a group's parameters as parts of one flat tensor, and their gradients likewise."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

import torch

from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of
from megatron_fsdp_v2.params.buffer import place_in
from megatron_fsdp_v2.params.group import ParameterGroup

if TYPE_CHECKING:
    from megatron_fsdp_v2.dtensor.row_shards import ShardedGroup

__all__ = ["FlatRows", "group_of", "local_rows", "rows_at"]


def group_of(param: torch.Tensor) -> ParameterGroup | None:
    """The group that a sharded parameter is of; None where it is gone, and of any other tensor."""
    if not isinstance(param, UnevenDTensor):
        return None
    group: ShardedGroup | None = param.row_shards.holders.group()
    return group if isinstance(group, ParameterGroup) and group.holds(param) else None


class FlatRows:
    """Where the parameters of a group are in this rank's main weights. Holds the group weakly.

    Attributes:
        tensor: The main weights, flat.
        order: Numbers of parameters that have rows here, in the order of the flat tensor.
        places: Of every parameter its first element and number of elements.
    """

    def __init__(self, group: ParameterGroup) -> None:
        self._group = weakref.ref(group)
        main = group.weights.main
        self.tensor = main.tensor
        self.places: list[tuple[int, int]] = []
        for index in range(len(main.layout.slots)):
            offset, shape = place_in(main.layout, main.span, index)
            self.places.append((offset, torch.Size(shape).numel()))
        sized = (index for index, (_, numel) in enumerate(self.places) if numel)
        self.order = sorted(sized, key=lambda index: self.places[index])

    @property
    def is_current(self) -> bool:
        """Whether the group, and with it the main weights, is still there."""
        return self._group() is not None

    def index_of(self, param: torch.Tensor) -> int | None:
        """A parameter's number; None if its rows are not those in the flat tensor, or none.

        Somebody may have put another local tensor in their place, which the next forward takes in.
        """
        group = self._group()
        assert group is not None
        known = (index for index, each in enumerate(group.sharded_params) if each is param)
        index = next(known, None)
        if index is None:
            return None
        offset, numel = self.places[index]
        local, start = local_of(param), offset + int(self.tensor.storage_offset())
        is_there = (
            numel > 0
            and local.numel() == numel
            and local.dtype == self.tensor.dtype
            and local.is_contiguous()
            and local.storage_offset() == start
            and local.untyped_storage()._cdata == self.tensor.untyped_storage()._cdata
        )
        return index if is_there else None

    def gradients(self) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
        """Every `param.grad` now; and a flat tensor like `tensor` that all of them are rows of.

        None instead where that is not so: somebody put another tensor in the place of one.
        """
        group = self._group()
        if group is None or group.grads is None:
            return [None] * len(self.places), None
        grads, flat, others = group.grads.param_grads.found()
        return grads, None if others else flat


def rows_at(flat: torch.Tensor, start: int, param: torch.Tensor) -> torch.Tensor:
    """The part of a flat tensor that belongs to a parameter, in the shape of its local rows.

    Args:
        flat: A flat tensor.
        start: First element.
        param: The parameter.
    """
    local = local_of(param)
    return flat.narrow(0, start, local.numel()).view(local.shape)


def local_rows(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """What this rank has of a tensor that is sharded as a parameter is; None for any other."""
    if type(value) is not UnevenDTensor:
        return None
    mine, local = cast("UnevenDTensor", param), local_of(value)
    is_alike = value.row_shards is mine.row_shards or value.row_shards == mine.row_shards
    return local if is_alike and local.shape == local_of(param).shape else None
