"""What the host does in a step: it never waits, and how long it takes to queue a unit."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.distributed.wrapping import BF16, wrap
from tests.gpu.kit.delays import STRATEGIES
from tests.gpu.kit.machine import mesh_of
from tests.gpu.kit.running import Check, Outcome, Request, on_ranks
from tests.reference.models import Block

UNITS = 32
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


@contextlib.contextmanager
def _no_waits(device: str) -> Iterator[None]:
    """Have torch raise where the host waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def measured(device: str, strategy: str, units: int, width: int) -> dict[str, float]:
    """Of a step: milliseconds of the host, and launches, both of each unit."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block(width) for _ in range(units))).to(device)
    mesh = mesh_of(device, (dist.get_world_size(),))
    wrap(model, list(model), mesh=mesh, mp_policy=BF16, sharding_strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.ones(4, width, device=device)

    def step() -> None:
        model(data).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    times = []
    for _ in range(5):
        with _no_waits(device):
            began = time.perf_counter()
            step()
            times.append(1000 * (time.perf_counter() - began))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiled:
        step()
    names = LAUNCHES if device == "cuda" else ("aten::",)
    events = [event for event in profiled.events() or () if event.name.startswith(names)]
    return {"host_ms": statistics.median(times) / units, "launches": len(events) / units}


def of_all(device: str, strategies: Sequence[str], units: int) -> dict[str, dict[str, float]]:
    """See `measured`, by strategy."""
    return {strategy: measured(device, strategy, units, 64) for strategy in strategies}


def run(request: Request) -> Outcome:
    """Host time and launches of a unit, and that nothing waits: torch raises where something does.

    Units are small, so that the device is never what the host waits for in a queue.
    """
    units = UNITS if request.on_cuda else 4
    strategies = STRATEGIES[-1:] if request.is_small else STRATEGIES
    found = on_ranks(request, request.ranks, of_all, request.device, strategies, units)[0]
    text = ", ".join(
        f"{strategy}: {of['host_ms']:.2f} ms and {of['launches']:.0f} launches a unit"
        for strategy, of in found.items()
    )
    return Outcome.of(True, text, host=found)


CHECK = Check(
    "host",
    "torch's sync debug mode finds no wait in a step; host time and launches of a unit, measured",
    run,
    only_cuda=True,
)
