"""The flat buffers of a unit: the parameters of each buffer, and its aligned layout.

Slices and parameters start at multiples of 128 bytes if the padding stays within its bound;
otherwise `aligned_buffers` weakens the alignment. `docs/layout.md` has the numbers.

Parameters of different row sizes in one flat buffer need slices that are a multiple of all their
row sizes. With many ranks that multiple exceeds a rank's share, and most of the buffer is padding.
Separate buffers avoid the padding, at the cost of one collective each. `docs/layout.md` derives the
bounds. `split_for_padding` ignores alignment; `aligned_buffers` aligns its result.

The search represents equal parameters as a kind with a count, and all kinds of one row size as a
class. It enumerates the partitions of classes, fewest buffers first, then relocates single
parameters into unused space of other buffers. It compares splits by a lower bound of their slice
sizes and lays out only the most promising splits. For a few parameters every split is laid out. All
numbers are elements.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from megatron_fsdp_v2.layout.buffer_layout import (
    UNALIGNED,
    Alignment,
    BufferLayout,
    Granularity,
    admissible_slice,
    smallest_slice,
)

__all__ = ["aligned_buffers", "flat_buffers", "split_for_padding"]

_Shapes = tuple[tuple[int, ...], ...]

_Counts = tuple[int, ...]
"""A buffer: its number of parameters of each kind."""

_Split = tuple[_Counts, ...]
"""A split: buffers that together hold every parameter, in a canonical order."""

_ROW = Granularity(1)

TOLERANCE = 0.01
"""Accepted padding, as a fraction of the parameters' elements."""

NEGLIGIBLE = 4096
"""Padding that is always accepted, in elements."""

MAX_CLASSES = 6
"""Maximum number of row sizes for an exhaustive search; otherwise the closest ones are merged."""

_PROMISING = 6
"""Number of partitions that are laid out and improved, per number of buffers."""

_FEW = 5
"""Maximum number of parameters for which every split is tried."""

_MAX_KINDS = 24
"""Maximum number of kinds for which partitions are improved by relocating parameters (slow)."""

_STEPS = 3
"""Number of slice sizes at which a move of parameters to another buffer is considered."""


def flat_buffers[ItemT, KeyT: Hashable](
    items: Iterable[ItemT],
    key_of: Callable[[ItemT], KeyT],
    shape_of: Callable[[ItemT], Sequence[int]],
    itemsize_of: Callable[[KeyT], float],
    num_shards: int,
    granularity: Granularity,
) -> Iterator[tuple[KeyT, list[ItemT], BufferLayout]]:
    """Group the parameters of a unit into flat buffers, in the order of their first appearance.

    Parameters with the same key share a buffer unless its padding would be too large; then they
    are split over several buffers.

    Args:
        items: The parameters, or objects that represent them.
        key_of: Key of an item; all parameters of a buffer have the same key.
        shape_of: Shape of an item.
        itemsize_of: Bytes of the smallest element type of the buffers with a key.
        num_shards: Slices of each flat buffer.
        granularity: The smallest block that is never split.
    """
    alike: dict[KeyT, list[ItemT]] = {}
    for item in items:
        alike.setdefault(key_of(item), []).append(item)
    for key, members in alike.items():
        shapes = map(shape_of, members)
        for indices, layout in aligned_buffers(shapes, num_shards, granularity, itemsize_of(key)):
            yield key, [members[index] for index in indices], layout


