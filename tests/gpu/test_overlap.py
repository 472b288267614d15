"""Overlap of communication and computation in a profiler's trace of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.wrapping import BF16
from tests.gpu.machine import Machine, profiled, sharded_blocks, synchronize

FLOOR = 0.6
"""Minimum fraction of communication time that overlaps computation.

The first gather of a forward and the last reduction of a backward cannot overlap computation. The
floor is low enough for slow links.
"""

type Interval = tuple[float, float]


def overlap_fraction(kernels: Sequence[tuple[str, Interval]]) -> float | None:
    """Return the fraction of NCCL's time that overlaps other kernels; None without NCCL kernels.

    Args:
        kernels: Names, and start and end times.
    """
    is_comm = [("nccl" in name.lower(), interval) for name, interval in kernels]
    comm = _merged([interval for comm, interval in is_comm if comm])
    compute = _merged([interval for comm, interval in is_comm if not comm])
    total = sum(end - begin for begin, end in comm)
    both = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in comm
        for other_begin, other_end in compute
    )
    return both / total if total else None


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Merge overlapping intervals."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def kernels_of(trace: Path) -> list[tuple[str, Interval]]:
    """Return the device events of a trace: names, and start and end times in microseconds."""
    events = json.loads(trace.read_text())["traceEvents"]
    return [
        (event["name"], (event["ts"], event["ts"] + event["dur"]))
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def traced(device: str, layers: int, width: int, folder: str) -> float | None:
    """Return the overlap fraction of a step at ZeRO-3 on this rank."""
    model = sharded_blocks(device, layers, width, mp_policy=BF16)
    data = torch.ones(4 * width, width, device=device)
    for _ in range(3):
        model(data).float().square().mean().backward()
    with profiled(device) as profile:
        model(data).float().square().mean().backward()
        synchronize(device)
    trace = Path(folder) / f"trace_{dist.get_rank()}.json"
    profile.export_chrome_trace(str(trace))
    return overlap_fraction(kernels_of(trace))


def test_most_communication_overlaps_computation(machine: Machine, tmp_path: Path) -> None:
    machine.require(2)
    layers, width = (16, 4096) if machine.on_cuda else (2, 8)
    shares = machine.run(traced, layers, width, str(tmp_path))
    machine.require_cuda()
    assert all(share is not None and share >= FLOOR for share in shares), shares
