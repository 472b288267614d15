"""Row ranges and blocks of a parameter on every rank, under data and tensor parallelism.

Integers only. Every rank knows the row ranges of all ranks without communication.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, override

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

type CollectGradient = Callable[[torch.Tensor, tuple[int, int] | None], None]
"""Collects the gradient of a use of a parameter, to be reduced with its group. Takes the gradient
of the whole parameter and None; or of rows of its tensor-parallel part, and their range."""


@dataclass
class GroupInfo:
    """Information that the tensors of one parameter group share. The group updates it.

    Attributes:
        name: Name of the group, such as `decoder.layers.3/0`; changes when it joins a root.
        owner: Returns the group, or None once it is deleted.
        before_grad_accumulation: Called before autograd accumulates a gradient into a sharded
            parameter from which a loss was computed directly.
        begin_direct_use: Called when autograd records an operation on a parameter of the group
            itself; returns None for another tensor.
        is_drawn: Whether random numbers were written into its tensors, and ranks have not compared
            them since.
    """

    name: str = ""
    owner: Callable[[], object | None] = lambda: None
    before_grad_accumulation: Callable[[], None] = lambda: None
    begin_direct_use: Callable[[torch.Tensor], CollectGradient | None] = lambda param: None
    is_drawn: bool = False


@dataclass(frozen=True, slots=True)
class TensorShard:
    """How tensor parallelism shards a parameter before data parallelism does.

    Tensor parallelism gives every rank a part of a weight (its TP-local shard); data parallelism
    shards that part by rows. With this description, `fully_shard` makes parameters DTensors over
    both meshes, with the shape of the whole weight, so that checkpoints load at any size of both.

    Attributes:
        mesh: Data-parallel axes, outermost first, then the tensor-parallel axis. None without
            tensor parallelism, if only `pieces` is needed.
        dim: Dimension that the tensor-parallel axis shards; None if every rank holds all of it.
        pieces: Lengths, in this rank's part, of the fused sub-tensors along `dim`, which are
            sharded one by one; empty for one sub-tensor. A gated layer's part holds half a gate and
            half an up projection: `(n / 2, n / 2)`.
        sums_gradients: Whether the gradient is summed over the tensor-parallel axis, since every
            rank computed with all of the parameter on its part of a sequence.
    """

    mesh: DeviceMesh | None
    dim: int | None
    pieces: tuple[int, ...] = ()
    sums_gradients: bool = False

    @property
    def size(self) -> int:
        """Number of tensor-parallel parts."""
        return 1 if self.dim is None or self.mesh is None else self.mesh.size(self.mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """Index of this rank's tensor-parallel part."""
        if self.dim is None or self.mesh is None:
            return 0
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    def global_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole for the shape of a rank's part."""
        return tuple(n * self.size if d == self.dim else n for d, n in enumerate(part))

    def part_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a rank's part for the shape of the whole."""
        return tuple(n // self.size if d == self.dim else n for d, n in enumerate(whole))

    def lengths(self, part_length: int) -> tuple[int, ...]:
        """Return the lengths of the sub-tensors in a part of this length along `dim`."""
        return self.pieces or (part_length,)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a parameter that is a slice of both the whole and this rank's local tensor.

    Attributes:
        offsets: Start of the block in the whole, per dimension.
        sizes: Length of the block, per dimension.
        local: Slices of the local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[slice, ...]

    @property
    def block(self) -> tuple[slice, ...]:
        """Slices of the whole."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class RowShards:
    """Row ranges of dimension 0 that the ranks of a mesh hold.

    Attributes:
        row_ranges: `(first row, one past the last)` per shard.
        strides: Per mesh axis, distance in `row_ranges` between neighboring ranks; 0 along an axis
            whose ranks hold equal rows.
        tensor: Tensor-parallel split of the parameter, if there is one. Rows are then rows of this
            rank's tensor-parallel part.
        saved: Result of `held` on the rank that saved the tensor with `torch.save`; None for a
            tensor of this job.
        info: Shared by all parameters of a group.
        name: Name of the parameter in its group, for errors.
    """

    row_ranges: Sequence[tuple[int, int]]
    strides: tuple[int, ...]
    tensor: TensorShard | None = None
    saved: tuple[int, ...] | None = field(default=None, compare=False)
    info: GroupInfo = field(default_factory=GroupInfo, compare=False, repr=False)
    name: str = field(default="", compare=False)

    @override
    def __eq__(self, other: object) -> bool:
        """Return whether every rank holds the same rows; all empty ranges are equal."""
        if not isinstance(other, RowShards):
            return NotImplemented
        mine, theirs = self.row_ranges, other.row_ranges
        if (self.strides, self.tensor, len(mine)) != (other.strides, other.tensor, len(theirs)):
            return False
        pairs = zip(mine, theirs, strict=True)
        return mine == theirs or all(a == b or (a[0] >= a[1] and b[0] >= b[1]) for a, b in pairs)

    @override
    def __hash__(self) -> int:
        return hash((self.strides, self.tensor, len(self.row_ranges)))

    @override
    def __reduce__(self) -> Any:
        """Pickle the integers without the group."""
        return RowShards, (tuple(self.row_ranges), self.strides, self.tensor, self.saved)

    @property
    def label(self) -> str | None:
        """Name of the parameter for errors; None for a tensor without a group."""
        return f"{self.name} of {self.info.name}" if self.name else None

    def held(self, rows: tuple[int, int]) -> tuple[int, ...]:
        """Return these rows followed by this rank's tensor-parallel rank."""
        return (*rows, 0 if self.tensor is None else self.tensor.rank)

    def rows_at(self, coordinate: Sequence[int]) -> tuple[int, int]:
        """Return the row range of the rank at a mesh coordinate."""
        steps = zip(coordinate, self.strides, strict=self.tensor is None)
        return self.row_ranges[sum(c * stride for c, stride in steps)]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The DTensor placements, per mesh axis."""
        dims = [0 if stride else None for stride in self.strides]
        if self.tensor is not None and self.tensor.mesh is not None:
            dims.append(self.tensor.dim)
        return tuple(Replicate() if dim is None else Shard(dim) for dim in dims)

    def is_held_once(self, mesh: DeviceMesh) -> bool:
        """Return whether each row is on one data-parallel rank of the mesh only."""
        return all(mesh.size(axis) == 1 for axis, stride in enumerate(self.strides) if not stride)

    @property
    def is_even(self) -> bool:
        """Whether torch's `Shard(0)` along one axis describes the row ranges."""
        num, length = len(self.row_ranges), max(end for _, end in self.row_ranges)
        chunk = -(-length // num)
        starts = [min(i * chunk, length) for i in range(num + 1)]
        even = replace(self, row_ranges=list(itertools.pairwise(starts)))
        is_sharded_once = sum(map(bool, self.strides)) == 1
        return is_sharded_once and self == even and (self.tensor is None or self.tensor.size == 1)

    def global_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole for the shape of this rank's tensor-parallel part."""
        return tuple(part) if self.tensor is None else self.tensor.global_shape(part)

    def chunks(
        self, rows: tuple[int, int], part: Sequence[int], tensor_rank: int | None = None
    ) -> Iterator[Chunk]:
        """Yield the blocks of the unsharded tensor that make up a rank's rows.

        Args:
            rows: Row range in the part.
            part: Shape of the part.
            tensor_rank: Index of the tensor-parallel part; this rank's when None.
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
        rank = tensor.rank if tensor_rank is None or tensor.size == 1 else tensor_rank
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


# Allows torch.load(weights_only=True) of sharded tensors.
torch.serialization.add_safe_globals([RowShards, TensorShard])
