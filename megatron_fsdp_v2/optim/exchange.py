"""How matrices get to their owners and results back: one uneven all-to-all per axis and bucket.

An axis that cuts matrices is crossed twice, once each way. Along an axis of replicas only the
owner's replica takes part in that, and every rank of it then sends its rows to its copies.
Everything follows from layouts and owners; ranks tell one another nothing but matrix elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp_v2.comm.interface import (
    Axis,
    Collective,
    CollectiveKind,
    CommStream,
    Communicator,
    Work,
)
from megatron_fsdp_v2.optim.matrix_layout import Grid, MatrixLayout, Rect
from megatron_fsdp_v2.optim.ownership import Matrix, Ownership

__all__ = ["BucketPlan", "Hop", "Key", "Transfer", "plan_buckets"]

type Key = tuple[int, Rect]
"""A rectangle of a matrix, by the matrix's index in the ownership."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One all-to-all along an axis as one rank sees it.

    Attributes:
        axis: The axis of the grid.
        sends: Per rank along the axis, what goes there.
        receives: Per rank along the axis, what comes from there.
        is_needed: Whether any rank along the axis sends something.
    """

    axis: int
    sends: tuple[tuple[Key, ...], ...]
    receives: tuple[tuple[Key, ...], ...]
    is_needed: bool

    def reversed(self) -> Hop:
        """The way back."""
        return Hop(self.axis, self.receives, self.sends, self.is_needed)

    @property
    def sent_numel(self) -> int:
        """Elements that leave this rank."""
        return sum(sizes(self.sends))


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """A rank's part in one bucket.

    Attributes:
        gathers: All-to-alls that bring matrices to their owners.
        copies: All-to-alls that bring results to replicas, after the gathers ran backwards.
        owned: Matrices this rank works on, with the rectangles they arrive in.
        held: Rectangles that are here before and afterwards.
    """

    gathers: tuple[Hop, ...]
    copies: tuple[Hop, ...]
    owned: tuple[tuple[int, tuple[Rect, ...]], ...]
    held: tuple[Key, ...]

    @property
    def returns(self) -> tuple[Hop, ...]:
        """All-to-alls that bring results to where matrices came from, and to replicas."""
        return (*(hop.reversed() for hop in reversed(self.gathers)), *self.copies)

    @property
    def sent_numel(self) -> int:
        """Elements that leave this rank."""
        return sum(hop.sent_numel for hop in (*self.gathers, *self.returns))


def plan_buckets(
    layouts: Sequence[MatrixLayout], ownership: Ownership, grid: Grid, rank: int
) -> list[BucketPlan]:
    """A rank's part in every bucket. No communication.

    Args:
        layouts: Of all parameters.
        ownership: Who works on what.
        grid: The ranks.
        rank: One of them.
    """
    planner = _Planner(layouts, ownership, grid, grid.coordinate(rank))
    return [planner.bucket(bucket) for bucket in range(ownership.num_buckets)]


class _Planner:
    def __init__(
        self,
        layouts: Sequence[MatrixLayout],
        ownership: Ownership,
        grid: Grid,
        coordinate: tuple[int, ...],
    ) -> None:
        self._layouts = layouts
        self._ownership = ownership
        self._grid = grid
        self._here = coordinate
        self._owners = [grid.coordinate(rank) for rank in ownership.owners]

    def bucket(self, bucket: int) -> BucketPlan:
        members = self._ownership.members(bucket)
        cut, copy = self._grid.cut_axes, self._grid.copy_axes
        gathers = [self._gather(members, axis, cut[:i]) for i, axis in enumerate(cut)]
        copies = [self._copy(members, axis, copy[i + 1 :]) for i, axis in enumerate(copy)]
        owned = [
            (index, tuple(self._held(index, self._here, cut)))
            for index in members
            if self._owners[index] == self._here
        ]
        held = [(index, rect) for index in members for rect in self._rects(index, self._here)]
        return BucketPlan(tuple(gathers), tuple(copies), tuple(owned), tuple(held))

    def _matrix(self, index: int) -> Matrix:
        return self._ownership.matrices[index]

    def _rects(self, index: int, coordinate: Sequence[int]) -> list[Rect]:
        matrix = self._matrix(index)
        return self._layouts[matrix.param].rects_at(matrix.number, coordinate)

    def _held(
        self, index: int, coordinate: Sequence[int], gathered: Sequence[int]
    ) -> Iterator[Rect]:
        """What a rank holds once it was sent all that others hold along the gathered axes."""
        for steps in itertools.product(*(range(self._grid.sizes[axis]) for axis in gathered)):
            there = list(coordinate)
            for axis, step in zip(gathered, steps, strict=True):
                there[axis] = step
            yield from self._rects(index, there)

    def _at_owner(self, index: int, axes: Iterable[int]) -> bool:
        return all(self._here[axis] == self._owners[index][axis] for axis in axes)

    def _gather(self, members: Sequence[int], axis: int, before: Sequence[int]) -> Hop:
        """The all-to-all after which owners' coordinates along an axis hold all along it."""
        mine, size = self._here[axis], self._grid.sizes[axis]
        sends: list[list[Key]] = [[] for _ in range(size)]
        receives: list[list[Key]] = [[] for _ in range(size)]
        is_needed = False
        for index in members:
            # What is whole somewhere stays there, so it moves along no axis.
            is_whole = bool(self._matrix(index).whole_at)
            if is_whole or not self._at_owner(index, (*before, *self._grid.copy_axes)):
                continue
            is_needed = True
            owner = self._owners[index][axis]
            if owner != mine:
                sends[owner] += [(index, rect) for rect in self._held(index, self._here, before)]
                continue
            for step in range(size):
                if step != mine:
                    there = [step if a == axis else c for a, c in enumerate(self._here)]
                    rects = self._held(index, there, before)
                    receives[step] += [(index, rect) for rect in rects]
        return Hop(axis, _frozen(sends), _frozen(receives), is_needed)

    def _copy(self, members: Sequence[int], axis: int, after: Sequence[int]) -> Hop:
        """The all-to-all after which results are at all coordinates along an axis of replicas."""
        mine, size = self._here[axis], self._grid.sizes[axis]
        sends: list[list[Key]] = [[] for _ in range(size)]
        receives: list[list[Key]] = [[] for _ in range(size)]
        is_needed = False
        for index in members:
            if not self._at_owner(index, after):
                continue
            is_needed = True
            owner = self._owners[index][axis]
            keys = [(index, rect) for rect in self._rects(index, self._here)]
            if owner != mine:
                receives[owner] += keys
                continue
            for step in range(size):
                if step != mine:
                    sends[step] += keys
        return Hop(axis, _frozen(sends), _frozen(receives), is_needed)


