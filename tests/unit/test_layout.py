"""Layouts: every element in one shard, cuts between granules, little padding, aligned views."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp_v2.layout.alignment import UNALIGNED, Alignment
from megatron_fsdp_v2.layout.buffer_layout import (
    BufferLayout,
    Granularity,
    ParamSlot,
    admissible_slice,
    smallest_slice,
)
from megatron_fsdp_v2.layout.flat_buffers import aligned_buffers
from megatron_fsdp_v2.layout.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp_v2.layout.split import split_for_padding
from megatron_fsdp_v2.params.buffer import DataParallelBuffer, Span
from tests.pages import check_part, table
from tests.reference.real_units import REAL_UNITS
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
ALIGNMENTS = [UNALIGNED, Alignment(4, 2), Alignment(8, 2), Alignment(2, 2)]


@pytest.mark.parametrize("alignment", ALIGNMENTS, ids=str)
@settings(max_examples=60)
@given(
    shapes=st.lists(TINY_SHAPE, min_size=1, max_size=4),
    num_shards=st.integers(1, 8),
    rows=st.sampled_from([0, 1, 2, 3]),
)
def test_up_to_four_parameters_get_the_smallest_slice_there_is(
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


# -- alignment: where views of flat buffers start, what that costs, and what gives ---------------

ROW = Granularity(1)
DIM = st.sampled_from([1, 2, 3, 5, 7, 8, 12, 16, 24, 49, 64, 96, 100, 128, 192, 768])
ANY_SHAPES = st.lists(st.lists(DIM, min_size=1, max_size=3).map(tuple), min_size=1, max_size=9)
ANY_RANKS = st.sampled_from([1, 2, 3, 4, 7, 8, 31, 64, 1000])
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


def _unaligned(shapes: Sequence[Shape], num_shards: int, granularity: Granularity) -> int:
    """Padding of the same buffers when nothing is aligned."""
    return sum(
        BufferLayout.plan([shapes[i] for i in buffer], num_shards, granularity).padding_numel
        for buffer in split_for_padding(shapes, num_shards, granularity)
    )


def _starts(layout: BufferLayout) -> list[tuple[int, int]]:
    """Elements of each parameter, and an element that a view of some of it starts at.

    In the whole buffer, and in every slice that holds a part of it, counted from there.
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
def test_every_view_is_aligned_as_promised_and_padding_stays_within_the_promise(
    shapes: list[Shape], num_shards: int, itemsize: int, rows: int
) -> None:
    granularity = Granularity(rows)
    buffers = aligned_buffers(shapes, num_shards, granularity, itemsize)
    assert [members for members, _ in buffers] == split_for_padding(shapes, num_shards, granularity)
    for members, layout in buffers:
        assert [slot.shape for slot in layout.slots] == [shapes[index] for index in members]
        line = layout.alignment.line * itemsize
        assert line in (128, 64, 32, 16) or layout.alignment == UNALIGNED
        assert layout.shard_numel * itemsize % line == 0
        for numel, start in _starts(layout):
            nbytes = min(line, 16) if numel * itemsize < line else line
            assert start * itemsize % nbytes == 0
        for index, slot in enumerate(layout.slots):
            cell = granularity.granule_numel(slot.shape)
            for shard in range(num_shards):
                start, end = layout.local_range(index, shard)
                assert start == end or start % cell == 0
                assert end in (start, slot.numel) or end % cell == 0
    padding = sum(layout.padding_numel for _, layout in buffers)
    promised = max(0.01 * numel_of(shapes), _unaligned(shapes, num_shards, granularity))
    assert padding <= max(promised, 4096)
    if padding > promised:
        # Only what kernels need may cost so much.
        assert min(layout.alignment.line for _, layout in buffers) * itemsize == 16


