"""The flat buffers of a unit: the parameters of each buffer, and its aligned layout.

Slices and parameters start at multiples of 128 bytes if the padding stays within its bound;
otherwise `aligned_buffers` weakens the alignment. `docs/concepts.md` has the numbers.

Parameters of different row sizes in one flat buffer need slices that are a multiple of all their
row sizes. With many ranks that multiple exceeds a rank's share, and most of the buffer is padding.
Separate buffers avoid the padding, at the cost of one collective each. `split_for_padding` starts
with one buffer per row size and merges the pair of buffers that adds the least padding, until one
buffer is left; the fewest buffers within the tolerance are used. It ignores alignment;
`aligned_buffers` aligns its result. All numbers are elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache

from megatron_fsdp_v2.layout.buffer_layout import (
    UNALIGNED,
    Alignment,
    BufferLayout,
    Granularity,
    admissible_slice,
    smallest_slice,
)

_Buffer = tuple[int, ...]
"""Indices of the parameters of a buffer, ascending."""

TOLERANCE = 0.01
"""Accepted padding, as a fraction of the parameters' elements."""

NEGLIGIBLE = 4096
"""Padding that is always accepted, in elements."""

MIN_GAIN = 0.001
"""Padding that one more buffer must save if no split has accepted padding, as a fraction."""

_MAX_MOVES = 16
"""Maximum number of parameters that are moved to buffers of other row sizes."""


def is_balanced(layout: BufferLayout) -> bool:
    """Return whether a buffer has little padding, so that all slices hold equally many elements."""
    return layout.padding_numel <= max(TOLERANCE * layout.param_numel, NEGLIGIBLE)


def flat_buffers[ItemT, KeyT: Hashable](
    items: Iterable[ItemT],
    key_of: Callable[[ItemT], KeyT],
    shape_of: Callable[[ItemT], Sequence[int]],
    itemsize_of: Callable[[KeyT], float],
    num_shards_of: Callable[[KeyT], int],
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
        num_shards_of: Slices of each flat buffer with a key.
        granularity: The smallest block that is never split.
    """
    alike: dict[KeyT, list[ItemT]] = {}
    for item in items:
        alike.setdefault(key_of(item), []).append(item)
    for key, members in alike.items():
        shapes = tuple(tuple(shape_of(member)) for member in members)
        sizes = num_shards_of(key), granularity, itemsize_of(key)
        for indices, layout in aligned_buffers(shapes, *sizes):
            yield key, [members[index] for index in indices], layout


@lru_cache(maxsize=256)
def aligned_buffers(
    shapes: tuple[tuple[int, ...], ...], num_shards: int, granularity: Granularity, itemsize: float
) -> tuple[tuple[_Buffer, BufferLayout], ...]:
    """Split parameters into flat buffers, and lay them out aligned as far as padding permits.

    Cached, since the layers of a model have the same shapes.

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
    shapes: Iterable[Sequence[int]], num_shards: int, granularity: Granularity
) -> list[list[int]]:
    """Split parameters into few flat buffers with little padding, by greedy merging.

    Merges buffers of one row size each. If no merge has accepted padding, parameters are moved
    between the buffers of one row size, and these are merged as well. If none of these splits has
    accepted padding, the split with the least padding is chosen, where each further buffer, which
    costs a collective, counts as `MIN_GAIN` of the parameters.

    Args:
        shapes: Global shapes, each with at least one dimension.
        num_shards: Slices of each flat buffer, at least 1.
        granularity: The smallest block that is never split.

    Returns:
        Positions in `shapes` of the parameters of each buffer, ascending; buffers in the order of
        their first parameters. Depends on the arguments alone, so all ranks agree.

    Raises:
        ValueError: A shape has no dimension, or `num_shards` is less than 1.
    """
    whole = BufferLayout.plan(shapes, num_shards, granularity)
    enough = max(TOLERANCE * whole.param_numel, NEGLIGIBLE)
    if whole.padding_numel <= enough:
        return [[*range(len(whole.slots))]] if whole.slots else []
    merger = _Merger([(slot.numel, slot.granule_numel) for slot in whole.slots], num_shards)
    by_granule: dict[int, list[int]] = {}
    for index, slot in enumerate(whole.slots):
        by_granule.setdefault(slot.granule_numel, []).append(index)
    by_row = [tuple(buffer) for buffer in by_granule.values()]
    candidates: list[tuple[int, list[_Buffer]]] = []
    for is_moved in (False, True):
        start = merger.moved(by_row) if is_moved else by_row
        candidates += [(merger.numel(split), split) for split in merger.merged(start)]
        accepted = [
            (len(split), numel, split)
            for numel, split in candidates
            if numel - whole.param_numel <= enough
        ]
        if accepted:
            return sorted(map(list, min(accepted)[-1]))
    min_gain = MIN_GAIN * whole.param_numel
    return sorted(map(list, min(candidates, key=lambda c: c[0] + min_gain * len(c[1]))[1]))


