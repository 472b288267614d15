"""A flat buffer as one rank holds it: a layout, the span of it that is here, and storage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.dtensor.row_shards import Holders, RowShards, TensorShard
from megatron_fsdp_v2.layout.buffer_layout import BufferLayout
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.layout.placement import AxisPlacements, Placement
from megatron_fsdp_v2.memory.allocator import TemporaryBuffer, alias_of
from megatron_fsdp_v2.memory.host_memory import empty_in_host_memory

__all__ = ["DataParallelBuffer", "FlatSpec", "Offload", "ShardGrid", "Span", "place_in"]


@dataclass(frozen=True, slots=True)
class Span:
    """Neighboring slices of a flat buffer.

    Attributes:
        first: Index of the first slice.
        count: Number of slices.
    """

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class ShardGrid:
    """How a flat buffer's slices map onto the axes of a data-parallel mesh.

    The inner axis cuts the buffer into large pieces and the outer axis cuts each of them again,
    so that an all-gather along the inner axis alone already yields the whole buffer.

    Attributes:
        axes: The mesh axes, outermost first.
        parts: Pieces each axis cuts into; 1 for an axis that only replicates.
    """

    axes: tuple[Axis, ...]
    parts: tuple[int, ...]

    @classmethod
    def of(cls, axes: Sequence[Axis], main_placements: Sequence[Placement]) -> ShardGrid:
        """The grid for main weights placed so; no other tensor of a group is cut finer."""
        parts = tuple(
            axis.size if placement is Placement.SHARD else 1
            for axis, placement in zip(axes, main_placements, strict=True)
        )
        return cls(tuple(axes), parts)

    @property
    def num_slices(self) -> int:
        """Slices of the flat buffer."""
        return math.prod(self.parts)

    @property
    def strides(self) -> tuple[int, ...]:
        """Slices one step along each axis moves on; 0 along an axis that replicates."""
        strides, stride = [], 1
        for parts in self.parts:
            strides.append(stride if parts > 1 else 0)
            stride *= parts
        return tuple(strides)

    def span(self, placements: Sequence[Placement]) -> Span:
        """The slices this rank holds of a tensor with these placements (one per axis)."""
        first, count = 0, self.num_slices
        for axis, parts, placement in reversed(
            list(zip(self.axes, self.parts, placements, strict=True))
        ):
            if placement is Placement.SHARD and parts > 1:
                count //= parts
                first += axis.rank * count
        return Span(first, count)

    def row_shards(
        self, layout: BufferLayout, index: int, tensor: TensorShard | None, holders: Holders
    ) -> RowShards:
        """Row ranges of one parameter's main weight over the mesh."""
        return RowShards(layout.row_ranges(index), self.strides, tensor, holders)

    def coordinates_of(self, slices: Collection[int]) -> set[tuple[int, ...]]:
        """Mesh coordinates of the ranks whose main weight is one of these slices."""
        axes = list(zip(self.axes, self.parts, self.strides, strict=True))
        # From slices to ranks: of many ranks few have nothing.
        return {
            coordinate
            for number in slices
            for coordinate in itertools.product(
                *(
                    (number // stride % parts,) if parts > 1 else range(axis.size)
                    for axis, parts, stride in axes
                )
            )
        }


class DataParallelBuffer:
    """This rank's span of a flat buffer, bound to storage that it may share with others.

    Attributes:
        layout: Where parameters are in the whole flat buffer.
        span: Which slices are here.
        tensor: Flat storage of the span, `span.count * layout.shard_numel` elements. Its memory
            comes and goes where it is a temporary buffer's.
        packing: Elements of the layout that one of `tensor` stands for; it has as many fewer.
    """

    def __init__(
        self,
        layout: BufferLayout,
        span: Span,
        tensor: torch.Tensor,
        temporary: TemporaryBuffer | None = None,
        *,
        packing: int = 1,
    ) -> None:
        expected = span.count * layout.shard_numel // packing
        if tensor.numel() != expected:
            raise ValueError(f"a span of {expected} elements cannot use {tensor.numel()} of them")
        self.layout = layout
        self.span = span
        self.tensor = tensor
        self.packing = packing
        self._temporary = temporary

    @property
    def nbytes(self) -> int:
        """Bytes of the span."""
        return self.tensor.numel() * self.tensor.element_size()

    def rows(self, index: int) -> tuple[int, int]:
        """Rows of a parameter inside this span."""
        return self.layout.local_rows(index, self.span.first, self.span.count)

    def view(self, index: int) -> torch.Tensor:
        """This span's rows of a parameter, as a view of the storage: `(rows, *shape[1:])`.

        Where the span is the whole buffer, that is the whole parameter. Packed, its last dimension
        is shorter.
        """
        offset, shape = place_in(self.layout, self.span, index)
        if self.packing > 1:
            offset, shape = offset // self.packing, (*shape[:-1], shape[-1] // self.packing)
        if self._temporary is not None:
            return self._temporary.alias(offset, shape)
        return alias_of(self.tensor, offset, shape)

    def follow(self, tensor: torch.Tensor) -> None:
        """Have a tensor made of one of the views stay one, wherever the memory moves."""
        if self._temporary is not None:
            self._temporary.follow(tensor)

    def piece(self, span: Span) -> torch.Tensor:
        """The flat part of this buffer that holds a narrower span."""
        slice_numel = self.layout.shard_numel // self.packing
        start = (span.first - self.span.first) * slice_numel
        return self.tensor.narrow(0, start, span.count * slice_numel)


def place_in(layout: BufferLayout, span: Span, index: int) -> tuple[int, tuple[int, ...]]:
    """Where a span's rows of a parameter are in it: first element, and shape.

    Args:
        layout: Of the whole flat buffer.
        span: The slices there are.
        index: Which parameter.
    """
    slot = layout.slots[index]
    start, end = layout.local_rows(index, span.first, span.count)
    offset = slot.offset + start * slot.row_numel - span.first * layout.shard_numel
    return offset if end > start else 0, (end - start, *slot.shape[1:])


@dataclass(frozen=True, slots=True)
class Offload:
    """Where main weights and main gradients are that are offloaded.

    Attributes:
        pin_memory: Whether a device can read and write them by itself, beside other work.
    """

    pin_memory: bool


@dataclass(frozen=True, slots=True)
class FlatSpec:
    """What the flat buffers of a group have in common, those of weights and of gradients.

    Attributes:
        name: Of the group, for reports.
        layout: Where parameters are in the whole flat buffer.
        grid: How its slices map onto the mesh.
        placements: Placements per mesh axis, outermost first.
        dtypes: Dtypes of weights and gradients.
        device: Where the buffers are.
        host: Where main weights and main gradients are instead, if they are offloaded.
    """

    name: str
    layout: BufferLayout
    grid: ShardGrid
    placements: tuple[AxisPlacements, ...]
    dtypes: GroupDtypes
    device: torch.device
    host: Offload | None = None

    @property
    def whole(self) -> Span:
        """All slices."""
        return Span(0, self.grid.num_slices)

    def span(self, placements: Sequence[Placement]) -> Span:
        """The slices this rank holds of a tensor with these placements (one per axis)."""
        return self.grid.span(placements)

    def main_memory(
        self, span: Span, dtype: torch.dtype, *, is_overwritten: bool = False
    ) -> torch.Tensor:
        """Flat memory for what the optimizer reads and writes.

        Zeros are in it, which keep padding out of every norm and check.

        Args:
            span: The slices it is for.
            dtype: Element type.
            is_overwritten: Whether all of it, padding too, is about to be written; there need be
                no zeros then.
        """
        numel = span.count * self.layout.shard_numel
        if self.host is not None:
            is_pinned = self.host.pin_memory and self.device.type != "cpu"
            return empty_in_host_memory((numel,), dtype, pin_memory=is_pinned).zero_()
        make = torch.empty if is_overwritten else torch.zeros
        return make(numel, dtype=dtype, device=self.device)
