"""Ranks of slices, against the definition: coordinates times strides add up to the slice."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.layout.placement import Placement
from megatron_fsdp_v2.params.buffer import ShardGrid

R, S = Placement.REPLICATE, Placement.SHARD


@pytest.mark.parametrize("sizes", [(1,), (5,), (3, 4), (2, 1), (1, 6), (4, 2)])
@pytest.mark.parametrize("placements", itertools.product((R, S), repeat=2))
def test_ranks_of_slices_are_those_whose_coordinates_give_them(
    sizes: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    axes = [Axis(cast("Any", None), size, 0) for size in sizes]
    grid = ShardGrid.of(axes, placements[: len(sizes)])
    every = list(itertools.product(*map(range, sizes)))
    slice_of = {c: sum(i * s for i, s in zip(c, grid.strides, strict=True)) for c in every}
    assert set(slice_of.values()) == set(range(grid.num_slices))
    for slices in (set[int](), {0}, {grid.num_slices - 1}, set(range(0, grid.num_slices, 2))):
        assert grid.coordinates_of(slices) == {c for c in every if slice_of[c] in slices}
