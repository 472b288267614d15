"""Memory on CUDA, by the statistics of torch's allocator.

At world size 1 nothing is gathered: what rests is whole weights, and what comes and goes is
gradients, and full gradient buffers, of which the bounded in-flight queue allows two units' worth.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.allocations import steady_nbytes
from tests.distributed.wrapping import wrap
from tests.gpu.conftest import NEEDS_GPU
from tests.parity.test_parity import STRATEGIES
from tests.reference.models import Block

pytestmark = NEEDS_GPU

WIDTH = 1024
NUM_UNITS = 8
SLACK = 4 << 20
"""Bytes for activations, rounding of the allocator, and what libraries keep."""


def _step(model: Any) -> None:
    model(torch.ones(4, WIDTH, device="cuda")).square().mean().backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_at_rest_and_at_its_peak_a_step_holds_what_the_layout_says(
    mesh: DeviceMesh, strategy: str
) -> None:
    # Matrix libraries allocate their workspaces, in the forward's and the backward's thread.
    layer = nn.Linear(WIDTH, WIDTH, device="cuda")
    _step(layer)
    del layer
    gc.collect()
    before = torch.cuda.memory_allocated()
    model: Any = nn.Sequential(*(Block(WIDTH) for _ in range(NUM_UNITS))).cuda()
    wrap(model, list(model), mesh=mesh, sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        _step(model)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    groups = [group for block in model for group in unit_of(block).groups]
    expected = sum(steady_nbytes(group.weights) for group in groups)
    resting = torch.cuda.memory_allocated() - before
    assert expected <= resting <= expected * 1.02 + SLACK
    torch.cuda.reset_peak_memory_stats()
    _step(model)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - resting
    unit = max(group.layout.numel * 4 for group in groups)
    # All gradients, two full buffers, and gradients of one unit as autograd hands them over.
    assert unit <= peak - expected <= 3 * unit + SLACK


def test_the_trace_pool_changes_no_bit_and_allocates_nothing(mesh: DeviceMesh) -> None:
    results, allocated = [], []
    for pooled in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(Block(WIDTH) for _ in range(NUM_UNITS))).cuda()
        wrap(model, list(model), mesh=mesh, enable_trace_pool=pooled)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(6):
            if pooled and step == 5:
                allocated.append(model.trace_pool().num_allocations)
            _step(model)
            optimizer.step()
            optimizer.zero_grad()
        if pooled:
            assert [model.trace_pool().num_allocations] == allocated > [0]
            assert all(report.plan is not None for report in model.trace_pool().reports())
        results.append([param.to_local().clone() for param in model.parameters()])
    assert all(map(torch.equal, *results))