def _frozen(lists: Sequence[Sequence[Key]]) -> tuple[tuple[Key, ...], ...]:
    return tuple(tuple(keys) for keys in lists)


def sizes(parts: Sequence[Sequence[Key]]) -> list[int]:
    """Elements per rank along the axis."""
    return [sum(rect.rows * rect.cols for _, rect in part) for part in parts]


class Transfer:
    """All-to-alls one after the other, the first under way already.

    Args:
        hops: What is sent; rectangles that arrive are sent on by later ones.
        pieces: Rectangles that are here, of any strides; those that arrive are added, flat.
        axes: Axes of the grid.
        communicator: Runs the collectives.
        like: Of the dtype and device of all pieces.
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
        self._axes = axes
        self._communicator = communicator
        self._like = like
        self._left = list(hops)
        self._arriving: tuple[Hop, torch.Tensor, Work] | None = None
        if self._left:
            self._start_next()

    def wait(self) -> dict[Key, torch.Tensor]:
        """Have everything arrive; the rectangles that are here then."""
        self._finish_arriving()
        while self._left:
            self._start_next()
            self._finish_arriving()
        return self._pieces

    def _finish_arriving(self) -> None:
        if self._arriving is None:
            return
        hop, received, work = self._arriving
        self._arriving = None
        work.wait()
        keys = [key for part in hop.receives for key in part]
        flat = torch.split(received, [rect.rows * rect.cols for _, rect in keys])
        self._pieces.update(zip(keys, flat, strict=True))

    def _start_next(self) -> None:
        hop = self._left.pop(0)
        if not hop.is_needed:
            # The next one must not come earlier for that: other ranks along its axis may have
            # this one, and ranks pair all-to-alls by their order.
            return
        outgoing = [self._pieces[key].reshape(-1) for part in hop.sends for key in part]
        sent = torch.cat(outgoing) if outgoing else self._like.new_empty(0)
        into, out = sizes(hop.receives), sizes(hop.sends)
        received = self._like.new_empty(sum(into))
        collective = Collective(
            CollectiveKind.ALL_TO_ALL,
            received,
            sent,
            self._axes[hop.axis],
            CommStream.REDUCE,
            output_numels=into,
            input_numels=out,
        )
        self._arriving = (hop, received, self._communicator.issue(collective, async_op=True))
