"""The host does not synchronize with the device in a step; host time and launches are shown."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.distributed.wrapping import BF16, STRATEGIES
from tests.gpu.machine import Machine, profiled, sharded_blocks, synchronize

UNITS = 32
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


@contextlib.contextmanager
def _forbid_synchronization(device: str) -> Iterator[None]:
    """Make torch raise when the host synchronizes with the device."""
    synchronize(device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def host_cost_per_unit(device: str, strategy: str, units: int, width: int) -> dict[str, float]:
    """Return the host time in ms and the number of launches of a step, per unit."""
    torch.manual_seed(0)
    model = sharded_blocks(device, units, width, mp_policy=BF16, sharding_strategy=strategy)
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
        with _forbid_synchronization(device):
            began = time.perf_counter()
            step()
            times.append(1000 * (time.perf_counter() - began))
    with profiled(device) as profile:
        step()
    names = LAUNCHES if device == "cuda" else ("aten::",)
    launches = [event for event in profile.events() or () if event.name.startswith(names)]
    return {"host ms": statistics.median(times) / units, "launches": len(launches) / units}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_host_does_not_synchronize_in_a_step(
    machine: Machine, strategy: str, record_property: Callable[[str, object], None]
) -> None:
    # Units are small, so that the host never waits for room in the launch queue.
    units = UNITS if machine.on_cuda else 4
    found = machine.run(host_cost_per_unit, strategy, units, 64)[0]
    for name, value in found.items():
        record_property(f"{name} per unit", round(value, 2))
    machine.require_cuda()
