"""Which part of a parameter every rank holds: rows over data parallelism, and what cuts it before.

Integers only, and known to every rank: nobody asks another one who holds what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, override

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from megatron_fsdp_v2.layout.buffer_layout import RowRanges

__all__ = [
    "Chunk",
    "Holders",
    "RowShards",
    "ShardedGroup",
    "TensorShard",
    "knows_rows",
    "placements_with_rows",
]


class ShardedGroup(Protocol):
    """A `ParameterGroup`, as far as its parameters ask it something.

    Attributes:
        name: For reports.
        names: Parameter names relative to the unit.
    """

    name: str
    names: list[str]

    def holds(self, param: torch.Tensor) -> bool:
        """Whether it is one of its sharded parameters."""
        ...

    def name_of(self, param: torch.Tensor) -> str:
        """What to call one of them in a message."""
        ...

    def before_direct_gradient(self) -> None:
        """Autograd is about to add to the `grad` of one, of a loss of the sharded parameter."""
        ...


def _nobody() -> None:
    return None


@dataclass(slots=True)
class Holders:
    """What the tensors of one parameter group know in common.

    Attributes:
        group: The `ParameterGroup`, weakly.
        empty: Mesh coordinates of ranks that hold no row of any trained parameter of the model.
        stored: First row, one past the last and tensor-parallel rank of what was saved to the file
            that they come from; None for tensors of this job.
    """

    group: Callable[[], ShardedGroup | None] = _nobody
    empty: frozenset[tuple[int, ...]] = frozenset()
    stored: tuple[int, ...] | None = None

    def name_of(self, param: torch.Tensor) -> str | None:
        """What to call a parameter in a message; None where its group is gone, or never was."""
        group = self.group()
        return None if group is None else group.name_of(param)


@dataclass(frozen=True, slots=True)
class TensorShard:
    """How another mesh axis than those of data parallelism cuts a parameter, before they do.

    Tensor parallelism gives every rank a part of a weight; data parallelism shards that part by
    rows. Told about it, `fully_shard` makes parameters DTensors over both, with the shape of the
    whole weight, which checkpoints can load at any other size of either.

    Attributes:
        mesh: Data-parallel axes, outermost first, then the tensor-parallel axis; None where there
            is none, and only pieces are to be known.
        dim: Dimension the axis cuts; None where every rank holds all of it.
        pieces: Lengths, in this rank's part, of pieces along `dim` that are cut one by one; one
            piece when empty. A gated layer's part holds half a gate and half an up projection:
            `(n / 2, n / 2)`.
    """

    mesh: DeviceMesh | None
    dim: int | None
    pieces: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How many parts there are."""
        return 1 if self.dim is None or self.mesh is None else self.mesh.size(self.mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """Which of them this rank holds."""
        if self.dim is None or self.mesh is None:
            return 0
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    def global_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole, from that of a rank's part."""
        return tuple(n * self.size if d == self.dim else n for d, n in enumerate(part))

    def part_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Shape of a rank's part, from that of the whole."""
        return tuple(n // self.size if d == self.dim else n for d, n in enumerate(whole))

    def lengths(self, part_length: int) -> tuple[int, ...]:
        """Lengths of the pieces of a part that is this long along `dim`."""
        return self.pieces or (part_length,)

    def only(self, piece: int) -> TensorShard:
        """How one of the pieces is cut, as a tensor of its own."""
        return TensorShard(self.mesh, self.dim, (self.pieces[piece],) if self.pieces else ())


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a parameter that lies in one place on this rank and in the whole.

    Attributes:
        offsets: Where it starts in the whole.
        sizes: How long it is.
        local: The same block of the local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class RowShards:
    """Which rows of dimension 0 every rank of a mesh holds.

    Attributes:
        row_ranges: `(first row, one past the last row)` per shard.
        strides: Per mesh axis, how far one step along it moves in `row_ranges`; 0 along an axis
            whose ranks hold equal rows.
        tensor: How the parameter was cut before, if it was; rows are then rows of this rank's
            part of it.
        holders: Shared by all parameters of a group, and kept up to date.
    """

    row_ranges: Sequence[tuple[int, int]]
    strides: tuple[int, ...]
    tensor: TensorShard | None = None
    holders: Holders = field(default_factory=Holders, compare=False, repr=False)

    @override
    def __eq__(self, other: object) -> bool:
        """Whether every rank holds the same; an empty range is like any other."""
        if not isinstance(other, RowShards):
            return NotImplemented
        if (self.strides, self.tensor) != (other.strides, other.tensor):
            return False
        mine, theirs = self.row_ranges, other.row_ranges
        if len(mine) != len(theirs):
            return False
        pairs = zip(mine, theirs, strict=True)
        return mine == theirs or all(a == b or (a[0] >= a[1] and b[0] >= b[1]) for a, b in pairs)

    @override
    def __hash__(self) -> int:
        return hash((self.strides, self.tensor, len(self.row_ranges)))

    def held(self, rows: tuple[int, int]) -> tuple[int, ...]:
        """What a rank with these rows holds: those, and its tensor-parallel rank."""
        return (*rows, 0 if self.tensor is None else self.tensor.rank)

    def packed(self) -> tuple[Any, ...]:
        """All of it but the mesh as plain tuples of integers, for `unpacked`."""
        held = [(i, *rows) for i, rows in enumerate(self.row_ranges) if rows[0] < rows[1]]
        tensor = self.tensor
        cut = None if tensor is None else (tensor.mesh is not None, tensor.dim, tensor.pieces)
        return len(self.row_ranges), tuple(held), self.strides, cut

    @staticmethod
    def unpacked(packed: tuple[Any, ...], mesh: DeviceMesh, stored: tuple[int, ...]) -> RowShards:
        """What `packed()` was made of, as it is in a file.

        Args:
            packed: The tuples.
            mesh: The tensor's.
            stored: What the rank held that saved it, of `held`.
        """
        length, held, strides, cut = packed
        ranges = [(0, 0)] * length
        for index, start, end in held:
            ranges[index] = (start, end)
        tensor = None if cut is None else TensorShard(mesh if cut[0] else None, cut[1], cut[2])
        return RowShards(tuple(ranges), tuple(strides), tensor, Holders(stored=stored))

    def rows_at(self, coordinate: Sequence[int]) -> tuple[int, int]:
        """Row range of the rank at a mesh coordinate."""
        steps = zip(coordinate, self.strides, strict=self.tensor is None)
        return self.row_ranges[sum(c * stride for c, stride in steps)]

    def narrowed(self, start: int, end: int, tensor: TensorShard | None = None) -> RowShards:
        """Row ranges of the tensor made of rows `start` to `end` only, cut before by `tensor`."""
        if isinstance(self.row_ranges, RowRanges):
            return RowShards(self.row_ranges.narrowed(start, end), self.strides, tensor)
        ranges = tuple(
            (min(max(first, start), end) - start, min(max(last, start), end) - start)
            for first, last in self.row_ranges
        )
        return RowShards(ranges, self.strides, tensor)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The DTensor placements that describe this to torch."""
        rows = [Shard(0) if stride else Replicate() for stride in self.strides]
        return (*rows, *self.tensor_placement())

    def tensor_placement(self) -> tuple[Placement, ...]:
        """The placement along the tensor-parallel axis, if there is one."""
        if self.tensor is None or self.tensor.mesh is None:
            return ()
        return (Replicate() if self.tensor.dim is None else Shard(self.tensor.dim),)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole."""
        return not any(self.strides) and (self.tensor is None or self.tensor.dim is None)

    def global_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole, from that of the part data parallelism shards."""
        return tuple(part) if self.tensor is None else self.tensor.global_shape(part)

    def part_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Shape of the part data parallelism shards, from that of the whole."""
        return tuple(whole) if self.tensor is None else self.tensor.part_shape(whole)

    def chunks(
        self, rows: tuple[int, int], part: Sequence[int], tensor_rank: int | None = None
    ) -> Iterator[Chunk]:
        """The blocks of the whole that a rank's rows consist of.

        Args:
            rows: Row range in the part.
            part: Shape of the part.
            tensor_rank: Which part it is; this rank's when None.
        """
        start, end = rows
        if start >= end or 0 in part:
            return
        tensor = self.tensor
        offsets, sizes = [start, *(0 for _ in part[1:])], [end - start, *part[1:]]
        if tensor is None or tensor.dim is None:
            yield Chunk(tuple(offsets), tuple(sizes), tuple(slice(0, n) for n in sizes))
            return
        dim, first = tensor.dim, 0
        rank = tensor.rank if tensor_rank is None else tensor_rank
        low, high = (start, end) if dim == 0 else (0, part[dim])
        for length in tensor.lengths(part[dim]):
            begin, stop = max(first, low), min(first + length, high)
            if begin < stop:
                offsets[dim] = first * tensor.size + rank * length + begin - first
                sizes[dim] = stop - begin
                local = [slice(0, n) for n in sizes]
                local[dim] = slice(begin - low, stop - low)
                yield Chunk(tuple(offsets), tuple(sizes), tuple(local))
            first += length


class _RowShard(Shard):
    """`Shard` that answers with this rank's block where torch asks for its even chunk."""

    block: tuple[int, int] | None = None
    # A copy that torch makes of a placement is plain again.
    knows_block: bool = False

    @staticmethod
    def of(dim: int, block: tuple[int, int] | None) -> _RowShard:
        """Make one; `None` for an axis whose cut another axis tells as well."""
        shard = _RowShard(dim)
        shard.block, shard.knows_block = block, True
        return shard

    @override
    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, Any]:
        """Size and offset on an axis, in what the axes before it leave."""
        if not self.knows_block:
            return super()._local_shard_size_and_offset(curr_local_size, num_chunks, rank)
        if self.block is None:
            return curr_local_size, 0
        start, end = self.block
        return end - start, start


def knows_rows(placements: Sequence[Placement]) -> bool:
    """Whether placements came from `placements_with_rows`, for a tensor that is cut."""
    return any(isinstance(placement, _RowShard) for placement in placements)


def placements_with_rows(
    shards: RowShards, rows: tuple[int, int], part: Sequence[int]
) -> tuple[Placement, ...]:
    """Placements that know which block this rank holds, for when torch asks for a chunk.

    Args:
        shards: Rows of every rank.
        rows: Those of this one.
        part: Shape of the part that rows are cut from.
    """
    tensor = shards.tensor
    last = max((axis for axis, stride in enumerate(shards.strides) if stride), default=-1)
    first_row, by_tensor = 0, shards.tensor_placement()
    if tensor is not None and tensor.mesh is not None and tensor.dim is not None:
        first = tensor.rank * part[tensor.dim]
        tells = tensor.dim != 0 or last < 0
        first_row = 0 if tells else first
        block = (first, first + part[tensor.dim]) if tells else None
        by_tensor = (_RowShard.of(tensor.dim, block),)
    told = (first_row + rows[0], first_row + rows[1])
    by_rows: list[Placement] = [
        _RowShard.of(0, told if axis == last else None) if stride else Replicate()
        for axis, stride in enumerate(shards.strides)
    ]
    return (*by_rows, *by_tensor)
