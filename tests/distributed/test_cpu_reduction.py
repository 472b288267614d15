"""The CPU's reduce-scatter: a sum in rank order, from as little memory as can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm import backends
from megatron_fsdp_v2.comm.interface import Axis, Collective, CollectiveKind, CommStream
from tests.distributed.allocations import peak_nbytes
from tests.distributed.on_ranks import on_ranks

NUMEL = 5000
"""Of a piece; with chunks of 1000 the last one is full, with 1536 it is not."""


def _reduced(
    into: torch.Tensor,
    full: torch.Tensor,
    scale: float,
    accumulate: bool,
    arrival: torch.Tensor | None = None,
) -> Any:
    axis = Axis(dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    kind = CollectiveKind.REDUCE_SCATTER
    where = axis, CommStream.REDUCE
    collective = Collective(kind, into, full, *where, scale, accumulate, arrival=arrival)
    return backends.CpuCommunicator().issue(collective, async_op=True)


def _full(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUMEL * dist.get_world_size(), generator=generator).to(dtype)


def _end_of(into: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return into.view(dtype)[-into.numel() :]


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("accumulate", [False, True], ids=["into", "added"])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
@on_ranks("world_size", world_size=[2, 3, 4], chunk=[1000, 1536])
def test_the_sum_is_made_in_rank_order_in_the_dtype_of_the_result(
    world_size: int, chunk: int, wire: torch.dtype, accumulate: bool, scale: float
) -> None:
    rank = dist.get_rank()
    total = torch.zeros(NUMEL)
    for other in range(world_size):
        piece = _full(other, wire).view(world_size, -1)[rank].float()
        total = piece if other == 0 else total + piece
    # What arrives there would be added as well.
    into = torch.ones(NUMEL)
    arrival = _end_of(into, wire) if world_size == 2 else None
    expected = torch.add(into, total, alpha=scale) if accumulate else total * scale
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "SUM_CHUNK", chunk)
        work = _reduced(into, _full(rank, wire), scale, accumulate, arrival)
        work.wait()
        work.wait()
    assert torch.equal(into, expected)


@on_ranks("world_size", world_size=[2, 3, 4])
def test_a_rank_receives_what_others_send_and_no_piece_of_its_own(world_size: int) -> None:
    full, into = _full(dist.get_rank(), torch.float32), torch.empty(NUMEL)

    def reduce() -> None:
        _reduced(into, full, 1.0, accumulate=False).wait()

    reduce()
    piece = 4 * NUMEL
    assert (world_size - 1) * piece <= peak_nbytes(reduce) < (world_size - 0.9) * piece


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_what_arrives_in_the_result_takes_no_memory_but_for_a_chunk_in_another_dtype(
    wire: torch.dtype,
) -> None:
    full, into = _full(dist.get_rank(), wire), torch.empty(NUMEL)
    chunk = 500

    def reduce() -> None:
        _reduced(into, full, 0.5, accumulate=False, arrival=_end_of(into, wire)).wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "SUM_CHUNK", chunk)
        reduce()
        peak = peak_nbytes(reduce)
    # One chunk of the sum, and one that torch makes of what is added; numbers of elements as well.
    assert peak < 100 + (0 if wire == torch.float32 else 2 * 4 * chunk)
