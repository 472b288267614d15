"""Layouts: every element in one shard, cuts between granules, little padding, no ranks asked."""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp_v2.layout.buffer_layout import (
    BufferLayout,
    Granularity,
    ParamSlot,
    admissible_slice,
)
from tests.unit.layouts import Shape, fits, numel_of

SHAPES = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8
)


def _check(layout: BufferLayout, shapes: list[Shape], granularity: Granularity) -> None:
    """The slow and obvious statement of what a layout is."""
    owner = [-1] * layout.numel
    for index, (slot, shape) in enumerate(zip(layout.slots, shapes, strict=True)):
        assert slot.shape == shape
        granule = granularity.granule_numel(shape)
        for element in range(slot.numel):
            assert owner[slot.offset + element] == -1
            owner[slot.offset + element] = index
        for shard in range(layout.num_shards):
            start, end = layout.local_range(index, shard)
            held = [
                e for e in range(slot.numel) if (slot.offset + e) // layout.shard_numel == shard
            ]
            assert list(range(start, end)) == held
            assert start == end or start % granule == 0
            assert end in (start, slot.numel) or end % granule == 0
    gaps = sum(end - start for start, end in layout.gaps())
    assert gaps == owner.count(-1) == layout.padding_numel


@settings(max_examples=150)
@given(shapes=SHAPES, num_shards=st.integers(1, 9), rows=st.sampled_from([0, 1, 2, 3]))
def test_any_layout_equals_the_brute_force_one(
    shapes: list[Shape], num_shards: int, rows: int
) -> None:
    granularity = Granularity(rows)
    _check(BufferLayout.plan(shapes, num_shards, granularity), shapes, granularity)


def test_the_layout_that_the_docstring_draws_is_the_one_that_is_planned() -> None:
    layout = BufferLayout.plan([(5, 4), (2, 6), (3,)], num_shards=3)
    assert (layout.shard_numel, [slot.offset for slot in layout.slots]) == (12, [12, 0, 32])
    assert list(layout.gaps()) == [(35, 36)]
    assert [layout.local_rows(0, shard) for shard in range(3)] == [(0, 0), (0, 3), (3, 5)]


