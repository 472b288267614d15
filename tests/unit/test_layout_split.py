"""Splits into flat buffers, compared with one buffer and with one buffer per row size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp_v2.layout import split as splits
from megatron_fsdp_v2.layout.buffer_layout import BufferLayout, Granularity
from megatron_fsdp_v2.layout.split import MIN_GAIN, aligned_buffers, split_for_padding
from tests.pages import check_part, table
from tests.reference.layout_bounds import RANKS, UNITS, Shape, numel_of

SHAPES = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple), max_size=14)
CHOICES: dict[str, Any] = {
    "granularity": st.sampled_from([Granularity(rows) for rows in (0, 1, 2)]),
    "tolerance": st.sampled_from([0.0, 0.01, 0.1, 0.3]),
}
ROW = Granularity(1)


def _slices(
    shapes: Sequence[Shape], split: Sequence[Sequence[int]], num_shards: int, granularity: Any = ROW
) -> int:
    """Return the number of elements of a rank's slices of all buffers of a split."""
    plans = [BufferLayout.plan([shapes[i] for i in b], num_shards, granularity) for b in split]
    return sum(plan.shard_numel for plan in plans)


def _padding(
    shapes: Sequence[Shape], split: Sequence[Sequence[int]], num_shards: int, granularity: Any = ROW
) -> int:
    return num_shards * _slices(shapes, split, num_shards, granularity) - numel_of(shapes)


@settings(max_examples=100)
@given(shapes=SHAPES, num_shards=st.integers(1, 64), **CHOICES)
def test_split_has_every_parameter_once_and_at_most_the_padding_of_one_buffer(
    shapes: list[Shape], num_shards: int, granularity: Granularity, tolerance: float
) -> None:
    with mock.patch.multiple(splits, TOLERANCE=tolerance, NEGLIGIBLE=0):
        split = split_for_padding(shapes, num_shards, granularity)
    assert sorted(itertools.chain(*split)) == list(range(len(shapes)))
    assert all(buffer and buffer == sorted(buffer) for buffer in split)
    assert split == sorted(split)
    whole = BufferLayout.plan(shapes, num_shards, granularity).padding_numel
    padding = _padding(shapes, split, num_shards, granularity)
    assert padding <= whole
    if whole <= tolerance * numel_of(shapes):
        assert len(split) <= 1
    elif padding > tolerance * numel_of(shapes):
        # Each buffer beyond the tolerance has to save the minimum gain.
        assert whole - padding >= MIN_GAIN * numel_of(shapes) * (len(split) - 1)


def test_negligible_padding_keeps_one_buffer() -> None:
    shapes = [(64, 48), (64,), (48, 64), (48,)]
    assert BufferLayout.plan(shapes, 7).padding_numel > 0.01 * numel_of(shapes)
    assert split_for_padding(shapes, 7, ROW) == [[0, 1, 2, 3]]
    with mock.patch.object(splits, "NEGLIGIBLE", 0):
        assert len(split_for_padding(shapes, 7, ROW)) > 1


def _table() -> str:
    """Return the table of docs/concepts.md; up to 2,048 ranks, padding must be at most 1 %."""
    rows = []
    for unit, shapes in UNITS.items():
        numel = numel_of(shapes)

        def percent(slices: int, ranks: int, numel: int = numel) -> str:
            return f"{max(100 * (ranks * slices / numel - 1), 0):.2f} %"

        for ranks in RANKS:
            # The planned buffers are aligned for bf16.
            planned = aligned_buffers(tuple(shapes), ranks, ROW, 2)
            slices = sum(plan.shard_numel for _, plan in planned)
            assert ranks * slices <= 1.01 * numel or ranks > 2048, (unit, ranks)
            one = percent(_slices(shapes, [range(len(shapes))], ranks), ranks)
            rows.append((unit, f"{ranks}", one, f"{len(planned)}", percent(slices, ranks)))
    return table(("unit", "ranks", "one buffer", "buffers", "padding"), rows, ["---", *["--:"] * 4])


def test_padding_is_at_most_one_percent_and_the_table_of_the_page_is_current(
    request: pytest.FixtureRequest,
) -> None:
    check_part(request, "docs/concepts.md", "table", _table())
