"""The CPU's reduce-scatter: a sum in rank order, from as little memory as can be."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm import backends
from megatron_fsdp_v2.comm.interface import Axis, Collective, CollectiveKind, CommStream
from tests.distributed.allocations import peak_nbytes
from tests.ranks import RankPools

NUMEL = 5000
"""Of a piece; with chunks of 1000 the last one is full, with 1536 it is not."""


def _axis() -> Axis:
    return Axis(dist.group.WORLD, dist.get_world_size(), dist.get_rank())


def _full(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUMEL * dist.get_world_size(), generator=generator).to(dtype)


def _sum(
    into: torch.Tensor, full: torch.Tensor, scale: float = 1.0, accumulate: bool = False
) -> Collective:
    kind = CollectiveKind.REDUCE_SCATTER
    return Collective(kind, into, full, _axis(), CommStream.REDUCE, scale, accumulate)


def cases_with_other_bits(chunk: int) -> list[str]:
    """Cases whose result is not the sum in rank order, in the dtype of the result."""
    rank, size = dist.get_rank(), dist.get_world_size()
    communicator, found = backends.CpuCommunicator(), []
    whole, backends._CHUNK = backends._CHUNK, chunk
    try:
        dtypes = (torch.float32, torch.bfloat16)
        for wire, accumulate, scale in itertools.product(dtypes, (False, True), (1.0, 0.3)):
            total = torch.zeros(NUMEL)
            for other in range(size):
                piece = _full(other, wire).view(size, -1)[rank].float()
                total = piece if other == 0 else total + piece
            into = torch.ones(NUMEL)
            expected = torch.add(into, total, alpha=scale) if accumulate else total * scale
            work = communicator.issue(
                _sum(into, _full(rank, wire), scale, accumulate), async_op=True
            )
            work.wait()
            work.wait()
            if not torch.equal(into, expected):
                found.append(f"{wire} {accumulate} {scale}")
    finally:
        backends._CHUNK = whole
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_sum_is_made_in_rank_order_in_the_dtype_of_the_result(
    pools: RankPools, world_size: int
) -> None:
    for chunk in (1000, 1536):
        assert not any(pools(world_size).run(cases_with_other_bits, chunk))


def bytes_of_a_reduction() -> tuple[int, int]:
    """What a reduction allocates at most beside its arguments, and bytes of a piece."""
    full, into = _full(dist.get_rank(), torch.float32), torch.empty(NUMEL)

    def reduce() -> None:
        communicator = backends.CpuCommunicator()
        communicator.issue(_sum(into, full), async_op=True).wait()

    reduce()
    return peak_nbytes(reduce), 4 * NUMEL


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_receives_what_others_send_and_no_piece_of_its_own(
    pools: RankPools, world_size: int
) -> None:
    for allocated, piece in pools(world_size).run(bytes_of_a_reduction):
        assert (world_size - 1) * piece <= allocated < (world_size - 0.9) * piece