class _Merger:
    """Merges the buffers of parameters, and moves parameters between buffers.

    Args:
        items: Elements and granule of each parameter.
        num_shards: Slices of each buffer.
    """

    def __init__(self, items: Sequence[tuple[int, int]], num_shards: int) -> None:
        self._items = items
        self._num_shards = num_shards
        self._slices: dict[_Buffer, int] = {}

    def numel(self, split: Sequence[_Buffer]) -> int:
        """Return the elements of all buffers together, as laid out."""
        items = ([self._items[index] for index in buffer] for buffer in split)
        return sum(self._num_shards * smallest_slice(each, self._num_shards)[0] for each in items)

    def merged(self, split: Sequence[_Buffer]) -> Iterator[list[_Buffer]]:
        """Yield a split, and splits with one buffer less each, down to one buffer."""
        buffers = [*split]
        yield buffers
        while len(buffers) > 1:
            pairs = itertools.combinations(buffers, 2)
            first, second = min(pairs, key=lambda pair: self._cost(*pair))
            buffers = [buffer for buffer in buffers if buffer not in (first, second)]
            buffers.append(_sum(first, second))
            yield buffers

    def moved(self, split: Sequence[_Buffer]) -> list[_Buffer]:
        """Move single parameters to other buffers while that reduces the padding."""
        buffers = [*split]
        for _ in range(_MAX_MOVES):
            moves = itertools.chain.from_iterable(
                self._moves(*pair) for pair in itertools.permutations(buffers, 2)
            )
            gain, old, new = max(moves, default=(0, (), ()))
            if gain <= 0:
                break
            buffers = [*(buffer for buffer in buffers if buffer not in old), *new]
        return buffers

    def _moves(
        self, source: _Buffer, target: _Buffer
    ) -> Iterator[tuple[int, tuple[_Buffer, _Buffer], tuple[_Buffer, _Buffer]]]:
        """Yield the saved elements of a slice, the old and the new buffers, for each kind."""
        for index in {self._items[index]: index for index in source}.values():
            less = tuple(other for other in source if other != index)
            if less:
                more = _sum(target, (index,))
                gain = self._slice(source) + self._slice(target)
                gain -= self._slice(less) + self._slice(more)
                yield gain, (source, target), (less, more)

    def _cost(self, first: _Buffer, second: _Buffer) -> int:
        """Return the elements that a merge adds to a slice."""
        return self._slice(_sum(first, second)) - self._slice(first) - self._slice(second)

    def _slice(self, buffer: _Buffer) -> int:
        """Return a lower bound of the slice of a buffer. A layout would take much longer."""
        if buffer not in self._slices:
            items = [self._items[index] for index in buffer]
            at_least = -(-sum(numel for numel, _ in items) // self._num_shards)
            self._slices[buffer] = admissible_slice(items, at_least)
        return self._slices[buffer]


def _sum(first: _Buffer, second: _Buffer) -> _Buffer:
    return tuple(sorted(first + second))
