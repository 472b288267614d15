"""Blocks of a full parameter that correspond to a rank's rows under tensor parallelism."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_v2.dtensor.row_shards import RowShards, TensorShard


class Mesh:
    """Stub of a (dp, tp) mesh with the methods that `TensorShard` uses."""

    ndim = 2

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self, axis: int) -> int:
        assert axis == 1
        return self._size

    def get_local_rank(self, axis: int) -> int:
        assert axis == 1
        return self._rank


def tensor_shard(
    size: int, rank: int, dim: int | None, pieces: tuple[int, ...] = ()
) -> TensorShard:
    """Return the shard of a tensor-parallel rank, without a process group."""
    mesh: Any = Mesh(size, rank)
    return TensorShard(mesh, dim, pieces)


@st.composite
def _cut(draw: st.DrawFn) -> tuple[int, list[int], int | None, int, tuple[int, int], list[int]]:
    """Draw TP size, fused lengths, dim, size of the other dim, TP-local shape, row boundaries."""
    size = draw(st.integers(1, 4))
    pieces = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dim = draw(st.sampled_from([None, 0, 1]))
    other = draw(st.integers(1, 4))
    part = (sum(pieces), other) if dim in (None, 0) else (other, sum(pieces))
    cuts = sorted(draw(st.lists(st.integers(0, part[0]), max_size=3)))
    return size, pieces, dim, other, part, cuts


@given(_cut())
def test_chunks_of_all_ranks_cover_the_parameter_once(
    cut: tuple[int, list[int], int | None, int, tuple[int, int], list[int]],
) -> None:
    size, pieces, dim, _, part, cuts = cut
    bounds = [0, *cuts, part[0]]
    ranges = list(itertools.pairwise(bounds))
    whole_shape = tensor_shard(size, 0, dim).global_shape(part)
    whole = torch.arange(whole_shape[0] * whole_shape[1]).view(whole_shape)
    found = torch.full(whole_shape, -1)
    for tensor_rank in range(1 if dim is None else size):
        tensor = tensor_shard(size, tensor_rank, dim, tuple(pieces))
        # A rank's TP-local shard: its part of every fused sub-tensor, concatenated.
        axis = 0 if dim is None else dim
        fused = torch.split(whole, [length * tensor.size for length in pieces], axis)
        mine = torch.cat([torch.chunk(f, tensor.size, axis)[tensor.rank] for f in fused], axis)
        for shard, (start, end) in enumerate(ranges):
            shards = RowShards(ranges, (1, 0)[:1], tensor)
            assert shards.rows_at((shard, tensor_rank)) == (start, end)
            local = mine[start:end]
            for chunk in shards.chunks((start, end), part):
                block = tuple(
                    slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True)
                )
                assert bool((found[block] == -1).all()), "two ranks hold one block"
                found[block] = local[chunk.local]
    assert torch.equal(found, whole)


def test_an_empty_shard_has_no_chunks() -> None:
    shards = RowShards([(0, 0), (0, 4)], (1,), tensor_shard(2, 0, 0))
    assert list(shards.chunks((0, 0), (4, 3))) == []
    assert list(shards.chunks((0, 4), (4, 0))) == []
