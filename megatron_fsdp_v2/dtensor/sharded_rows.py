"""What a DTensor is whose rows are spread unevenly over a mesh: its rows here and everywhere.

Torch's `Shard(0)` implies one particular chunking. A slice of a flat buffer holds other row
ranges, so a plain `DTensor` over it answers `full_tensor()` and checkpoint questions wrongly and
without complaint. `ShardedRows` carries the row range of every rank and answers both from it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, cast, override

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from megatron_fsdp_v2.comm.calls import all_gather_single
from megatron_fsdp_v2.comm.errors import naming_failures
from megatron_fsdp_v2.dtensor.attributes import AttributesAtOnce
from megatron_fsdp_v2.dtensor.row_shards import (
    Chunk,
    RowShards,
    TensorShard,
    placements_with_rows,
)

__all__ = [
    "ShardedRows",
    "all_gather",
    "in_rows_of",
    "local_of",
    "plain_attributes",
    "rows_like",
    "rows_of",
    "whole_of",
]


class ShardedRows(AttributesAtOnce):
    """A DTensor sharded along dimension 0 at the row ranges of a `RowShards`.

    Where tensor parallelism cut the parameter before, rows are those of this rank's part of it;
    shape and chunks are those of the whole.
    """

    _row_shards: RowShards

    @classmethod
    def from_rows(
        cls, local: torch.Tensor, mesh: DeviceMesh, row_shards: RowShards, shape: Sequence[int]
    ) -> Self:
        """Describe local rows as part of a global tensor. No communication, no copy.

        Args:
            local: This rank's rows, of shape `(rows, *part shape[1:])`, on any device, detached.
            mesh: The mesh; this rank is in it.
            row_shards: Row ranges over the mesh.
            shape: Global shape, contiguous.
        """
        stride = torch.empty(tuple(shape), device="meta").stride()
        # `from_local` would copy what is offloaded to the device of the mesh.
        meta = TensorMeta(torch.Size(shape), stride, local.dtype)
        spec = DTensorSpec(mesh, row_shards.placements, tensor_meta=meta)
        result: Any = DTensor.__new__(cls, local, spec, requires_grad=False)
        result._row_shards = row_shards
        return cast("Self", result)

    @property
    def row_shards(self) -> RowShards:
        """Row ranges of every rank."""
        return self._row_shards

    @property
    def local_rows(self) -> tuple[int, int]:
        """Row range of this rank."""
        coordinate = self.device_mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError("this rank is not part of the tensor's mesh")
        return self._row_shards.rows_at(coordinate)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of what data parallelism shards: the whole, or this rank's tensor-parallel part."""
        return self._row_shards.part_shape(self.shape)

    @property
    @override
    def placements(self) -> tuple[Placement, ...]:
        """`Shard` along cut axes; they know this rank's rows when torch asks for a chunk."""
        return placements_with_rows(self._row_shards, self.local_rows, self.part_shape)

    @property
    def owns_replica(self) -> bool:
        """Whether this rank comes first of the data-parallel ranks that hold the same rows."""
        coordinate = self.device_mesh.get_coordinate() or ()
        steps = zip(coordinate, self._row_shards.strides, strict=False)
        return all(stride or c == 0 for c, stride in steps)

    def pieces(self) -> list[Self]:
        """The pieces that were cut one by one, each as a tensor of its own; views.

        Raises:
            ValueError: They are pieces of another dimension than rows.
        """
        tensor = self._row_shards.tensor
        if tensor is None or len(tensor.pieces) < 2:
            return [self]
        if tensor.dim not in (None, 0):
            raise ValueError(f"pieces along dimension {tensor.dim} are not blocks of rows")
        found, start = [], 0
        for number, length in enumerate(tensor.pieces):
            found.append(self._narrowed(start, start + length, tensor.only(number)))
            start += length
        return found

    def _narrowed(self, start: int, end: int, tensor: TensorShard | None) -> Self:
        first, last = self.local_rows
        low, high = min(max(first, start), last), min(max(first, end), last)
        shards = self._row_shards.narrowed(start, end, tensor)
        return self.from_rows(
            self._local_tensor.detach()[low - first : high - first],
            self.device_mesh,
            shards,
            shards.global_shape((end - start, *self.part_shape[1:])),
        )

    def chunks(self) -> list[Chunk]:
        """The blocks of the whole tensor that are here, from integers alone."""
        return list(self._row_shards.chunks(self.local_rows, self.part_shape))

    @override
    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What torch's distributed checkpoint writes for this rank: its blocks, or nothing.

        A tensor without elements has no blocks and is written as one, or its name would be missing.
        """
        del object
        chunks = self.__create_chunk_list__()
        if not self.numel():
            chunks = [ChunkStorageMetadata(torch.Size([0] * self.ndim), self.shape)]
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self._local_tensor),
                    size=self.shape,
                ),
            )
            for chunk in chunks
        ]

    @override
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Offsets and sizes of this rank's blocks."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(c.offsets), sizes=torch.Size(c.sizes))
            for c in self.chunks()
        ]

    @override
    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """A block, which torch's distributed checkpoint reads from and writes into."""
        for chunk in self.chunks():
            if index.offset is None or tuple(index.offset) == chunk.offsets:
                return self._local_tensor[chunk.local]
        if not self.numel():
            return self._local_tensor.new_empty(self.shape)
        raise ValueError(f"this rank holds no block of {index.fqn} that starts at {index.offset}")


