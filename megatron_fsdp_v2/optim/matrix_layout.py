"""Layouts of a parameter's matrices over a grid of ranks. Integers only."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_fsdp_v2.dtensor.row_shards import Chunk, RowShards, TensorShard
from megatron_fsdp_v2.layout.buffer_layout import RowRanges


class Rectangle(NamedTuple):
    """A rectangle of a matrix."""

    row: int
    col: int
    rows: int
    cols: int


def _unravel(number: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element of an array, by its number in row-major order."""
    index: tuple[int, ...] = ()
    for size in reversed(sizes):
        number, step = divmod(number, size)
        index = step, *index
    return index


@dataclass(frozen=True, slots=True)
class Grid:
    """Grid of ranks that share the work on some matrices.

    Attributes:
        sizes: Number of ranks per axis; each greater than 1.
        is_sharded: Whether an axis shards the matrices. Along other axes, ranks hold equal copies.
    """

    sizes: tuple[int, ...]
    is_sharded: tuple[bool, ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the grid."""
        return math.prod(self.sizes)

    @property
    def sharded_axes(self) -> tuple[int, ...]:
        """Axes along which the engine gathers matrices, in order."""
        return tuple(axis for axis, sharded in enumerate(self.is_sharded) if sharded)

    @property
    def copy_axes(self) -> tuple[int, ...]:
        """Axes along which the engine copies results, in order."""
        return tuple(axis for axis, sharded in enumerate(self.is_sharded) if not sharded)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the coordinate of a rank; the last axis varies fastest."""
        return _unravel(rank, self.sizes)

    def rank(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a coordinate."""
        rank = 0
        for step, size in zip(coordinate, self.sizes, strict=True):
            rank = rank * size + step
        return rank


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Layout on a grid of a parameter's matrix, or of all matrices of its stack.

    Attributes:
        grid: Grid of ranks.
        row_shards: Row ranges of every rank along the axes that shard rows.
        part_shape: Shape of a rank's tensor-parallel part, in which rows are counted.
        strides: Distance in the row ranges between neighboring ranks, per axis of the grid; 0 along
            axes that do not shard rows.
        tensor_axis: Axis of the grid that splits the whole into tensor-parallel parts; None if
            there is none.
        block_rows: Rows of each block of an `(m, n)` parameter, which are its matrices; None if the
            parameter is one matrix.
    """

    grid: Grid
    row_shards: RowShards
    part_shape: tuple[int, ...]
    strides: tuple[int, ...]
    tensor_axis: int | None = None
    block_rows: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter: `(m, n)`, or `(..., m, n)` for a stack."""
        if self.tensor is None:
            return self.part_shape
        return self.tensor.global_shape(self.part_shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of one matrix."""
        rows, cols = self.shape[-2:]
        return self.block_rows or rows, cols

    @property
    def count(self) -> int:
        """Number of matrices of the parameter."""
        if len(self.shape) > 2:
            return math.prod(self.shape[:-2])
        return self.shape[0] // self.block_rows if self.block_rows else 1

    @property
    def tensor(self) -> TensorShard | None:
        """Tensor-parallel split of the whole; None if parts are not joined."""
        return None if self.tensor_axis is None else self.row_shards.tensor

    def pieces_at(
        self, number: int, coordinate: Sequence[int]
    ) -> Iterator[tuple[Rectangle, tuple[Any, ...]]]:
        """Yield the rectangles of a matrix on a rank, each with its index in its local tensor.

        Args:
            number: Index of the matrix in its stack, or of the block.
            coordinate: Coordinate of a rank in the grid.

        Yields:
            A rectangle and an index of the local tensor.
        """
        start, end = self._rows_of(number)
        within = self._index_of(number)
        for chunk in self._chunks(coordinate):
            if len(chunk.sizes) == 2:
                (row, col), (rows, cols) = chunk.offsets, chunk.sizes
                first, last = max(row, start), min(row + rows, end)
                if first < last:
                    local = chunk.local[0].start + first - row
                    index = slice(local, local + last - first), *chunk.local[1:]
                    yield Rectangle(first - start, col, last - first, cols), index
                continue
            steps = [n - o for n, o in zip(within, chunk.offsets, strict=False)]
            if all(0 <= step < size for step, size in zip(steps, chunk.sizes, strict=False)):
                local_index = [s.start + n for s, n in zip(chunk.local, steps, strict=False)]
                rect = Rectangle(*chunk.offsets[-2:], *chunk.sizes[-2:])
                yield rect, (*local_index, *chunk.local[-2:])

    def ranks_holding_whole(self, number: int) -> list[int]:
        """Return the ranks that hold a whole matrix; empty if it is sharded."""
        (first, last), part = self._rows_of(number), None
        if self.tensor is not None:
            if len(self.shape) == 2 or self.tensor.dim != 0:
                return []
            part, first = self._part_of(self._index_of(number)[0], self.tensor)
            last = first + 1
        elif len(self.shape) > 2:
            first = self._index_of(number)[0]
            last = first + 1
        ranges = self.row_shards.row_ranges
        index = bisect.bisect_right(range(len(ranges)), first, key=lambda i: ranges[i][1])
        if index == len(ranges) or ranges[index][1] < last:
            return []
        steps: list[Sequence[int]] = [
            [index // stride % size] if stride else range(size)
            for size, stride in zip(self.grid.sizes, self.strides, strict=True)
        ]
        if part is not None and self.tensor_axis is not None:
            steps[self.tensor_axis] = [part]
        return [self.grid.rank(coordinate) for coordinate in itertools.product(*steps)]

    @property
    def fingerprint(self) -> str:
        """A short hash of the layout, by which ranks compare layouts."""
        ranges = self.row_shards.row_ranges
        rows: Any = tuple(ranges)
        if isinstance(ranges, RowRanges):
            rows = (ranges.layout.fingerprint, ranges.param)
        split = None if self.tensor is None else (self.tensor.dim, self.tensor.pieces)
        own = self.part_shape, self.block_rows, self.strides, self.tensor_axis
        text = repr((self.grid, own, split, rows))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _rows_of(self, number: int) -> tuple[int, int]:
        """Return the rows of an `(m, n)` parameter that are a matrix."""
        first = number * (self.block_rows or 0)
        return first, first + self.matrix_shape[0]

    def _index_of(self, number: int) -> tuple[int, ...]:
        """Return the index of a matrix in the leading dimensions of its stack."""
        return _unravel(number, self.shape[:-2])

    def _part_of(self, row: int, tensor: TensorShard) -> tuple[int, int]:
        """Return the tensor-parallel part that contains a row of a stack, and its index there."""
        first = 0
        for length in tensor.lengths(self.part_shape[0]):
            within = row - first * tensor.size
            if within < length * tensor.size:
                part, index = divmod(within, length)
                return part, first + index
            first += length
        raise AssertionError(f"row {row} of a stack of shape {self.shape}")

    def _chunks(self, coordinate: Sequence[int]) -> Iterator[Chunk]:
        index = sum(c * s for c, s in zip(coordinate, self.strides, strict=True))
        rows = self.row_shards.row_ranges[index]
        shards = self.row_shards
        if self.tensor_axis is None:
            shards = RowShards(shards.row_ranges, shards.strides)
        rank = None if self.tensor_axis is None else coordinate[self.tensor_axis]
        return shards.chunks(rows, self.part_shape, tensor_rank=rank)
