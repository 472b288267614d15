"""The flat buffers of a unit: which parameters share one, and its layout, aligned.

Slices and parameters start at multiples of 128 bytes where that keeps the padding promised; the
rule that says what gives where it does not is `aligned_buffers`. `docs/layout.md` has the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache

from megatron_fsdp_v2.layout.alignment import UNALIGNED, Alignment
from megatron_fsdp_v2.layout.buffer_layout import BufferLayout, Granularity
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
    """Which parameters of a unit share a flat buffer, in the order of their first appearance.

    Those with one key could; they are split where one buffer of them would be padded too much.

    Args:
        items: The parameters, or whatever stands for them.
        key_of: What parameters of one buffer have in common.
        shape_of: Their shapes.
        itemsize_of: Bytes of the smallest element that such a buffer is made of.
        num_shards: Slices of each flat buffer.
        granularity: What must not be cut.
    """
    alike: dict[KeyT, list[ItemT]] = {}
    for item in items:
        alike.setdefault(key_of(item), []).append(item)
    for key, members in alike.items():
        shapes = map(shape_of, members)
        for indices, layout in aligned_buffers(shapes, num_shards, granularity, itemsize_of(key)):
            yield key, [members[index] for index in indices], layout


def aligned_buffers(
    shapes: Iterable[Sequence[int]],
    num_shards: int,
    granularity: Granularity,
    itemsize: float,
) -> list[tuple[list[int], BufferLayout]]:
    """Split parameters into flat buffers, and lay them out aligned as far as padding permits.

    Buffers are those of `split_for_padding`: alignment costs no collective. All are aligned to
    `Alignment.of(itemsize)`, 128 bytes. Where their padding together passes the tolerance, and also
    what it is without any alignment, the buffer that alignment costs most gets half the line, again
    and again, down to 16 bytes. Where `NEGLIGIBLE` elements are not enough for that either,
    buffers lose their alignment one by one, those that it costs most first.

    Args:
        shapes: Global shapes, each with at least one dimension.
        num_shards: Slices of each flat buffer, at least 1.
        granularity: What must not be cut.
        itemsize: Bytes of the smallest element that is bound to the layout, a power of two. Where
            it is less than 1, no slice and no parameter starts within a byte.

    Returns:
        Positions in `shapes` of the parameters of each buffer, and its layout. Depends on the
        arguments alone, so all ranks agree. The padding of all buffers together is at most the
        largest of: `TOLERANCE` of the parameters, `NEGLIGIBLE` elements, and what it is without
        alignment.

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
    """`aligned_buffers`, remembered: the layers of a model have the same shapes."""
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
        layouts: As they are.
        unaligned: Without alignment.
        tolerated: Padding of all together, in elements.
        least: Line, in elements, below which none is weakened.
        plan: Lays a buffer out.
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
