"""Exchange of matrices with their owners: one uneven all-to-all per axis, bucket and direction.

Along an axis that shards matrices, rows are sent to owners and results back. Along an axis of
replicas, only the owner's replica takes part in this exchange; each of its ranks then sends its
rows of the result to its replicas. Layouts and owners determine all sizes, so ranks exchange only
matrix elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fsdp_v2.comm.interface import (
    Axis,
    Collective,
    CollectiveKind,
    CommStream,
    Communicator,
)
from megatron_fsdp_v2.optim.matrix_layout import Grid, MatrixLayout, Rectangle
from megatron_fsdp_v2.optim.ownership import Ownership

type Key = tuple[int, Rectangle]
"""A rectangle of a matrix, by the matrix's index in the ownership."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One all-to-all along an axis as one rank sees it.

    Attributes:
        axis: The axis of the grid.
        sends: Rectangles to send to each rank along the axis.
        receives: Rectangles to receive from each rank along the axis.
        is_needed: Whether any rank along the axis sends rectangles.
    """

    axis: int
    sends: tuple[tuple[Key, ...], ...]
    receives: tuple[tuple[Key, ...], ...]
    is_needed: bool

    def reversed(self) -> Hop:
        """Return the all-to-all in the other direction."""
        return Hop(self.axis, self.receives, self.sends, self.is_needed)

    @property
    def sent_numel(self) -> int:
        """Number of elements that this rank sends."""
        return sum(sizes(self.sends))


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """A rank's part in one bucket.

    Attributes:
        gathers: All-to-alls that send matrices to their owners.
        copies: All-to-alls that send results to replicas, after the reversed gathers.
        owned: Matrices that this rank computes, with the rectangles they consist of.
        held: Rectangles of this rank's local tensors.
    """

    gathers: tuple[Hop, ...]
    copies: tuple[Hop, ...]
    owned: tuple[tuple[int, tuple[Rectangle, ...]], ...]
    held: tuple[Key, ...]

    @property
    def returns(self) -> tuple[Hop, ...]:
        """All-to-alls that send results back, and to replicas."""
        return (*(hop.reversed() for hop in reversed(self.gathers)), *self.copies)

    @property
    def sent_numel(self) -> int:
        """Number of elements that this rank sends."""
        return sum(hop.sent_numel for hop in (*self.gathers, *self.returns))


def plan_buckets(
    layouts: Sequence[MatrixLayout], ownership: Ownership, grid: Grid, rank: int
) -> list[BucketPlan]:
    """Return a rank's part of every bucket. No communication.

    Args:
        layouts: Layouts of all parameters.
        ownership: Owners and buckets of all matrices.
        grid: Grid of ranks.
        rank: Rank in the grid.
    """
    planner = _Planner(layouts, ownership, grid, grid.coordinate(rank))
    return [planner.bucket(bucket) for bucket in range(ownership.num_buckets)]


@dataclass
class _Planner:
    layouts: Sequence[MatrixLayout]
    ownership: Ownership
    grid: Grid
    here: tuple[int, ...]

    def __post_init__(self) -> None:
        self._owners = [self.grid.coordinate(rank) for rank in self.ownership.owners]

    def bucket(self, bucket: int) -> BucketPlan:
        members = self.ownership.members(bucket)
        sharded, copy = self.grid.sharded_axes, self.grid.copy_axes
        gathers = [self._gather(members, axis, sharded[:i]) for i, axis in enumerate(sharded)]
        copies = [self._copy(members, axis, copy[i + 1 :]) for i, axis in enumerate(copy)]
        owned = [
            (index, tuple(self._held(index, self.here, sharded)))
            for index in members
            if self._owners[index] == self.here
        ]
        held = [(index, rect) for index in members for rect in self._rects(index, self.here)]
        return BucketPlan(tuple(gathers), tuple(copies), tuple(owned), tuple(held))

    def _rects(self, index: int, coordinate: Sequence[int]) -> list[Rectangle]:
        matrix = self.ownership.matrices[index]
        pieces = self.layouts[matrix.param].pieces_at(matrix.number, coordinate)
        return [rect for rect, _ in pieces]

    def _held(
        self, index: int, coordinate: Sequence[int], gathered: Sequence[int]
    ) -> Iterator[Rectangle]:
        """Yield the rectangles that a rank holds after all-to-alls along the gathered axes."""
        for steps in itertools.product(*(range(self.grid.sizes[axis]) for axis in gathered)):
            there = list(coordinate)
            for axis, step in zip(gathered, steps, strict=True):
                there[axis] = step
            yield from self._rects(index, there)

    def _at_owner(self, index: int, axes: Iterable[int]) -> bool:
        return all(self.here[axis] == self._owners[index][axis] for axis in axes)

    def _gather(self, members: Sequence[int], axis: int, before: Sequence[int]) -> Hop:
        """Return the all-to-all that sends matrices to their owners' coordinates along an axis."""
        # A matrix that is whole on one rank is not sent.
        moved = [
            index
            for index in members
            if not self.ownership.matrices[index].ranks_holding_whole
            and self._at_owner(index, (*before, *self.grid.copy_axes))
        ]
        return self._hop(moved, axis, before)

    def _copy(self, members: Sequence[int], axis: int, after: Sequence[int]) -> Hop:
        """Return the all-to-all that sends results to all coordinates along an axis of replicas."""
        moved = [index for index in members if self._at_owner(index, after)]
        # The reverse of a gather from all replicas to the owner's.
        return self._hop(moved, axis, ()).reversed()

    def _hop(self, moved: Sequence[int], axis: int, before: Sequence[int]) -> Hop:
        """Return the all-to-all along an axis that sends all held rectangles to owners."""
        mine, size = self.here[axis], self.grid.sizes[axis]
        sends: list[list[Key]] = [[] for _ in range(size)]
        receives: list[list[Key]] = [[] for _ in range(size)]
        for index in moved:
            owner = self._owners[index][axis]
            if owner != mine:
                sends[owner] += [(index, rect) for rect in self._held(index, self.here, before)]
                continue
            for step in range(size):
                if step != mine:
                    there = [step if a == axis else c for a, c in enumerate(self.here)]
                    rects = self._held(index, there, before)
                    receives[step] += [(index, rect) for rect in rects]
        return Hop(axis, tuple(map(tuple, sends)), tuple(map(tuple, receives)), bool(moved))


