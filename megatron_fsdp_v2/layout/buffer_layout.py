"""Layout of a flat buffer: the elements of each parameter on each shard.

The parameters of a group are laid out one after the other in one flat buffer of `num_shards` equal
slices. Each parameter is contiguous, so after an all-gather it is a view of the gathered buffer. A
slice boundary inside a parameter always falls between two of its granules (rows, blocks of rows, or
the whole tensor), so each shard is a `Shard(0)` slice of the parameter. Slices and parameters start
at multiples of an `Alignment`. Gaps between parameters (padding) satisfy these constraints. All
numbers are elements, never bytes.

`BufferLayout.plan([(5, 4), (2, 6), (3,)], num_shards=3)` of a matrix `A` with 5 rows of 4, a matrix
`B` with 2 rows of 6 and a vector `c` of 3 gives slices of 12 elements:

    0                       12                      24              32    35
    |   B[0]    |   B[1]    | A[0]  | A[1]  | A[2]  | A[3]  | A[4]  |  c  |.|
    |        shard 0        |        shard 1        |        shard 2        |

`A` and `B` are placed such that boundaries (at 12 and 24) fall between rows, `c` fills the
remaining space, and one element (`.`) is a gap. Shard 1 holds rows 0 to 2 of `A`, shard 2 rows 3
and 4 of `A` and all of `c`; shard 0 holds no row of `A`, which is `Shard(0)` with an empty first
shard.

Since starts and boundaries are both aligned, a parameter is split at multiples of its *stride*: the
least common multiple of its granule and of the alignment of its start. The search represents
parameters as items `(numel, stride)`, and starts an item at multiples of `gcd(stride, line)`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, override

LINE_NBYTES = 128
"""Bytes of a GPU's cache line. Kernels and collectives are fastest on data aligned to it."""