@settings(max_examples=150)
@given(shapes=ANY_SHAPES, num_shards=ANY_RANKS, itemsize=ITEMSIZES)
def test_the_alignment_of_a_single_buffer_is_the_strongest_that_is_affordable(
    shapes: list[Shape], num_shards: int, itemsize: int
) -> None:
    buffers = aligned_buffers(shapes, num_shards, ROW, itemsize)
    if len(buffers) > 1:
        return
    free = max(0.01 * numel_of(shapes), _unaligned(shapes, num_shards, ROW))
    expected = UNALIGNED
    for nbytes, affordable in ((128, free), (64, free), (32, free), (16, max(free, 4096))):
        strength = Alignment(nbytes // itemsize, max(16 // itemsize, 1))
        if BufferLayout.plan(shapes, num_shards, ROW, strength).padding_numel <= affordable:
            expected = strength
            break
    assert buffers[0][1].alignment == expected


@settings(max_examples=100)
@given(shapes=ANY_SHAPES, num_shards=ANY_RANKS)
def test_nothing_that_is_packed_two_to_a_byte_starts_within_one(
    shapes: list[Shape], num_shards: int
) -> None:
    even = [(*shape[:-1], 2 * shape[-1]) if len(shape) > 1 else (*shape, 2) for shape in shapes]
    for members, layout in aligned_buffers(even, num_shards, ROW, 0.5):
        assert layout.alignment.line in (2, 32, 64, 128, 256)
        memory = torch.zeros(layout.numel // 2, dtype=torch.uint8)
        buffer = DataParallelBuffer(layout, Span(0, num_shards), memory, packing=2)
        assert 2 * buffer.nbytes == layout.numel
        for position, index in enumerate(members):
            view = buffer.view(position)
            assert view.shape == (*even[index][:-1], even[index][-1] // 2)
            view += 1
        # Of each byte exactly one view has written, and padding is as it was.
        assert int(buffer.tensor.sum()) == layout.param_numel // 2
        assert bool((buffer.tensor <= 1).all())
        pieces = [buffer.piece(Span(shard, 1)) for shard in range(num_shards)]
        assert torch.equal(torch.cat(pieces), buffer.tensor)


def test_elements_of_a_line_follow_from_the_smallest_dtype_that_is_bound() -> None:
    fp32, bf16, fp8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
    mixed = MixedPrecisionPolicy(param_dtype=bf16, main_params_dtype=fp32, main_grads_dtype=fp32)
    narrow = MixedPrecisionPolicy(grad_comm_dtype=bf16)
    cases = [(mixed, fp32, 64), (MixedPrecisionPolicy(), fp32, 32), (narrow, fp32, 64)]
    cases += [(mixed, fp8, 128), (MixedPrecisionPolicy(), torch.int64, 16)]
    for policy, dtype, line in cases:
        assert Alignment.of(policy.resolve(dtype).smallest_itemsize).line == line


def test_short_parameters_share_lines_beside_a_matrix_that_keeps_its_own() -> None:
    shapes = [(512, 512), *[(3,)] * 100]
    ((_, layout),) = aligned_buffers(shapes, 2, ROW, 2)
    assert layout.alignment == Alignment(64, 8)
    assert layout.slots[0].offset % 64 == 0
    assert {slot.offset % 8 for slot in layout.slots} == {0}
    assert any(slot.offset % 64 for slot in layout.slots)
    assert layout.padding_numel <= 0.01 * layout.param_numel


@pytest.mark.parametrize(
    ("shapes", "num_shards", "nbytes"),
    [
        # Rows of 1,000 elements meet 128 bytes after eight of them, 32 bytes after two. On 64 ranks
        # each has ten.
        ([(4096, 1000)], 2, 128),
        ([(640, 1000)], 64, 32),
        # Those of 999 meet 16 bytes after eight.
        ([(640, 999)], 64, 2),
        # A bias of seven elements on eight ranks: 57 elements of padding are nothing.
        ([(7,)], 8, 16),
        # On 1,024 ranks, 16 bytes on each would be 8,192 elements.
        ([(7,)], 1024, 2),
    ],
)
def test_what_gives_where_padding_would_pass_the_promise(
    shapes: list[Shape], num_shards: int, nbytes: int
) -> None:
    ((_, layout),) = aligned_buffers(shapes, num_shards, ROW, 2)
    assert layout.alignment.line * 2 == nbytes


def test_the_buffer_that_alignment_costs_most_gives_first() -> None:
    # Rows of 1,000 elements are in a buffer of their own, ten on each rank.
    buffers = aligned_buffers([(12800, 512), (640, 1000)], 64, ROW, 2)
    lines = {layout.slots[0].shape: layout.alignment.line for _, layout in buffers}
    assert lines == {(12800, 512): 64, (640, 1000): 16}


def test_a_layout_that_breaks_its_alignment_is_rejected() -> None:
    with pytest.raises(ValueError, match="slice of 12 elements breaks"):
        BufferLayout((), 1, 12, Alignment(8, 2))
    with pytest.raises(ValueError, match="start of ParamSlot"):
        BufferLayout((ParamSlot((8,), 4, 1),), 1, 16, Alignment(8, 2))
    BufferLayout((ParamSlot((7,), 4, 1),), 1, 16, Alignment(8, 2))


def test_views_of_real_units_start_at_lines_of_128_bytes_for_no_more_than_a_tenth_percent() -> None:
    for unit, (shapes, all_ranks) in REAL_UNITS.items():
        for ranks in all_ranks:
            buffers = aligned_buffers(shapes, ranks, ROW, 2)
            assert {start * 2 % 128 for _, plan in buffers for _, start in _starts(plan)} == {0}, (
                unit
            )
            more = sum(plan.padding_numel for _, plan in buffers) - _unaligned(shapes, ranks, ROW)
            assert more <= 0.001 * numel_of(shapes), (unit, ranks)


def _table() -> str:
    """The second table of docs/layout.md."""
    rows = []
    for unit, (shapes, all_ranks) in REAL_UNITS.items():
        for ranks in all_ranks:
            buffers = aligned_buffers(shapes, ranks, ROW, 2)
            before = [
                BufferLayout.plan([shapes[index] for index in members], ranks)
                for members, _ in buffers
            ]
            after = [layout for _, layout in buffers]
            at = sorted({start * 2 % 128 for plan in before for _, start in _starts(plan)})
            line = math.gcd(128, *(start * 2 for plan in after for _, start in _starts(plan)))
            modulo = _few(sorted({start % 16 for start in at}))
            cells = (unit, f"{ranks}", modulo, _few(at), _percent(before), f"{line}")
            rows.append((*cells, _percent(after)))
    columns = "unit|ranks|unaligned: modulo 16|modulo 128|padding|aligned to|padding"
    return table(columns.split("|"), rows, ["---", "--:", "---", "---", "--:", "--:", "--:"])


def _few(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return shown if len(numbers) <= 4 else f"{shown}, ... {numbers[-1]}"


def _percent(layouts: Sequence[BufferLayout]) -> str:
    padding = sum(layout.padding_numel for layout in layouts)
    return f"{100 * padding / sum(layout.param_numel for layout in layouts):.3f} %"


def test_the_table_of_the_documentation_is_current(request: pytest.FixtureRequest) -> None:
    check_part(request, "docs/layout.md", "alignment", _table())
