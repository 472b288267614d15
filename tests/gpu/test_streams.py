"""The communicator's communication streams on real CUDA streams.

One GPU has no peers, so the collectives are replaced by local copies that are slow on purpose:
every rank of the axis is taken to hold what this one holds. Streams, events and works are real;
a missing wait would show old contents. NCCL itself runs where two GPUs are there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile

from megatron_fsdp_v2.comm.backends import CudaStreams, communicator_for
from megatron_fsdp_v2.comm.interface import Axis, Collective, CollectiveKind, CommStream
from megatron_fsdp_v2.comm.streams import StreamCommunicator
from tests.distributed.wrapping import wrap
from tests.gpu.conftest import NEEDS_GPU
from tests.reference.models import Block

pytestmark = NEEDS_GPU

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

    def in_one(self, axis: Axis) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


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


# -- traces ---------------------------------------------------------------------------------------


def _kernels(trace: Path) -> list[tuple[str, int, float, float]]:
    """Name, stream, start and end (in microseconds) of everything that ran on the device."""
    events = json.loads(trace.read_text())["traceEvents"]
    return [
        (e["name"], e["args"]["stream"], e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def test_a_trace_shows_communication_beside_computation(
    communicator: StreamCommunicator, tmp_path: Path
) -> None:
    big = torch.ones(2048, 2048, device="cuda")
    output, shard = torch.zeros(8, device="cuda"), torch.ones(4, device="cuda")
    # Loading kernels for the first time takes longer than the pause.
    big @ big
    communicator.issue(_gather(output, shard), async_op=True).wait()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        work = communicator.issue(_gather(output, shard), async_op=True)
        for _ in range(4):
            big @ big
        work.wait()
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    kernels = _kernels(tmp_path / "trace.json")
    assert len({stream for _, stream, _, _ in kernels}) == 2
    (lane_stream,) = {stream for name, stream, _, _ in kernels if "spin" in name}
    comm_stream = [kernel for kernel in kernels if kernel[1] == lane_stream]
    products = [kernel for kernel in kernels if kernel[1] != lane_stream]
    assert _overlap(products, comm_stream) > 0.0


def _overlap(ours: list[Any], theirs: list[Any]) -> float:
    """The longest time, in microseconds, that two kernels ran side by side."""
    return max(
        min(end, other_end) - max(start, other_start)
        for _, _, start, end in ours
        for _, _, other_start, other_end in theirs
    )


def _profiled_step(rank: int, store: str, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
    model: Any = nn.Sequential(*(Block(2048) for _ in range(6))).cuda()
    wrap(model, list(model), mesh=mesh)
    data = torch.ones(2048, 2048, device="cuda")
    for _ in range(3):
        model(data).square().mean().backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        model(data).square().mean().backward()
        torch.cuda.synchronize()
    profiled.export_chrome_trace(f"{folder}/trace_{rank}.json")
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two CUDA devices")
def test_a_trace_of_two_ranks_shows_collectives_beside_computation(tmp_path: Path) -> None:
    spawn(_profiled_step, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    for rank in range(2):
        kernels = _kernels(tmp_path / f"trace_{rank}.json")
        for name in ("allgather", "reducescatter"):
            collectives = [k for k in kernels if name in k[0].lower()]
            others = [k for k in kernels if "nccl" not in k[0].lower()]
            assert _overlap(others, collectives) > 0.0, name
