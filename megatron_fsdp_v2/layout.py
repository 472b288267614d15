"""Pure layout of a flat buffer: which elements of which parameter live on which shard.

A group of parameters is laid out one after the other in one flat buffer that is cut into
`num_shards` equal slices. Each parameter is contiguous, so that after an all-gather it is a
view of the gathered buffer, and a slice boundary inside a parameter always falls between two of
its cells (rows, blocks of rows, or the whole tensor), so that each shard is a `Shard(0)` slice
of it. Gaps between parameters pay for both. All numbers are elements, never bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["BufferLayout", "Granularity", "ParamSlot"]


@dataclass(frozen=True, slots=True)
class Granularity:
    """What a shard boundary must not cut: a row, a block of rows, or a tensor.

    Attributes:
        rows: Rows in a cell; 0 stands for the whole tensor.
    """

    rows: int

    @classmethod
    def parse(cls, text: str) -> Granularity:
        """Read `row`, `block:<rows>` or `tensor`.

        Raises:
            ValueError: `text` is none of these.
        """
        if text == "row":
            return cls(1)
        if text == "tensor":
            return cls(0)
        kind, _, count = text.partition(":")
        if kind == "block" and count.isdecimal() and int(count) > 0:
            return cls(int(count))
        raise ValueError(
            f"unknown shard_granularity {text!r}; choose 'row', 'block:<rows>' with at least one "
            "row, or 'tensor'"
        )

    def cell_numel(self, shape: Sequence[int]) -> int:
        """Elements of one uncuttable cell of a parameter of this shape (at least 1)."""
        row = math.prod(shape[1:])
        cell = math.prod(shape) if self.rows == 0 else min(self.rows, shape[0]) * row
        return max(cell, 1)


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """One parameter's place in the flat buffer.

    Attributes:
        shape: Global shape.
        offset: First element in the flat buffer.
        cell_numel: Elements that must stay on one shard.
    """

    shape: tuple[int, ...]
    offset: int
    cell_numel: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Elements of one row (index of dimension 0), at least 1."""
        return max(math.prod(self.shape[1:]), 1)

    @property
    def end(self) -> int:
        """One past the last element in the flat buffer."""
        return self.offset + self.numel


