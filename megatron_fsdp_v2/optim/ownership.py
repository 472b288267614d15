"""Assignment of matrices to owner ranks, from shapes and layouts alone, equal on every rank.

A matrix function such as Newton-Schulz needs the whole matrix on one rank. Computing it on every
rank would repeat the same work, so each matrix has one owner. If all ranks may own all matrices,
longest processing time first keeps the work of the busiest rank within 4/3 of the optimum. A matrix
that is whole on one rank stays there. With fewer matrices than ranks, some ranks own none:
splitting one Newton-Schulz needs an all-reduce of its Gram matrix in every iteration, which takes
longer than the iteration for small matrices, and models with large matrices have many of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_fsdp_v2.optim.matrix_layout import MatrixLayout


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix.

    Attributes:
        param: Index of its parameter among the parameters of the grid.
        number: Index of the matrix in its stack.
        shape: Rows and columns.
        flops: Cost of its function.
        kind: Index of its function. Matrices of equal shape and kind form a batch.
        ranks_holding_whole: Ranks that hold the whole matrix.
    """

    param: int
    number: int
    shape: tuple[int, int]
    flops: int
    kind: int = 0
    ranks_holding_whole: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]

    @staticmethod
    def of(param: int, layout: MatrixLayout, flops: int, kind: int = 0) -> list[Matrix]:
        """Return the matrices of a parameter; empty if it has no elements.

        Args:
            param: Index of the parameter.
            layout: Layout of the parameter.
            flops: Cost of one matrix.
            kind: See `Matrix`.
        """
        shape = layout.matrix_shape
        if 0 in shape:
            return []
        return [
            Matrix(param, number, shape, flops, kind, tuple(layout.ranks_holding_whole(number)))
            for number in range(layout.count)
        ]


@dataclass(frozen=True, slots=True)
class Ownership:
    """Owner and bucket of every matrix.

    Attributes:
        matrices: All matrices.
        owners: Owner rank in the grid, per matrix.
        buckets: Bucket per matrix; buckets are exchanged in ascending order.
        flops: Total work per rank.
    """

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    buckets: tuple[int, ...]
    flops: tuple[int, ...]

    @classmethod
    def plan(cls, matrices: Iterable[Matrix], num_ranks: int, bucket_numel: int) -> Ownership:
        """Assign owners by longest processing time first, and fill buckets.

        Args:
            matrices: All matrices.
            num_ranks: Number of ranks of the grid.
            bucket_numel: Elements after which an owner begins its next bucket.
        """
        found = tuple(matrices)
        owners, flops = _assign(found, num_ranks)
        return cls(found, owners, _fill(found, owners, num_ranks, bucket_numel), flops)

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return max(self.buckets, default=-1) + 1

    def members(self, bucket: int) -> list[int]:
        """Return the indices of the matrices of a bucket."""
        return [index for index, b in enumerate(self.buckets) if b == bucket]


def _assign(matrices: Sequence[Matrix], num_ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    flops, numels = [0] * num_ranks, [0] * num_ranks
    owners = [-1] * len(matrices)
    free: list[tuple[int, int, int]] = []

    def assign(index: int, rank: int) -> None:
        owners[index] = rank
        flops[rank] += matrices[index].flops
        numels[rank] += matrices[index].numel
        heapq.heappush(free, (flops[rank], numels[rank], rank))

    # Matrices that are whole on one rank come first; the others are balanced around them.
    placed = [i for i, m in enumerate(matrices) if len(m.ranks_holding_whole) == 1]
    for index in placed:
        assign(index, matrices[index].ranks_holding_whole[0])
    free = [(flops[rank], numels[rank], rank) for rank in range(num_ranks)]
    heapq.heapify(free)
    rest = [i for i, m in enumerate(matrices) if len(m.ranks_holding_whole) != 1]
    for index in sorted(rest, key=lambda i: (-matrices[i].flops, i)):
        holders = matrices[index].ranks_holding_whole
        if holders and len(holders) < num_ranks:
            assign(index, min(holders, key=lambda rank: (flops[rank], numels[rank], rank)))
            continue
        # An entry of the heap is stale if its rank was assigned a matrix since.
        while free[0][:2] != (flops[free[0][2]], numels[free[0][2]]):
            heapq.heappop(free)
        assign(index, heapq.heappop(free)[2])
    return tuple(owners), tuple(flops)


def _fill(
    matrices: Sequence[Matrix], owners: Sequence[int], num_ranks: int, bucket_numel: int
) -> tuple[int, ...]:
    buckets = [0] * len(matrices)
    filled = [0] * num_ranks
    # Neighbors of one shape share a bucket, and so a batch.
    order = sorted(
        range(len(matrices)), key=lambda i: (matrices[i].kind, *matrices[i].shape, i), reverse=True
    )
    for index in order:
        owner = owners[index]
        buckets[index] = filled[owner] // bucket_numel
        filled[owner] += matrices[index].numel
    # Renumbers, since a matrix larger than a bucket leaves empty buckets.
    used = {bucket: number for number, bucket in enumerate(sorted(set(buckets)))}
    return tuple(used[bucket] for bucket in buckets)
