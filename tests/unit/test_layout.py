"""Layouts: each element in one shard, boundaries between granules, padding, aligned views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.layout.buffer_layout import (
    UNALIGNED,
    Alignment,
    BufferLayout,
    Granularity,
    smallest_slice,
)
from megatron_fsdp_v2.layout.placement import Placement
from megatron_fsdp_v2.layout.split import aligned_buffers, split_for_padding
from megatron_fsdp_v2.params.buffer import DataParallelBuffer, ShardGrid, Span
from tests.reference.layout_bounds import REAL_UNITS, Shape, fits, numel_of

SHAPES = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8
)


def _check_granules(layout: BufferLayout, granularity: Granularity) -> None:
    """Check that shards of parameters begin and end between granules."""
    for index, slot in enumerate(layout.slots):
        granule = granularity.granule_numel(slot.shape)
        for shard in range(layout.num_shards):
            start, end = layout.local_range(index, shard)
            assert start == end or start % granule == 0
            assert end in (start, slot.numel) or end % granule == 0


def _check(layout: BufferLayout, shapes: list[Shape], granularity: Granularity) -> None:
    """Check a layout by brute force, element by element."""
    _check_granules(layout, granularity)
    owner = [-1] * layout.numel
    for index, (slot, shape) in enumerate(zip(layout.slots, shapes, strict=True)):
        assert slot.shape == shape
        for element in range(slot.numel):
            assert owner[slot.offset + element] == -1
            owner[slot.offset + element] = index
        for shard in range(layout.num_shards):
            start, end = layout.local_range(index, shard)
            held = [
                e for e in range(slot.numel) if (slot.offset + e) // layout.shard_numel == shard
            ]
            assert list(range(start, end)) == held
    gaps = sum(end - start for start, end in layout.gaps())
    assert gaps == owner.count(-1) == layout.padding_numel


@settings(max_examples=150)
@given(shapes=SHAPES, num_shards=st.integers(1, 9), rows=st.sampled_from([0, 1, 2, 3]))
def test_any_layout_passes_the_brute_force_check(
    shapes: list[Shape], num_shards: int, rows: int
) -> None:
    granularity = Granularity(rows)
    _check(BufferLayout.plan(shapes, num_shards, granularity), shapes, granularity)


def test_layout_in_the_docstring_is_the_planned_one() -> None:
    layout = BufferLayout.plan([(5, 4), (2, 6), (3,)], num_shards=3)
    assert (layout.shard_numel, [slot.offset for slot in layout.slots]) == (12, [12, 0, 32])
    assert list(layout.gaps()) == [(35, 36)]
    assert [layout.local_rows(0, shard) for shard in range(3)] == [(0, 0), (0, 3), (3, 5)]


def _items(shapes: list[Shape], granularity: Granularity) -> list[tuple[int, int]]:
    return [(math.prod(shape), granularity.granule_numel(shape)) for shape in shapes]


TINY_SHAPE = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
ALIGNMENTS = [UNALIGNED, Alignment(4, 2), Alignment(8, 2), Alignment(2, 2)]


@pytest.mark.parametrize("alignment", ALIGNMENTS, ids=str)
@settings(max_examples=60)
@given(
    shapes=st.lists(TINY_SHAPE, min_size=1, max_size=4),
    num_shards=st.integers(1, 8),
    rows=st.sampled_from([0, 1, 2, 3]),
)
def test_up_to_four_parameters_get_the_smallest_possible_slice(
    alignment: Alignment, shapes: list[Shape], num_shards: int, rows: int
) -> None:
    granularity, line = Granularity(rows), alignment.line
    layout = BufferLayout.plan(shapes, num_shards, granularity, alignment)
    items = [(n, alignment.stride(n, granule)) for n, granule in _items(shapes, granularity)]
    assert layout.shard_numel == smallest_slice(items, num_shards, line)[0]
    average = -(-numel_of(shapes) // num_shards)
    for size in range(-(-average // line) * line, layout.shard_numel, line):
        assert not fits(items, num_shards, size, line)
    assert fits(items, num_shards, layout.shard_numel, line)


# -- alignment of views of flat buffers, and its padding -----------------------------------------

ROW = Granularity(1)
DIM = st.sampled_from([1, 2, 3, 5, 7, 8, 12, 16, 24, 49, 64, 96, 100, 128, 192, 768])
ANY_SHAPES = st.lists(st.lists(DIM, min_size=1, max_size=3).map(tuple), min_size=1, max_size=9)
ANY_RANKS = st.sampled_from([1, 2, 3, 4, 7, 8, 31, 64, 1000])
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


def _unaligned(shapes: Sequence[Shape], num_shards: int, granularity: Granularity) -> int:
    """Return the padding of the same buffers without alignment."""
    return sum(
        BufferLayout.plan([shapes[i] for i in buffer], num_shards, granularity).padding_numel
        for buffer in split_for_padding(shapes, num_shards, granularity)
    )


def _starts(layout: BufferLayout) -> list[tuple[int, int]]:
    """Return numel of a parameter and start of a view, for all views of all parameters.

    The views are those of the full buffer and those of each slice, with starts relative to it.
    """
    found = []
    for index, slot in enumerate(layout.slots):
        found.append((slot.numel, slot.offset))
        for shard in range(layout.num_shards):
            start, end = layout.local_range(index, shard)
            if end > start:
                found.append((slot.numel, slot.offset + start - shard * layout.shard_numel))
    return found


@settings(max_examples=150)
@given(shapes=ANY_SHAPES, num_shards=ANY_RANKS, itemsize=ITEMSIZES, rows=st.integers(0, 3))
def test_views_are_aligned_and_padding_is_within_its_bound(
    shapes: list[Shape], num_shards: int, itemsize: int, rows: int
) -> None:
    granularity = Granularity(rows)
    buffers = aligned_buffers(tuple(shapes), num_shards, granularity, itemsize)
    split = split_for_padding(shapes, num_shards, granularity)
    assert [list(members) for members, _ in buffers] == split
    for members, layout in buffers:
        assert [slot.shape for slot in layout.slots] == [shapes[index] for index in members]
        line = layout.alignment.line * itemsize
        assert line in (128, 64, 32, 16) or layout.alignment == UNALIGNED
        assert layout.shard_numel * itemsize % line == 0
        for numel, start in _starts(layout):
            nbytes = min(line, 16) if numel * itemsize < line else line
            assert start * itemsize % nbytes == 0
        _check_granules(layout, granularity)
    padding = sum(layout.padding_numel for _, layout in buffers)
    promised = max(0.01 * numel_of(shapes), _unaligned(shapes, num_shards, granularity))
    assert padding <= max(promised, 4096)
    if padding > promised:
        # Only the 16-byte alignment that kernels need may cost so much.
        assert 16 in {layout.alignment.line * itemsize for _, layout in buffers}


@settings(max_examples=30)
@given(shapes=ANY_SHAPES, num_shards=ANY_RANKS)
def test_parameters_packed_two_per_byte_start_at_byte_boundaries(
    shapes: list[Shape], num_shards: int
) -> None:
    even = [(*shape[:-1], 2 * shape[-1]) if len(shape) > 1 else (*shape, 2) for shape in shapes]
    for members, layout in aligned_buffers(tuple(even), num_shards, ROW, 0.5):
        assert layout.alignment.line in (2, 32, 64, 128, 256)
        memory = torch.zeros(layout.numel // 2, dtype=torch.uint8)
        grid = ShardGrid((Axis(cast(Any, None), num_shards, 0),), (num_shards,))
        context = cast(Any, SimpleNamespace(layout=layout, spec=SimpleNamespace(grid=grid)))
        buffer = DataParallelBuffer(context, [Placement.REPLICATE], memory, packing=2)
        assert 2 * buffer.nbytes == layout.numel
        for position, index in enumerate(members):
            view = buffer.view(position)
            assert view.shape == (*even[index][:-1], even[index][-1] // 2)
            view += 1
        # Exactly one view has written each byte, and padding is unchanged.
        assert int(buffer.tensor.sum()) == layout.param_numel // 2
        assert bool((buffer.tensor <= 1).all())
        pieces = [buffer.piece(Span(shard, 1)) for shard in range(num_shards)]
        assert torch.equal(torch.cat(pieces), buffer.tensor)


def test_views_of_real_units_are_aligned_to_128_bytes_for_0_1_percent_more_padding() -> None:
    for unit, (shapes, all_ranks) in REAL_UNITS.items():
        for ranks in all_ranks:
            buffers = aligned_buffers(tuple(shapes), ranks, ROW, 2)
            assert {start * 2 % 128 for _, plan in buffers for _, start in _starts(plan)} == {0}, (
                unit
            )
            more = sum(plan.padding_numel for _, plan in buffers) - _unaligned(shapes, ranks, ROW)
            assert more <= 0.001 * numel_of(shapes), (unit, ranks)