@dataclass(frozen=True)
class BufferLayout:
    """A validated layout of parameters in a flat buffer of `num_shards` equal slices.

    Attributes:
        slots: One per parameter, in the order the parameters were given (offsets need not rise).
        num_shards: Number of slices.
        shard_numel: Elements of a slice.
    """

    slots: tuple[ParamSlot, ...]
    num_shards: int
    shard_numel: int

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ValueError(f"num_shards must be at least 1, got {self.num_shards}")
        end = 0
        for slot in sorted(self.slots, key=lambda s: (s.offset, s.numel)):
            if slot.offset < end:
                raise ValueError(f"slot {slot} overlaps its predecessor, which ends at {end}")
            end = slot.end
            if not _cuts_fit(slot.offset, slot.numel, slot.cell_numel, self.shard_numel):
                raise ValueError(f"a boundary of {self.shard_numel} elements cuts a cell of {slot}")
        if end > self.numel:
            raise ValueError(f"parameters end at {end}, past the buffer's {self.numel} elements")

    @classmethod
    def plan(
        cls,
        shapes: Iterable[Sequence[int]],
        num_shards: int,
        granularity: Granularity = Granularity(1),
    ) -> BufferLayout:
        """Lay out parameters with the smallest slice the search finds.

        Parameters are placed by falling cell size, so that one-dimensional ones, which fit
        anywhere, come last and matrices keep their natural alignment. The slice size starts at
        the lower bound `ceil(total / num_shards)` and grows through the sizes at which a cell
        boundary can meet a slice boundary, until everything fits.

        Args:
            shapes: Global shapes, each with at least one dimension.
            num_shards: Number of slices, at least 1.
            granularity: What must not be cut.

        Returns:
            A layout whose slots are in the order of `shapes`.
        """
        sizes = [tuple(int(n) for n in shape) for shape in shapes]
        for shape in sizes:
            if not shape:
                raise ValueError("a 0-dim parameter cannot be sharded by rows; reshape it to (1,)")
        cells = [granularity.cell_numel(shape) for shape in sizes]
        order = sorted(range(len(sizes)), key=lambda i: (-cells[i], -math.prod(sizes[i]), i))
        items = [(math.prod(sizes[i]), cells[i]) for i in order]
        shard_numel, offsets = _smallest_shard(items, num_shards)
        slots: list[ParamSlot | None] = [None] * len(sizes)
        for index, offset in zip(order, offsets, strict=True):
            slots[index] = ParamSlot(sizes[index], offset, cells[index])
        return cls(tuple(slot for slot in slots if slot is not None), num_shards, shard_numel)

    @property
    def numel(self) -> int:
        """Elements of the whole flat buffer, padding included."""
        return self.num_shards * self.shard_numel

    @cached_property
    def param_numel(self) -> int:
        """Elements of all parameters."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding_numel(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - self.param_numel

    @cached_property
    def fingerprint(self) -> str:
        """A short hash that is equal on two ranks exactly when their layouts are."""
        text = repr((self.num_shards, self.shard_numel, self.slots))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def local_range(self, index: int, shard: int, num_merged: int = 1) -> tuple[int, int]:
        """Elements of parameter `index` on a shard, counted from the parameter's start.

        Args:
            index: Position of the parameter in `slots`.
            shard: Index of the (merged) shard.
            num_merged: How many neighbouring slices make one shard.

        Returns:
            `(start, end)`, with `start == end` where the shard holds nothing of it.
        """
        slot = self.slots[index]
        span = self.shard_numel * num_merged
        start = min(max(shard * span - slot.offset, 0), slot.numel)
        end = min(max((shard + 1) * span - slot.offset, 0), slot.numel)
        return start, end

    def local_rows(self, index: int, shard: int, num_merged: int = 1) -> tuple[int, int]:
        """`local_range` in rows of dimension 0: `(first row, one past the last row)`."""
        row = self.slots[index].row_numel
        start, end = self.local_range(index, shard, num_merged)
        return start // row, end // row

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges `(start, end)` of the flat buffer that belong to no parameter."""
        gaps, end = [], 0
        for slot in sorted(self.slots, key=lambda s: s.offset):
            if slot.numel and slot.offset > end:
                gaps.append((end, slot.offset))
            end = max(end, slot.end)
        if end < self.numel:
            gaps.append((end, self.numel))
        return gaps

    def empty_shards(self) -> set[int]:
        """Slices that hold nothing but padding."""
        if not self.shard_numel:
            return set(range(self.num_shards))
        empty: set[int] = set()
        for start, end in self.gaps():
            empty.update(range(-(-start // self.shard_numel), end // self.shard_numel))
        return empty


def _cuts_fit(offset: int, numel: int, cell: int, shard_numel: int) -> bool:
    """Whether every slice boundary strictly inside a parameter falls between two cells."""
    if numel == 0 or shard_numel == 0:
        return True
    first = (offset // shard_numel + 1) * shard_numel
    last = ((offset + numel - 1) // shard_numel) * shard_numel
    if first > last:
        return True
    if (first - offset) % cell:
        return False
    return first == last or shard_numel % cell == 0


def _place(items: Sequence[tuple[int, int]], shard_numel: int) -> tuple[list[int], int] | None:
    """Place `(numel, cell)` items in order.

    Returns:
        Offsets and the end of the last item, or `None` where an item meets two boundaries that
        cannot both fall between its cells.
    """
    cursor = 0
    offsets = []
    for numel, cell in items:
        offset = cursor
        if not _cuts_fit(offset, numel, cell, shard_numel):
            boundary = (offset // shard_numel + 1) * shard_numel
            offset += (boundary - offset) % cell
            if not _cuts_fit(offset, numel, cell, shard_numel):
                offset = boundary
                if not _cuts_fit(offset, numel, cell, shard_numel):
                    return None
        offsets.append(offset)
        cursor = offset + numel
    return offsets, cursor


def _smallest_shard(items: Sequence[tuple[int, int]], num_shards: int) -> tuple[int, list[int]]:
    """Smallest slice size found for the items, and their offsets.

    An item no longer than a slice meets at most one boundary, which a gap before it can always
    move between two of its cells. So only longer items can make a size impossible, and the next
    size worth trying is the next multiple of a cell of theirs; a size that merely runs out of
    room grows by what is missing.
    """
    total = sum(numel for numel, _ in items)
    size = -(-total // num_shards)
    while size:
        placed = _place(items, size)
        needed = size + 1
        if placed is not None:
            offsets, end = placed
            if end <= num_shards * size:
                return size, offsets
            needed = max(needed, -(-end // num_shards))
        next_multiples = [
            (size // cell + 1) * cell for numel, cell in items if numel > size and cell > 1
        ]
        size = min(next_multiples, default=needed)
        if placed is not None:
            size = min(size, needed)
    return 0, [0] * len(items)