def sizes(parts: Sequence[Sequence[Key]]) -> list[int]:
    """Return the number of elements per rank along the axis."""
    return [sum(rect.rows * rect.cols for _, rect in part) for part in parts]


class Transfer:
    """Runs all-to-alls one after the other; the constructor issues the first one.

    Args:
        hops: The all-to-alls; later ones send rectangles that earlier ones received.
        pieces: Rectangles on this rank, of any strides. Received rectangles are added, flat.
        axes: Axes of the grid.
        communicator: Runs the collectives.
        like: A tensor of the dtype and device of all rectangles.
    """

    def __init__(
        self,
        hops: Sequence[Hop],
        pieces: dict[Key, torch.Tensor],
        axes: Sequence[Axis],
        communicator: Communicator,
        like: torch.Tensor,
    ) -> None:
        self._pieces = pieces
        self._left = self._run(hops, axes, communicator, like)
        next(self._left, None)

    def wait(self) -> dict[Key, torch.Tensor]:
        """Run the remaining all-to-alls, and return all rectangles on this rank."""
        for _ in self._left:
            pass
        return self._pieces

    def _run(
        self, hops: Sequence[Hop], axes: Sequence[Axis], communicator: Communicator, like: Any
    ) -> Iterator[None]:
        """Issue the all-to-alls one after the other, and yield while each one is under way."""
        for hop in hops:
            if not hop.is_needed:
                # Yields anyway, so that all ranks issue the next all-to-all in the same order:
                # collectives pair by order.
                yield
                continue
            outgoing = [self._pieces[key].reshape(-1) for part in hop.sends for key in part]
            sent = torch.cat(outgoing) if outgoing else like.new_empty(0)
            into, out = sizes(hop.receives), sizes(hop.sends)
            received = like.new_empty(sum(into))
            collective = Collective(
                CollectiveKind.ALL_TO_ALL,
                received,
                sent,
                axes[hop.axis],
                CommStream.REDUCE,
                output_numels=into,
                input_numels=out,
                name="the optimizer's matrices",
            )
            work = communicator.issue(collective, async_op=True)
            yield
            work.wait()
            keys = [key for part in hop.receives for key in part]
            flat = torch.split(received, [rect.rows * rect.cols for _, rect in keys])
            self._pieces.update(zip(keys, flat, strict=True))