def rows_like[DTensorT: DTensor](local: torch.Tensor, like: DTensorT) -> DTensorT:
    """A DTensor that is sharded as another one, over other rows. No communication, no copy.

    Args:
        local: As many rows as this rank has of `like`, of any dtype, on any device, detached.
        like: A sharded tensor, even or not.
    """
    spec = like._spec
    if local.dtype != like.dtype:
        meta = TensorMeta(like.shape, spec.stride, local.dtype)
        spec = DTensorSpec(like.device_mesh, spec.placements, tensor_meta=meta)
    # `from_local` costs more than most operations.
    result: Any = DTensor.__new__(type(like), local, spec, requires_grad=False)
    if isinstance(like, ShardedRows):
        result._row_shards = like._row_shards
    return cast("DTensorT", result)


local_of: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("_local_tensor")
"""The local rows of a sharded tensor themselves, where `to_local()` makes a new view.

In C, as it is asked for several times a step of every parameter.
"""


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, sharded or not, sharing its memory."""
    return local_of(tensor) if isinstance(tensor, ShardedRows) else tensor.detach()


plain_attributes: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""Read and write `grad`, `requires_grad`, ... of DTensors without their Python dispatch."""


def in_rows_of(target: ShardedRows, source: Any) -> Any:
    """What to copy into a target's local rows from a source of any distribution."""
    if isinstance(source, ShardedRows):
        stored = source._row_shards.holders.stored
        if source._row_shards == target._row_shards:
            if stored is None:
                return source
            if stored == target._row_shards.held(target.local_rows):
                return rows_like(source._local_tensor, target)
        if stored is not None:
            raise ValueError(
                f"a tensor of shape {tuple(source.shape)} that one rank saved with torch.save "
                f"holds other rows than this rank has of the parameter of shape "
                f"{tuple(target.shape)}: load the file of this rank, with the same ranks, mesh and "
                "sharding, or save with megatron_fsdp_v2.checkpoint or "
                "torch.distributed.checkpoint, which load at any"
            )
    if not isinstance(source, torch.Tensor) or source.shape != target.shape:
        return source
    full = source.full_tensor() if isinstance(source, DTensor) else source
    local = torch.empty_like(target._local_tensor)
    for chunk in target.chunks():
        block = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        local[chunk.local] = full[block].to(local.device, local.dtype)
    return rows_like(local, target)


def whole_of(tensor: ShardedRows) -> torch.Tensor:
    """The whole tensor, on every rank; its own memory where ranks hold all. Collective.

    Rows are gathered axis by axis, padded to the longest range; the padding is dropped.

    Raises:
        RuntimeError: It was loaded from a file, and other ranks are not there.
    """
    mesh, shards = tensor.device_mesh, tensor._row_shards
    if shards.holders.stored is not None:
        raise RuntimeError(
            f"a sharded tensor of shape {tuple(tensor.shape)} that was loaded from a file has one "
            "rank's rows and no process groups; load it into a model that is sharded like the one "
            "it was saved from, and take the parameter's full_tensor()"
        )
    if shards.is_replicated:
        return tensor._local_tensor.detach()
    local, part = tensor._local_tensor.detach(), tensor.part_shape
    longest = max(end - start for start, end in shards.row_ranges)
    piece = local.new_zeros((longest, *part[1:]))
    piece[: local.shape[0]] = local
    sharded_axes = [axis for axis, stride in enumerate(shards.strides) if stride]
    for axis in reversed(sharded_axes):
        piece = all_gather(piece, mesh, axis)
    sizes = [mesh.size(axis) for axis in sharded_axes]
    full = local.new_zeros(part)
    for number, block in enumerate(torch.split(piece, longest)) if longest else ():
        coordinate = torch.unravel_index(torch.tensor(number), sizes) if sizes else ()
        index = sum(
            int(c) * shards.strides[axis] for c, axis in zip(coordinate, sharded_axes, strict=True)
        )
        start, end = shards.row_ranges[index]
        full[start:end] = block[: end - start]
    return _join_parts(full, mesh, shards.tensor)


def all_gather(piece: torch.Tensor, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """What all ranks along a mesh axis have of the same shape, joined along dimension 0."""
    gathered = piece.new_empty((mesh.size(axis) * piece.shape[0], *piece.shape[1:]))
    group = mesh.get_group(axis)
    with naming_failures("all-gather of a whole tensor (full_tensor)", group):
        all_gather_single(gathered, piece.contiguous(), group=group)
    return gathered


def _join_parts(part: torch.Tensor, mesh: DeviceMesh, tensor: TensorShard | None) -> torch.Tensor:
    """The whole, from the parts of all tensor-parallel ranks."""
    if tensor is None or tensor.dim is None or tensor.size == 1:
        return part
    parts = torch.chunk(all_gather(part, mesh, mesh.ndim - 1), tensor.size)
    lengths = list(tensor.lengths(part.shape[tensor.dim]))
    pieces = zip(*(torch.split(p, lengths, tensor.dim) for p in parts), strict=True)
    return torch.cat([torch.cat(same, tensor.dim) for same in pieces], tensor.dim)