def aligned_buffers(
    shapes: Iterable[Sequence[int]], num_shards: int, granularity: Granularity, itemsize: float
) -> list[tuple[list[int], BufferLayout]]:
    """Split parameters into flat buffers, and lay them out aligned as far as padding permits.

    Buffers are those of `split_for_padding`: alignment adds no collective. All buffers are aligned
    to `Alignment.of(itemsize)`, 128 bytes. While their total padding exceeds both the tolerance and
    the padding without alignment, the line of the buffer with the largest alignment cost is halved,
    down to 16 bytes. If the padding then also exceeds `NEGLIGIBLE` elements, buffers lose their
    alignment one by one, starting with the largest cost.

    Args:
        shapes: Global shapes, each with at least one dimension.
        num_shards: Slices of each flat buffer, at least 1.
        granularity: The smallest block that is never split.
        itemsize: Bytes of the smallest element type bound to the layout, a power of two. If less
            than 1, slices and parameters still start at whole bytes.

    Returns:
        Positions in `shapes` of the parameters of each buffer, and its layout. Depends on the
        arguments alone, so all ranks agree. The total padding is at most the largest of:
        `TOLERANCE` of the parameters, `NEGLIGIBLE` elements, and the padding without alignment.

    Raises:
        ValueError: A shape has no dimension, or `num_shards` is less than 1.
    """
    sizes = tuple(tuple(int(n) for n in shape) for shape in shapes)
    buffers = _buffers(sizes, num_shards, granularity, itemsize)
    return [([*members], layout) for members, layout in buffers]


@lru_cache(maxsize=256)
def _buffers(
    shapes: _Shapes, num_shards: int, granularity: Granularity, itemsize: float
) -> tuple[tuple[tuple[int, ...], BufferLayout], ...]:
    """`aligned_buffers`, cached: the layers of a model have the same shapes."""
    split = split_for_padding(shapes, num_shards, granularity)
    members = [tuple(shapes[index] for index in buffer) for buffer in split]
    in_a_byte = max(int(1 / itemsize), 1)

    def plan(buffer: int, alignment: Alignment) -> BufferLayout:
        weakest = Alignment(max(alignment.line, in_a_byte), max(alignment.word, in_a_byte))
        return BufferLayout.plan(members[buffer], num_shards, granularity, weakest)

    layouts = [plan(buffer, Alignment.of(itemsize)) for buffer in range(len(split))]
    tolerated = TOLERANCE * sum(map(math.prod, shapes))
    if _padding(layouts) > tolerated:
        unaligned = [plan(buffer, UNALIGNED) for buffer in range(len(split))]
        tolerated = max(tolerated, _padding(unaligned))
        word = Alignment.of(itemsize).word
        _weaken(layouts, unaligned, tolerated, word, plan)
        _weaken(layouts, unaligned, max(tolerated, NEGLIGIBLE), 1, plan)
    return tuple(zip(map(tuple, split), layouts, strict=True))


def _padding(layouts: Iterable[BufferLayout]) -> int:
    return sum(layout.padding_numel for layout in layouts)


def _weaken(
    layouts: list[BufferLayout],
    unaligned: Sequence[BufferLayout],
    tolerated: float,
    least: int,
    plan: Callable[[int, Alignment], BufferLayout],
) -> None:
    """Lay buffers out with weaker alignment, in place, until their padding is tolerated.

    Args:
        layouts: Current layouts, replaced in place.
        unaligned: Layouts without alignment.
        tolerated: Accepted total padding, in elements.
        least: Weakest line, in elements.
        plan: Function that lays out a buffer with an alignment.
    """
    while _padding(layouts) > tolerated:
        costs = {
            buffer: layout.numel - unaligned[buffer].numel
            for buffer, layout in enumerate(layouts)
            if layout.alignment.line > least and layout.numel > unaligned[buffer].numel
        }
        if not costs:
            return
        worst = max(costs, key=lambda buffer: (costs[buffer], -buffer))
        layouts[worst] = plan(worst, layouts[worst].alignment.weaker())


# -- splits ----------------------------------------------------------------------------------------


