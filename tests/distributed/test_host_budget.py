"""The host work of a step per additional unit, counted and limited by a budget."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import megatron_fsdp_v2
from benchmarks.common import Block, fake_ranks, ours
from megatron_fsdp_v2 import RuntimeOptions
from tests.distributed.wrapping import Dispatched

PACKAGE = str(Path(megatron_fsdp_v2.__file__).parent)
FEW, MANY = 8, 24


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    model.zero_grad()


def _calls(model: nn.Module, x: torch.Tensor) -> int:
    """Calls of Python functions of this package in a step."""
    found = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    # A garbage collection may call finalizers.
    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        _step(model, x)
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def _nodes(model: nn.Module, x: torch.Tensor) -> int:
    """Number of nodes in the autograd graph of a forward."""
    left, seen = [model(x).sum().grad_fn], set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return len(seen)


def _counts(num_units: int, wrap: Any) -> Counter[str]:
    x = torch.randn(4, 16)
    with fake_ranks() as mesh:
        model = wrap(nn.Sequential(*(Block(16) for _ in range(num_units))), mesh)
        for _ in range(3):
            _step(model, x)
        operations: list[Any] = []
        with Dispatched(lambda func, *_: operations.append(func)):
            _step(model, x)
        num_calls, num_nodes = _calls(model, x), _nodes(model, x)
        return Counter(calls=num_calls, operations=len(operations), nodes=num_nodes)


def _per_unit(wrap: Any) -> dict[str, float]:
    few, many = _counts(FEW, wrap), _counts(MANY, wrap)
    return {name: (many[name] - few[name]) / (MANY - FEW) for name in many}


# Per unit of four parameters, without the work of the module itself. A change that needs more
# states the reason here; a change that needs less lowers the number.
# Every unit checks whether its pass is captured in a CUDA graph (2 calls) and how users end
# backwards (2), compares versions (1), and asks the observer at every phase (10 to 12).
# Reductions are in the order of all roots (7 below ZeRO-3), and a unit that runs twice is known (6
# at ZeRO-3). The memory of a failed gather is freed (6 at ZeRO-3). Gathered parameters change
# their class when their memory is freed and taken (4 at ZeRO-3), and are checked for changes in
# place (2). Main gradients are allocated for each reduction: one allocation, and two operations
# for every parameter. No special case skips a wait for finished work (1), the order of gradient
# writes (4), or a look ahead that finds no unit (4 below ZeRO-3). A forward notes whether it may
# be recomputed, and the arguments that it may write into (5). Every collective passes through one
# function that reports it (1 to 3), and every group tells whether this rank had its gradient (2).
# Buffers and gradients ask for their stream where a communicator has none, too (6 to 13).
BUDGETS = {
    "no_shard": {"calls": 253, "operations": 18, "nodes": 1},
    "optim_grads": {"calls": 286, "operations": 25, "nodes": 1},
    "optim_grads_params": {"calls": 304, "operations": 23, "nodes": 1},
}


@pytest.mark.parametrize("strategy", BUDGETS)
def test_host_work_of_a_unit_is_within_its_budget(strategy: str) -> None:
    plain = _per_unit(lambda model, mesh: model)
    found = _per_unit(ours(strategy, options=RuntimeOptions(check_ranks="never")))
    for name, most in BUDGETS[strategy].items():
        # Counts are exact; a budget far above its count would detect nothing.
        assert 0.9 * most <= found[name] - plain[name] <= most, (name, found[name] - plain[name])
