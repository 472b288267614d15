"""The communicator's communication streams on real CUDA streams.

One GPU has no peers, so the collectives are replaced by local copies that are slow on purpose:
every rank of the axis is taken to hold what this one holds. Streams, events and works are real;
a missing wait would show old contents. NCCL itself runs where two GPUs are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from megatron_fsdp_v2.comm.backends import CudaStreams, communicator_for
from megatron_fsdp_v2.comm.interface import Axis, Collective, CollectiveKind, CommStream
from megatron_fsdp_v2.comm.streams import StreamCommunicator

pytestmark = pytest.mark.usefixtures("cuda_machine")

SLOW = 20_000_000
"""Cycles of a pause: about ten milliseconds."""
NUMEL = 1 << 16


class SlowCopies:
    """Collectives among ranks that all hold what this one holds."""

    def __init__(self) -> None:
        self.streams: list[int] = []

    def _pause(self) -> None:
        self.streams.append(torch.cuda.current_stream().cuda_stream)
        torch.cuda._sleep(SLOW)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, axis: Axis) -> None:
        self._pause()
        output.view(axis.size, -1).copy_(shard.expand(axis.size, -1))

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, axis: Axis) -> None:
        self._pause()
        output.copy_(full[: output.numel()] * axis.size)

    def all_reduce(self, full: torch.Tensor, axis: Axis) -> None:
        self._pause()
        full.mul_(axis.size)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_numels: Sequence[int],
        sent_numels: Sequence[int],
        axis: Axis,
    ) -> None:
        self._pause()
        received.copy_(sent)


@pytest.fixture
def copies() -> SlowCopies:
    return SlowCopies()


@pytest.fixture
def communicator(copies: SlowCopies) -> Iterator[StreamCommunicator]:
    yield StreamCommunicator(CudaStreams(), copies)
    torch.cuda.synchronize()


def _axis() -> Axis:
    group: Any = None
    return Axis(group, size=2, rank=0)


def _gather(
    output: torch.Tensor, shard: torch.Tensor, comm_stream: CommStream = CommStream.GATHER
) -> Collective:
    return Collective(CollectiveKind.ALL_GATHER, output, shard, _axis(), comm_stream)


def _written_late(value: float, numel: int = NUMEL, dtype: Any = torch.float32) -> torch.Tensor:
    """A tensor whose value the compute stream writes only after a pause."""
    tensor = torch.zeros(numel, device="cuda", dtype=dtype)
    torch.cuda._sleep(SLOW)
    return tensor.fill_(value)


def test_a_gather_comes_after_its_input_and_before_its_use(
    communicator: StreamCommunicator,
) -> None:
    output, shard = torch.zeros(2 * NUMEL, device="cuda"), _written_late(3.0)
    work = communicator.issue(_gather(output, shard), async_op=True)
    # The host is far ahead of the device: nothing but the stream's order can make this right.
    work.wait()
    used = output.clone()
    output.zero_()
    assert torch.equal(used, torch.full_like(used, 3.0))


@pytest.mark.parametrize("wire", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("cut", [True, False])
def test_a_reduction_comes_after_its_input_and_before_its_use(
    communicator: StreamCommunicator, wire: torch.dtype, accumulate: bool, cut: bool
) -> None:
    full = _written_late(3.0, dtype=wire)
    into = torch.full((NUMEL // 2 if cut else NUMEL,), 1.0, device="cuda")
    kind = CollectiveKind.REDUCE_SCATTER if cut else CollectiveKind.ALL_REDUCE
    collective = Collective(kind, into, full, _axis(), CommStream.REDUCE, 0.25, accumulate)
    work = communicator.issue(collective, async_op=True)
    work.wait()
    del full
    # The memory of the input goes to someone else, who writes it at once.
    other = torch.full((NUMEL,), 7.0, device="cuda", dtype=wire)
    used = into.clone()
    assert torch.equal(used, torch.full_like(used, 1.5 + accumulate))
    assert torch.equal(other, torch.full_like(other, 7.0))


def test_three_communication_streams_run_beside_the_compute_stream(
    communicator: StreamCommunicator, copies: SlowCopies
) -> None:
    for comm_stream in (*CommStream, *CommStream):
        output, shard = torch.zeros(8, device="cuda"), torch.ones(4, device="cuda")
        communicator.issue(_gather(output, shard, comm_stream), async_op=True).wait()
    compute = torch.cuda.current_stream().cuda_stream
    assert len(set(copies.streams)) == 3
    assert copies.streams[:3] == copies.streams[3:]
    assert compute not in copies.streams
    output, shard = torch.zeros(8, device="cuda"), torch.ones(4, device="cuda")
    communicator.issue(_gather(output, shard, CommStream.OUTER), async_op=False).wait()
    assert copies.streams[-1] == compute


def test_units_share_their_lanes() -> None:
    device = torch.device("cuda", 0)
    assert communicator_for(device) is communicator_for(torch.device("cuda", 0))