def split_for_padding(
    shapes: Iterable[Sequence[int]],
    num_shards: int,
    granularity: Granularity = _ROW,
    *,
    tolerance: float = TOLERANCE,
    min_gain: float = 0.001,
    negligible: int = NEGLIGIBLE,
) -> list[list[int]]:
    """Split parameters into the fewest flat buffers whose padding is within a tolerance.

    If no split reaches the tolerance, the split with the least padding is chosen, where each
    further buffer, which costs a collective, counts as `min_gain` of the parameters.

    Args:
        shapes: Global shapes, each with at least one dimension.
        num_shards: Slices of each flat buffer, at least 1.
        granularity: The smallest block that is never split.
        tolerance: Accepted padding, as a fraction of the parameters' elements.
        min_gain: Padding that a further buffer must save if the tolerance is out of reach, as a
            fraction of the parameters' elements.
        negligible: Padding that is always accepted, in elements.

    Returns:
        Positions in `shapes` of the parameters of each buffer, ascending; buffers in the order of
        their first parameters. Depends on the arguments alone, so all ranks agree.

    Raises:
        ValueError: A shape has no dimension, or `num_shards`, `tolerance`, `min_gain` or
            `negligible` is out of range.
    """
    if not (tolerance >= 0 and min_gain >= 0 and negligible >= 0):
        raise ValueError(
            "tolerance, min_gain and negligible must not be negative, "
            f"got {tolerance}, {min_gain} and {negligible}"
        )
    whole = BufferLayout.plan(shapes, num_shards, granularity)
    num_params, params = len(whole.slots), whole.param_numel
    enough = max(tolerance * params, negligible)
    if whole.padding_numel <= enough:
        return [[*range(num_params)]] if num_params else []
    kinds: dict[tuple[int, int], list[int]] = {}
    for index, slot in enumerate(whole.slots):
        kinds.setdefault((slot.granule_numel, slot.numel), []).append(index)
    keys = sorted(kinds, reverse=True)
    search = _Search(
        granules=tuple(granule for granule, _ in keys),
        numels=tuple(numel for _, numel in keys),
        num_shards=num_shards,
    )
    counts = tuple(len(kinds[key]) for key in keys)
    best = _best_split(search, counts, whole.shard_numel, enough, min_gain * params)
    if num_params <= _FEW:
        best = _best_of_all(search, counts, best, enough, min_gain * params)
    # Assign the parameters of a kind in order, so that neighbors stay in one buffer.
    left = {key: iter(kinds[key]) for key in keys}
    return sorted(
        sorted(
            itertools.chain.from_iterable(
                itertools.islice(left[key], count) for key, count in zip(keys, counts, strict=True)
            )
        )
        for counts in best
    )


