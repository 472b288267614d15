"""The flat buffers of a unit: the parameters of each buffer, and its aligned layout.

Slices and parameters start at multiples of 128 bytes if the padding stays within its bound;
otherwise `aligned_buffers` weakens the alignment. `docs/layout.md` has the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache

from megatron_fsdp_v2.layout.buffer_layout import UNALIGNED, Alignment, BufferLayout, Granularity
from megatron_fsdp_v2.layout.split import NEGLIGIBLE, TOLERANCE, split_for_padding

__all__ = ["aligned_buffers", "flat_buffers"]

_Shapes = tuple[tuple[int, ...], ...]


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
    the padding without alignment, the buffer with the largest alignment cost gets half the line,
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
