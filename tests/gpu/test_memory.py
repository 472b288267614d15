"""Memory on CUDA: torch's allocator agrees with layouts and plans."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_v2.diagnostics import memory_tracker
from megatron_fsdp_v2.layout.placement import ShardingStrategy
from megatron_fsdp_v2.plan import (
    MeshDescription,
    Strategy,
    TrainingDescription,
    describe_module,
    plan_one,
)
from megatron_fsdp_v2.runtime.module import unit_of
from tests.distributed.allocations import steady_nbytes
from tests.distributed.test_memory_bound import deep
from tests.distributed.wrapping import STRATEGIES, step_all, wrap
from tests.gpu.machine import Machine, mesh_of

SLACK = 4 << 20
"""Allowance in bytes for rounding by torch's allocator and workspaces of libraries."""


def measured(device: str, strategy: str, width: int) -> dict[str, int]:
    """Return bytes between steps and at the peak, by the tracker and by torch's allocator."""

    def allocated() -> int:
        gc.collect()
        return torch.cuda.memory_allocated() if device == "cuda" else 0

    # Matrix libraries allocate workspaces at their first use.
    warm = nn.Linear(width, width).to(device)
    warm(torch.ones(2, width, device=device)).sum().backward()
    del warm
    before = allocated()
    model: Any = deep(width=width).to(device)
    wrap(model, mesh=mesh_of(device), sharding_strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def step() -> None:
        model(torch.ones(2, width, device=device)).square().mean().backward()
        step_all(optimizer)
        optimizer.zero_grad()

    step()
    groups = [group for unit in (model, *model.blocks) for group in unit_of(unit).groups]
    states = [value for state in optimizer.state.values() for value in state.values()]
    steady = sum(map(steady_nbytes, groups)) + sum(t.to_local().nbytes for t in states if t.dim())
    found = {"layout": steady, "steady": allocated() - before}
    with memory_tracker(model, optimizer) as tracked:
        step()
    found["peak"] = tracked.peak.total
    if tracked.max_memory_allocated is not None:
        found["peak allocated"] = tracked.max_memory_allocated - before
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_of_a_step_is_within_its_layout_and_plan(
    machine: Machine, strategy: ShardingStrategy
) -> None:
    width = 1024 if machine.on_cuda else 64
    with torch.device("meta"):
        units, _ = describe_module(deep(width=width))
    meshes = {"dp": MeshDescription(machine.ranks)}
    training = TrainingDescription(units, meshes, on_cpu=not machine.on_cuda)
    planned = plan_one(training, Strategy(strategy)).peak_nbytes
    for found in machine.run(measured, strategy, width):
        allowed = planned * 1.02 + (SLACK if machine.on_cuda else 0)
        assert max(found["peak"], found.get("peak allocated", 0)) <= allowed, found
        if machine.on_cuda:
            assert found["layout"] <= found["steady"] <= found["layout"] * 1.02 + SLACK, found