WORD_NBYTES = 16
"""Bytes of a GPU thread's widest load; an alignment that e.g. grouped products require."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Alignment of the starts of slices and parameters, in elements.

    Attributes:
        line: Slices, and parameters of at least a line, start at multiples of it. A power of two.
        word: Shorter parameters, which may share a line, start at multiples of it. A power of two,
            not above `line`.
    """

    line: int = 1
    word: int = 1

    @classmethod
    def of(cls, itemsize: float) -> Alignment:
        """Strongest alignment for an element size in bytes: a power of two; 0.5 for 4 bits."""
        return cls(int(max(LINE_NBYTES // itemsize, 1)), int(max(WORD_NBYTES // itemsize, 1)))

    def start(self, numel: int) -> int:
        """Alignment of the start of a parameter with `numel` elements."""
        return self.line if numel >= self.line else self.word

    def stride(self, numel: int, granule: int) -> int:
        """Elements between two possible split points of a parameter, counted from its start.

        Start and split points are aligned, and whole granules are between them.
        """
        return math.lcm(granule, self.start(numel))

    def weaker(self) -> Alignment:
        """The next weaker alignment: half the line, down to a word; then `UNALIGNED`."""
        return Alignment(self.line // 2, self.word) if self.line > self.word else UNALIGNED


UNALIGNED = Alignment()
"""No alignment of slices and parameters."""


@dataclass(frozen=True, slots=True)
class Granularity:
    """The smallest block that a shard boundary never splits: a row, a block of rows, or a tensor.

    Attributes:
        rows: Rows in a granule; 0 stands for the whole tensor.
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

    def granule_numel(self, shape: Sequence[int]) -> int:
        """Elements of one granule of a parameter of this shape (at least 1)."""
        row = math.prod(shape[1:])
        granule = math.prod(shape) if self.rows == 0 else min(self.rows, shape[0]) * row
        return max(granule, 1)


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """Position of one parameter in the flat buffer.

    Attributes:
        shape: Global shape.
        offset: First element in the flat buffer.
        granule_numel: Elements that must stay on one shard.
    """

    shape: tuple[int, ...]
    offset: int
    granule_numel: int

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
        alignment: Alignment of the starts of slices and parameters.
    """

    slots: tuple[ParamSlot, ...]
    num_shards: int
    shard_numel: int
    alignment: Alignment = UNALIGNED

    def __post_init__(self) -> None:
        if self.shard_numel % self.alignment.line:
            raise ValueError(f"a slice of {self.shard_numel} elements breaks {self.alignment}")
        end = 0
        for slot in sorted(self.slots, key=lambda s: (s.offset, s.numel)):
            if slot.offset % self.alignment.start(slot.numel):
                raise ValueError(f"the start of {slot} breaks {self.alignment}")
            if slot.offset < end:
                raise ValueError(f"slot {slot} overlaps its predecessor, which ends at {end}")
            end = slot.end
            if not _boundaries_fit(slot.offset, slot.numel, slot.granule_numel, self.shard_numel):
                raise ValueError(
                    f"a boundary of {self.shard_numel} elements cuts a granule of {slot}"
                )
        if end > self.numel:
            raise ValueError(f"parameters end at {end}, past the buffer's {self.numel} elements")

    @classmethod
    def plan(
        cls,
        shapes: Iterable[Sequence[int]],
        num_shards: int,
        granularity: Granularity = Granularity(1),
        alignment: Alignment = UNALIGNED,
    ) -> BufferLayout:
        """Lay out parameters with the smallest slice the search finds.

        Parameters are placed by descending stride, so that matrices keep their natural alignment;
        smaller parameters fill the gaps before them. The slice size starts at the lower bound
        `ceil(total / num_shards)` and grows through the multiples of the line at which every long
        parameter can be split between its granules, until everything fits.

        Args:
            shapes: Global shapes, each with at least one dimension.
            num_shards: Number of slices, at least 1.
            granularity: The smallest block that is never split.
            alignment: Alignment of the starts of slices and parameters; none by default.

        Returns:
            A layout whose slots are in the order of `shapes`.

        Raises:
            ValueError: A shape has no dimension, or `num_shards` is less than 1.
        """
        if num_shards < 1:
            raise ValueError(f"num_shards must be at least 1, got {num_shards}")
        sizes = [tuple(int(n) for n in shape) for shape in shapes]
        for shape in sizes:
            if not shape:
                raise ValueError("a 0-dim parameter cannot be sharded by rows; reshape it to (1,)")
        granules = [granularity.granule_numel(shape) for shape in sizes]
        numels = [math.prod(shape) for shape in sizes]
        items = list(zip(numels, map(alignment.stride, numels, granules), strict=True))
        shard_numel, offsets = smallest_slice(items, num_shards, alignment.line)
        slots = tuple(map(ParamSlot, sizes, offsets, granules))
        return cls(slots, num_shards, shard_numel, alignment)

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
        """A short hash of slots and slices, by which ranks compare layouts."""
        text = repr((self.num_shards, self.shard_numel, self.slots))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def local_range(self, index: int, first: int, count: int = 1) -> tuple[int, int]:
        """Elements of parameter `index` on neighboring slices, counted from the parameter's start.

        Args:
            index: Index of the parameter in `slots`.
            first: The first slice.
            count: Number of slices.

        Returns:
            `(start, end)`, with `start == end` if the slices hold no element of the parameter.
        """
        slot = self.slots[index]
        start = min(max(first * self.shard_numel - slot.offset, 0), slot.numel)
        end = min(max((first + count) * self.shard_numel - slot.offset, 0), slot.numel)
        return start, end

    def local_rows(self, index: int, first: int, count: int = 1) -> tuple[int, int]:
        """`local_range` in rows of dimension 0: `(first row, one past the last row)`.

        The rows of a parameter without elements are on the first slice.
        """
        slot = self.slots[index]
        if not slot.numel:
            return (0 if first == 0 else slot.shape[0]), slot.shape[0]
        start, end = self.local_range(index, first, count)
        return start // slot.row_numel, end // slot.row_numel

    def row_ranges(self, index: int) -> RowRanges:
        """`local_rows` of every slice, computed lazily: there may be thousands of slices."""
        return RowRanges(self, index)

    def index_at(self, element: int) -> int | None:
        """Index of the parameter that an element of the buffer belongs to; None for padding."""
        found = (i for i, slot in enumerate(self.slots) if slot.offset <= element < slot.end)
        return next(found, None)

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


def admissible_slice(items: Iterable[tuple[int, int]], at_least: int, line: int = 1) -> int:
    """Smallest slice size, not below `at_least`, that no single parameter rules out.

    A parameter that always contains two slice boundaries needs a slice that is a multiple of its
    stride. At slices of at least `_one_boundary_size` elements, a placement with one boundary
    exists. The size therefore grows to a common multiple of the strides of the constrained
    parameters, or to the size at which one of them is no longer constrained.

    Args:
        items: `(numel, stride)` of each parameter; duplicates have no effect.
        at_least: Slice size at which the search starts.
        line: Alignment of a slice.

    Returns:
        A lower bound of the slice size of any layout of these parameters whose slices have
        `at_least` elements or more.
    """
    limits = sorted(((_one_boundary_size(*item), item[1]) for item in set(items)), reverse=True)
    size = -(-at_least // line) * line
    while limits:
        # The list is descending; a parameter that is not constrained at this size is not
        # constrained at larger sizes.
        while limits and limits[-1][0] <= size:
            limits.pop()
        if not limits:
            break
        step = math.lcm(line, *(stride for _, stride in limits))
        rounded = -(-size // step) * step
        if rounded <= limits[-1][0]:
            return rounded
        size = -(-limits[-1][0] // line) * line
    return size


def _one_boundary_size(numel: int, stride: int) -> int:
    """Slice size from which a parameter can be placed with at most one boundary inside.

    If the boundary is after `k` strides, both sides must fit in a slice.
    """
    half = numel // (2 * stride)
    return min(max(k * stride, numel - k * stride) for k in (half, half + 1))


@dataclass(frozen=True, slots=True)
class RowRanges(Sequence[tuple[int, int]]):
    """`(first row, one past the last row)` of a parameter on every slice, in a few bytes.

    Attributes:
        layout: The layout.
        param: Index of the parameter in it.
    """

    layout: BufferLayout
    param: int

    @override
    def __len__(self) -> int:
        return self.layout.num_shards

    @override
    def __getitem__(self, shard: Any) -> Any:
        """Rows on one slice."""
        if not 0 <= shard < len(self):
            raise IndexError(f"slice {shard} of {len(self)}")
        return self.layout.local_rows(self.param, shard)


def _boundaries_fit(offset: int, numel: int, granule: int, shard_numel: int) -> bool:
    """Return whether every slice boundary inside a parameter falls between two granules."""
    if numel == 0 or shard_numel == 0:
        return True
    first = (offset // shard_numel + 1) * shard_numel
    last = ((offset + numel - 1) // shard_numel) * shard_numel
    if first > last:
        return True
    if (first - offset) % granule:
        return False
    return first == last or shard_numel % granule == 0


def _first_fit(start: int, numel: int, stride: int, shard_numel: int, line: int) -> int | None:
    """Smallest aligned offset from `start` on at which boundaries inside an item fall on strides.

    Offsets repeat with the slice. The result is the first aligned offset, the next offset whose
    first boundary follows a whole number of strides, or one of the same two offsets after the next
    boundary; None if none of them fits.
    """
    boundary = (start // shard_numel + 1) * shard_numel
    for begin in (start + -start % math.gcd(stride, line), boundary):
        to_boundary = (begin // shard_numel + 1) * shard_numel - begin
        for offset in (begin, begin + to_boundary % stride):
            if _boundaries_fit(offset, numel, stride, shard_numel):
                return offset
    return None


def _place(
    items: Sequence[tuple[int, int]], order: Sequence[int], shard_numel: int, line: int
) -> tuple[list[int], int] | None:
    """Place `(numel, stride)` items in order, each in the first gap that fits, or at the end.

    Returns:
        Offsets and the end of the last item, or `None` if an item contains two boundaries that
        cannot both fall between its strides.
    """
    cursor = 0
    gaps: list[tuple[int, int]] = []
    widest = 0
    offsets = [0] * len(items)
    for index in order:
        numel, stride = items[index]
        if numel <= widest:
            offset = _fill_gap(gaps, numel, stride, shard_numel, line)
            if offset is not None:
                offsets[index] = offset
                widest = max((end - start for start, end in gaps), default=0)
                continue
        # Fast path: the item almost always fits right behind its predecessor.
        room = -cursor % shard_numel
        if room % stride == 0 and shard_numel % stride == 0:
            offset = cursor
        else:
            offset = _first_fit(cursor, numel, stride, shard_numel, line)
            if offset is None:
                return None
            if offset > cursor and len(gaps) < _MAX_GAPS:
                gaps.append((cursor, offset))
                widest = max(widest, offset - cursor)
        offsets[index] = offset
        cursor = offset + numel
    return offsets, cursor


def _fill_gap(
    gaps: list[tuple[int, int]], numel: int, stride: int, shard_numel: int, line: int
) -> int | None:
    """Place an item in the first gap that fits and return its offset, or return None."""
    for position, (start, end) in enumerate(gaps):
        if end - start >= numel:
            offset = _first_fit(start, numel, stride, shard_numel, line)
            if offset is not None and offset + numel <= end:
                rest = ((start, offset), (offset + numel, end))
                gaps[position : position + 1] = [gap for gap in rest if gap[0] < gap[1]]
                return offset
    return None


_MAX_GAPS = 64
"""Maximum number of gaps to try for later items; only unsplittable tensors leave more."""


def _orders(items: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Candidate orders; the first is by descending stride, so that matrices keep their alignment.

    For a few parameters all orders are tried, which is exact: in a given order, the first offset
    that fits is best for all later items. For more parameters the order by descending size is also
    tried, which saves a few elements; for many parameters only the first order is used.
    """
    indices = range(len(items))
    by_stride = sorted(indices, key=lambda i: (-items[i][1], -items[i][0], i))
    if len(items) <= _MAX_PERMUTED:
        # Permutations of a sequence start with that sequence; equal parameters keep their order.
        orders: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for order in itertools.permutations(by_stride):
            orders.setdefault(tuple(items[i] for i in order), [*order])
        return list(orders.values())
    if len(items) <= _MAX_REORDERED:
        return [by_stride, sorted(indices, key=lambda i: (-items[i][0], -items[i][1], i))]
    return [by_stride]


_MAX_PERMUTED = 4
"""Maximum number of parameters for which every order is tried."""

_MAX_REORDERED = 64
"""Maximum number of parameters for which a second order is tried."""


def smallest_slice(
    items: Sequence[tuple[int, int]], num_shards: int, line: int = 1
) -> tuple[int, list[int]]:
    """Smallest slice size found for `(numel, stride)` items, and their offsets.

    Tries the sizes that no single item rules out, from the lower bound `ceil(total / num_shards)`
    on. The next size is the one at which the last items would fit, or the next multiple of a long
    item's stride, at which that item needs no gaps.

    Args:
        items: `(numel, stride)` of each parameter.
        num_shards: Number of slices, at least 1.
        line: Alignment of a slice; an item starts at multiples of `gcd(stride, line)`.
    """
    size = admissible_slice(items, -(-sum(numel for numel, _ in items) // num_shards), line)
    orders = _orders(items)
    attempt = 0
    while size:
        needed = math.inf
        for order in orders:
            placed = _place(items, order, size, line)
            if placed is not None:
                if placed[1] <= num_shards * size:
                    return size, placed[0]
                needed = min(needed, -(-placed[1] // num_shards))
        # Steps grow with the attempts, which bounds their number; all small sizes are tried.
        attempt += 1
        target = size + 1
        if size >= _SMALL_SLICE:
            target = size + max(attempt * attempt * size >> 20, 1)
        if size < _SMALL_SLICE or needed < target:
            needed = target
        multiples = (-(-target // stride) * stride for n, stride in items if n > size)
        size = admissible_slice(items, int(min(needed, min(multiples, default=needed))), line)
    return 0, [0] * len(items)


_SMALL_SLICE = 1024
"""Slices below this size are searched in steps of one element, or of one line."""