@dataclass(frozen=True)
class _Search:
    """Splits of counted kinds, compared by a lower bound of their padding.

    Attributes:
        granules: Granule of each kind, descending.
        numels: Elements of one parameter of each kind.
        num_shards: Slices of each buffer.
        slices: Cache of slice bounds.
        layouts: Cache of laid-out slice sizes.
    """

    granules: tuple[int, ...]
    numels: tuple[int, ...]
    num_shards: int
    slices: dict[_Counts, int] = field(default_factory=dict)
    layouts: dict[_Counts, int] = field(default_factory=dict)

    def total(self, counts: _Counts) -> int:
        """Elements of the parameters of a buffer."""
        return sum(map(operator.mul, counts, self.numels))

    def slice_bound(self, counts: _Counts) -> int:
        """Lower bound of the slice size of any layout of these parameters."""
        bound = self.slices.get(counts)
        if bound is None:
            at_least = -(-self.total(counts) // self.num_shards)
            bound = admissible_slice(self._kinds(counts), at_least)
            self.slices[counts] = bound
        return bound

    def _kinds(self, counts: _Counts) -> list[tuple[int, int]]:
        """`(numel, granule)` of the kinds that a buffer holds."""
        return [
            (numel, granule)
            for count, numel, granule in zip(counts, self.numels, self.granules, strict=True)
            if count
        ]

    def bound(self, split: _Split) -> int:
        """Lower bound of the slices of all buffers together, in elements."""
        return sum(map(self.slice_bound, split))

    def planned(self, split: _Split) -> int:
        """Slices of all buffers together as laid out, in elements."""
        return sum(map(self._planned, split))

    def _planned(self, counts: _Counts) -> int:
        size = self.layouts.get(counts)
        if size is None:
            kinds = zip(counts, self.numels, self.granules, strict=True)
            items = [(numel, granule) for count, numel, granule in kinds for _ in range(count)]
            size, _ = smallest_slice(items, self.num_shards)
            self.layouts[counts] = size
        return size

    def improved(self, split: _Split) -> _Split:
        """Relocate parameters between buffers while that lowers the bound."""
        best, bound = split, self.bound(split)
        while True:
            start = best
            for source, target in itertools.permutations(range(len(start)), 2):
                for moved in self._moves(start[source], start[target]):
                    less = tuple(map(operator.sub, start[source], moved))
                    more = tuple(map(operator.add, start[target], moved))
                    if not any(less):
                        continue
                    others = (b for i, b in enumerate(start) if i not in (source, target))
                    candidate = (*others, less, more)
                    if (new_bound := self.bound(candidate)) < bound:
                        best, bound = candidate, new_bound
            if best is start:
                return best

    def _moves(self, source: _Counts, target: _Counts) -> Iterator[_Counts]:
        """Candidate parameters of one class to relocate from a buffer to another.

        Either as many as fill the target's unused space at its next few slice sizes, or as few as
        shorten the source's slices by one or a few steps.
        """
        granules = {granule for _, granule in self._kinds(source)}
        step = math.lcm(*granules)
        excess = self.total(source) - self.num_shards * self.slice_bound(source)
        used = self.total(target)
        for granule in sorted(granules):
            relocated = tuple(
                n if c == granule else 0 for n, c in zip(source, self.granules, strict=True)
            )
            items = self._kinds(tuple(map(operator.add, target, relocated)))
            size = -(-used // self.num_shards) - 1
            need = excess
            for _ in range(_STEPS):
                size = admissible_slice(items, size + 1)
                yield self._fill(relocated, self.num_shards * size - used)
                need += self.num_shards * step
                rest = self._fill(relocated, self.total(relocated) - need)
                yield tuple(map(operator.sub, relocated, rest))

    def _fill(self, relocated: _Counts, room: int) -> _Counts:
        """Choose relocated parameters that fill most of the space, larger parameters first."""
        best, best_total = (0,) * len(relocated), 0
        present = [kind for kind, count in enumerate(relocated) if count and self.numels[kind]]
        present.sort(key=lambda kind: -self.numels[kind])
        for first in range(len(present)):
            taken, left = [0] * len(relocated), room
            for kind in present[first:]:
                taken[kind] = max(min(relocated[kind], left // self.numels[kind]), 0)
                left -= taken[kind] * self.numels[kind]
            if room - left > best_total:
                best, best_total = tuple(taken), room - left
        return best


def _best_split(
    search: _Search, counts: _Counts, planned: int, enough: float, min_gain: float
) -> _Split:
    """Split counted kinds into the fewest buffers with acceptable padding.

    Args:
        search: The kinds.
        counts: Number of parameters of each kind.
        planned: Slice size of a single buffer with all parameters.
        enough: Padding, in elements, that ends the search.
        min_gain: Padding, in elements, that one more buffer must save.
    """
    params = search.total(counts)
    best: _Split = (counts,)
    best_cost = search.num_shards * planned + min_gain
    merged = _merged_classes(search, counts)
    for num_buffers in range(2, len(merged[0]) + 1):
        if num_buffers > len(merged[-1]):
            split: _Split = tuple(merged[len(merged[0]) - num_buffers])
            slices = search.planned(split)
        else:
            split, slices = _best_partition(search, merged[-1], num_buffers, params + enough)
        numel = search.num_shards * slices
        if numel - params <= enough:
            return split
        cost = numel + min_gain * num_buffers
        if cost < best_cost:
            best, best_cost = split, cost
    return best


def _best_of_all(
    search: _Search, counts: _Counts, known: _Split, enough: float, min_gain: float
) -> _Split:
    """Return the best of all splits, or the known split if none is better. See `_best_split`."""
    params = search.total(counts)

    def cost(split: _Split) -> tuple[bool, float]:
        numel = search.num_shards * search.planned(split)
        is_enough = numel - params <= enough
        return not is_enough, len(split) if is_enough else numel + min_gain * len(split)

    return min([known, *sorted(_every_split(counts))], key=cost)


def _every_split(counts: _Counts) -> set[_Split]:
    """Return all splits of counted parameters into any number of buffers."""
    splits: set[_Split] = {()}
    for kind, count in enumerate(counts):
        one = tuple(int(other == kind) for other in range(len(counts)))
        for _ in range(count):
            grown = [(*split, one) for split in splits]
            grown += [
                (*split[:i], _sum((split[i], one)), *split[i + 1 :])
                for split in splits
                for i in range(len(split))
            ]
            splits = {tuple(sorted(split)) for split in grown}
    return splits


def _best_partition(
    search: _Search, classes: Sequence[_Counts], num_buffers: int, enough: float
) -> tuple[_Split, int]:
    """Return the best split found into `num_buffers` buffers, and the sum of its slices.

    Relocates parameters out of their class only if the buffers would otherwise have more than
    `enough` elements in total.
    """
    partitions = (tuple(map(_sum, blocks)) for blocks in _partitions(classes, num_buffers))
    promising = sorted(partitions, key=lambda split: (search.bound(split), split))[:_PROMISING]
    split, slices = _least_padded(search, promising)
    if search.num_shards * slices > enough and len(search.granules) <= _MAX_KINDS:
        improved = {tuple(sorted(search.improved(split))) for split in promising}
        split, slices = _least_padded(search, [*promising, *sorted(improved)])
    return split, slices


def _least_padded(search: _Search, splits: Sequence[_Split]) -> tuple[_Split, int]:
    """Return the split with the smallest sum of slices, and the sum."""
    best, least = splits[0], search.planned(splits[0])
    for split in sorted(splits, key=search.bound):
        if search.bound(split) >= least:
            break
        if (planned := search.planned(split)) < least:
            best, least = split, planned
    return best, least


def _merged_classes(search: _Search, counts: _Counts) -> list[list[_Counts]]:
    """Return classes by granule, then lists with one class fewer each, down to `MAX_CLASSES`.

    Each step merges the two classes whose common buffer costs least compared with two buffers.
    """
    zeros = (0,) * len(counts)
    by_granule: dict[int, _Counts] = {}
    for kind, (granule, count) in enumerate(zip(search.granules, counts, strict=True)):
        own = (*zeros[:kind], count, *zeros[kind + 1 :])
        by_granule[granule] = _sum((by_granule.get(granule, zeros), own))
    names = itertools.count()
    classes = {next(names): own for own in by_granule.values()}
    merged = [list(classes.values())]
    costs: dict[tuple[int, int], int] = {}
    while len(classes) > MAX_CLASSES:
        for pair in itertools.combinations(classes, 2):
            if pair not in costs:
                both = (classes[pair[0]], classes[pair[1]])
                costs[pair] = search.slice_bound(_sum(both)) - search.bound(both)
        first, second = min(costs, key=lambda pair: (costs[pair], pair))
        classes[next(names)] = _sum((classes.pop(first), classes.pop(second)))
        costs = {pair: cost for pair, cost in costs.items() if not {first, second} & {*pair}}
        merged.append(list(classes.values()))
    return merged


def _sum(buffers: Iterable[_Counts]) -> _Counts:
    return tuple(map(sum, zip(*buffers, strict=True)))


def _partitions(
    classes: Sequence[_Counts], num_blocks: int
) -> Iterator[tuple[tuple[_Counts, ...], ...]]:
    """Yield all partitions of the classes into `num_blocks` non-empty blocks."""
    if not classes:
        if not num_blocks:
            yield ()
        return
    *rest, last = classes
    for partition in _partitions(rest, num_blocks):
        for index, block in enumerate(partition):
            yield (*partition[:index], (*block, last), *partition[index + 1 :])
    if num_blocks:
        for partition in _partitions(rest, num_blocks - 1):
            yield (*partition, (last,))
