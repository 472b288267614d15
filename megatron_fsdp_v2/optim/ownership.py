"""Which rank works on which matrix: decided from shapes and layouts alone, equally on every rank.

A matrix function such as Newton-Schulz needs the whole matrix in one place. Repeating it on every
rank wastes all but one; here each matrix has one owner. Longest processing time first keeps the
busiest rank within a third of a matrix's work of the best there is. A matrix that is whole on one
rank stays there. Where there are fewer matrices than ranks, some ranks own none: cutting one
Newton-Schulz in two costs an all-reduce of its Gram matrix in every one of its steps, which
takes longer than the step wherever the matrix is small, and with large ones there are many.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_fsdp_v2.optim.matrix_layout import MatrixLayout

__all__ = ["Matrix", "Ownership"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix to work on.

    Attributes:
        param: Index of its parameter among those of the grid.
        number: Which of a stack it is.
        shape: Rows and columns.
        flops: What the work costs.
        kind: Matrices of equal shape and kind are worked on in one batch.
        whole_at: Ranks that hold all of it.
    """

    param: int
    number: int
    shape: tuple[int, int]
    flops: int
    kind: int = 0
    whole_at: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Elements."""
        return self.shape[0] * self.shape[1]

    @staticmethod
    def of(param: int, layout: MatrixLayout, flops: int, kind: int = 0) -> list[Matrix]:
        """The matrices of a parameter; none if it has no element.

        Args:
            param: Its index.
            layout: Where it is.
            flops: Cost of one of its matrices.
            kind: See `Matrix`.
        """
        shape = layout.matrix_shape
        if 0 in shape:
            return []
        return [
            Matrix(param, number, shape, flops, kind, tuple(layout.whole_at(number)))
            for number in range(layout.count)
        ]


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who works on what, and when.

    Attributes:
        matrices: What there is to do.
        owners: Per matrix, the rank of the grid that does it.
        buckets: Per matrix, when it is exchanged: all of bucket 0 first.
        flops: Per rank, work in all.
    """

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    buckets: tuple[int, ...]
    flops: tuple[int, ...]

    @classmethod
    def plan(cls, matrices: Iterable[Matrix], num_ranks: int, bucket_numel: int) -> Ownership:
        """Assign owners by longest processing time first, and fill buckets.

        Args:
            matrices: What there is to do.
            num_ranks: Ranks of the grid.
            bucket_numel: Elements after which an owner's next matrix goes into its next bucket.
        """
        found = tuple(matrices)
        owners, flops = _assign(found, num_ranks)
        return cls(found, owners, _fill(found, owners, num_ranks, bucket_numel), flops)

    @property
    def num_buckets(self) -> int:
        """Buckets in all."""
        return max(self.buckets, default=-1) + 1

    @property
    def balance(self) -> float:
        """Work of the busiest rank over what it would be if all did the same."""
        total = sum(self.flops)
        return max(self.flops) * len(self.flops) / total if total else 1.0

    def members(self, bucket: int) -> list[int]:
        """Indices of the matrices of a bucket."""
        return [index for index, b in enumerate(self.buckets) if b == bucket]


def _assign(matrices: Sequence[Matrix], num_ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    flops, numels = [0] * num_ranks, [0] * num_ranks
    owners = [-1] * len(matrices)
    free: list[tuple[int, int, int]] = []

    def give(index: int, rank: int) -> None:
        owners[index] = rank
        flops[rank] += matrices[index].flops
        numels[rank] += matrices[index].numel
        heapq.heappush(free, (flops[rank], numels[rank], rank))

    # What cannot be elsewhere comes first, so that the rest is spread around it.
    placed = [i for i, m in enumerate(matrices) if len(m.whole_at) == 1]
    for index in placed:
        give(index, matrices[index].whole_at[0])
    free = [(flops[rank], numels[rank], rank) for rank in range(num_ranks)]
    heapq.heapify(free)
    rest = [i for i, m in enumerate(matrices) if len(m.whole_at) != 1]
    for index in sorted(rest, key=lambda i: (-matrices[i].flops, i)):
        holders = matrices[index].whole_at
        if holders and len(holders) < num_ranks:
            give(index, min(holders, key=lambda rank: (flops[rank], numels[rank], rank)))
            continue
        # An entry is out of date if its rank was given something since.
        while free[0][:2] != (flops[free[0][2]], numels[free[0][2]]):
            heapq.heappop(free)
        give(index, heapq.heappop(free)[2])
    return tuple(owners), tuple(flops)


def _fill(
    matrices: Sequence[Matrix], owners: Sequence[int], num_ranks: int, bucket_numel: int
) -> tuple[int, ...]:
    buckets = [0] * len(matrices)
    filled = [0] * num_ranks
    # Neighbors of one shape end up in one bucket, and in one batch.
    order = sorted(
        range(len(matrices)), key=lambda i: (matrices[i].kind, *matrices[i].shape, i), reverse=True
    )
    for index in order:
        owner = owners[index]
        buckets[index] = filled[owner] // bucket_numel
        filled[owner] += matrices[index].numel
    # A matrix larger than a bucket must not leave empty ones behind it.
    used = {bucket: number for number, bucket in enumerate(sorted(set(buckets)))}
    return tuple(used[bucket] for bucket in buckets)
