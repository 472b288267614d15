"""Bandwidth of all-gathers by size, compared with torch's own call."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm.backends import communicator_for
from megatron_fsdp_v2.comm.interface import (
    Axis,
    Collective,
    CollectiveKind,
    CommStream,
    Communicator,
)
from tests.gpu.machine import Machine, synchronize

MIB = 1 << 20
SIZES = (1, 16, 128, 512)
"""Sizes of the gathered tensor in MiB."""
FLOOR = 0.9
"""Minimum fraction of torch's bandwidth, from 16 MiB on."""


def _seconds(device: str, call: Callable[[], None], repeats: int) -> float:
    """Return the median time of a call."""
    times = []
    for repeat in range(repeats + 2):
        synchronize(device)
        dist.barrier()
        began = time.perf_counter()
        call()
        synchronize(device)
        if repeat >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _gather(communicator: Communicator, gather: Collective) -> None:
    communicator.issue(gather, async_op=True).wait()


def bandwidths(device: str, sizes: tuple[int, ...], repeats: int) -> dict[str, dict[str, float]]:
    """Return GB/s by size, ours and torch's: bytes that a rank receives from others over time."""
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    assert group is not None
    communicator = communicator_for(torch.empty(0, device=device).device)
    found: dict[str, dict[str, float]] = {}
    for mib in sizes:
        numel = mib * MIB // 2 // size * size
        output = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        shard = output.view(size, -1)[rank]
        axis = Axis(group, size=size, rank=rank)
        gather = Collective(CollectiveKind.ALL_GATHER, output, shard, axis, CommStream.GATHER)
        calls: dict[str, Callable[[], Any]] = {
            "ours": functools.partial(_gather, communicator, gather),
            "torch's": functools.partial(dist.all_gather_into_tensor, output, shard),
        }
        received = 2 * numel * (size - 1) / size / 1e9
        found[f"{mib} MiB"] = {
            name: received / _seconds(device, call, repeats) for name, call in calls.items()
        }
    return found


def test_gathers_reach_90_percent_of_torchs_bandwidth(
    machine: Machine, record_property: Callable[[str, object], None]
) -> None:
    machine.require(2)
    sizes, repeats = (SIZES, 20) if machine.on_cuda else ((1,), 1)
    found = machine.run(bandwidths, sizes, repeats)[0]
    for size, of in found.items():
        record_property(f"GB/s of {size}", round(of["ours"], 1))
    machine.require_cuda()
    large = {size: of for size, of in found.items() if size != "1 MiB"}
    assert all(of["ours"] >= FLOOR * of["torch's"] for of in large.values()), large