@settings(max_examples=100)
@given(shapes=SHAPES, num_shards=st.integers(1, 9))
def test_padding_never_passes_one_slice_of_the_largest_granules(
    shapes: list[Shape], num_shards: int
) -> None:
    layout = BufferLayout.plan(shapes, num_shards)
    lcm = math.lcm(*(math.prod(shape[1:]) for shape in shapes))
    total = numel_of(shapes)
    largest = max(math.prod(shape) for shape in shapes)
    bound = min(-(-total // num_shards) + lcm + sum(math.prod(s[1:]) for s in shapes), largest * 2)
    assert layout.shard_numel <= max(bound, -(-total // num_shards) + lcm + largest)


def _smallest_by_brute_force(items: list[tuple[int, int]], num_shards: int) -> int:
    size = max(-(-sum(numel for numel, _ in items) // num_shards), 1)
    while not fits(items, num_shards, size):
        size += 1
    return size


def _items(shapes: list[Shape], granularity: Granularity) -> list[tuple[int, int]]:
    return [(math.prod(shape), granularity.granule_numel(shape)) for shape in shapes]


TINY_SHAPE = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@settings(max_examples=150)
@given(
    shapes=st.lists(TINY_SHAPE, min_size=1, max_size=4),
    num_shards=st.integers(1, 9),
    rows=st.sampled_from([0, 1, 2, 3]),
)
def test_up_to_four_parameters_get_the_smallest_slice_there_is(
    shapes: list[Shape], num_shards: int, rows: int
) -> None:
    granularity = Granularity(rows)
    least = _smallest_by_brute_force(_items(shapes, granularity), num_shards)
    assert BufferLayout.plan(shapes, num_shards, granularity).shard_numel == least


def test_six_parameters_get_the_smallest_slice_in_nineteen_of_twenty_cases() -> None:
    numbers = random.Random(0)
    optimal, excess, cases = 0, 0.0, 80
    for _ in range(cases):
        dims = [numbers.randint(1, 3) for _ in range(6)]
        shapes = [tuple(numbers.randint(1, 3) for _ in range(n)) for n in dims]
        num_shards = numbers.randint(2, 9)
        least = _smallest_by_brute_force(_items(shapes, Granularity(1)), num_shards)
        found = BufferLayout.plan(shapes, num_shards).shard_numel
        optimal += found == least
        excess += found / least - 1
    assert optimal >= 0.95 * cases
    assert excess <= 0.01 * cases


@settings(max_examples=100)
@given(shapes=st.lists(TINY_SHAPE, min_size=1, max_size=3), num_shards=st.integers(1, 9))
def test_no_layout_goes_below_the_admissible_slice(shapes: list[Shape], num_shards: int) -> None:
    items = _items(shapes, Granularity(1))
    average = -(-sum(numel for numel, _ in items) // num_shards)
    bound = admissible_slice(items, average)
    assert average <= bound <= _smallest_by_brute_force(items, num_shards)


def test_a_small_parameter_fills_a_gap_before_a_matrix() -> None:
    # Slices of 9 need the matrix to start one element late, and the bias takes that element.
    layout = BufferLayout.plan([(4, 4), (1,), (1,)], 2)
    assert layout.shard_numel == 9
    assert [slot.offset for slot in layout.slots] == [1, 0, 17]


def test_a_layout_computed_by_hand() -> None:
    layout = BufferLayout.plan([(4, 4), (3, 2), (7,)], 3)
    # 29 elements need slices of 10, but then gaps push the last one past the end; at 11 the matrix
    # starts at 3, so that two of its rows end at the first boundary, and the pairs at 20.
    assert layout.shard_numel == 11
    assert [slot.offset for slot in layout.slots] == [3, 20, 26]
    assert [layout.local_rows(0, shard) for shard in range(3)] == [(0, 2), (2, 4), (4, 4)]
    assert [layout.local_rows(1, shard) for shard in range(3)] == [(0, 0), (0, 1), (1, 3)]
    assert [layout.local_rows(2, shard) for shard in range(3)] == [(0, 0), (0, 0), (0, 7)]
    assert layout.gaps() == [(0, 3), (19, 20)]


def test_a_matrix_with_fewer_rows_than_ranks_leaves_ranks_empty() -> None:
    layout = BufferLayout.plan([(3, 5)], 4)
    assert layout.shard_numel == 5
    assert [layout.local_rows(0, shard) for shard in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 3)]


def test_tensor_granularity_never_cuts() -> None:
    shapes = [(4, 4), (6, 3), (5,), (8, 2)]
    layout = BufferLayout.plan(shapes, 3, Granularity.parse("tensor"))
    for index, shape in enumerate(shapes):
        sizes = {end - start for start, end in (layout.local_range(index, s) for s in range(3))}
        assert sizes <= {0, math.prod(shape)}


def test_block_granularity_keeps_blocks_of_rows_whole() -> None:
    layout = BufferLayout.plan([(12, 3)], 5, Granularity.parse("block:4"))
    starts = [layout.local_rows(0, shard)[0] for shard in range(5)]
    assert all(start % 4 == 0 for start in starts)


def test_llama_units_are_planned_in_milliseconds_for_16384_ranks() -> None:
    hidden, ffn, kv = 16384, 53248, 1024
    shapes = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    shapes += [(ffn, hidden), (ffn, hidden), (hidden, ffn), (hidden,), (hidden,)]
    start = time.perf_counter()
    for num_shards in (8, 64, 256, 16384):
        layout = BufferLayout.plan(shapes, num_shards)
        if num_shards <= 256:
            assert layout.padding_numel < 0.01 * layout.param_numel
    assert time.perf_counter() - start < 0.3


def test_row_ranges_are_those_of_every_slice_also_of_a_part_of_the_rows() -> None:
    layout = BufferLayout.plan([(9, 3), (4, 5), (7,)], 4)
    for index in range(3):
        ranges = layout.row_ranges(index)
        expected = [layout.local_rows(index, shard) for shard in range(4)]
        assert list(ranges) == ranges[:] == expected
        assert ranges[-1] == expected[-1]
        part = ranges.narrowed(1, 4)
        assert list(part) == [(min(max(a, 1), 4) - 1, min(max(b, 1), 4) - 1) for a, b in expected]
        assert part != ranges
        with pytest.raises(IndexError):
            ranges[4]


def test_equal_layouts_have_equal_fingerprints() -> None:
    first = BufferLayout.plan([(4, 4)], 2)
    assert first.fingerprint == BufferLayout.plan([(4, 4)], 2).fingerprint
    assert first.fingerprint != BufferLayout.plan([(4, 4)], 4).fingerprint


def test_overlapping_slots_and_cut_cells_are_rejected() -> None:
    with pytest.raises(ValueError, match="overlaps"):
        BufferLayout((ParamSlot((4,), 0, 1), ParamSlot((4,), 2, 1)), 1, 8)
    with pytest.raises(ValueError, match="cuts a granule"):
        BufferLayout((ParamSlot((2, 4), 0, 4),), 2, 6)
    with pytest.raises(ValueError, match="past the buffer"):
        BufferLayout((ParamSlot((9,), 0, 1),), 2, 4)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="num_shards must be at least 1"):
        BufferLayout.plan([(4,)], 0)
    with pytest.raises(ValueError, match="0-dim"):
        BufferLayout.plan([()], 2)
    for text in ("rows", "block:0", "block:x", "block"):
        with pytest.raises(ValueError, match="unknown shard_granularity"):
            Granularity.parse(text)
