"""Waits that are measured in a training, and a training that is none the wiser."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.diagnostics import OverlapReport, Reason, memory_tracker, overlap_tracker
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, listen, on_mesh, step_all, wrap
from tests.reference.models import INPUT, Formula, Stack


def _step(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, INPUT)).square().mean().backward()
    step_all(optimizer)


def _trained(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for _ in range(2):
        _step(model, optimizer)
    return optimizer


def _late(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes nothing, on one rank for a while."""
    if dist.get_rank() == 1:
        time.sleep(0.2)
    return x


@on_ranks(2)
def test_a_rank_that_waits_for_a_late_one_says_for_which_collective_and_how_long() -> None:
    model: Any = Stack(4)
    # After what the unit has gathered ahead, and before the gather after that.
    model.blocks[1] = nn.Sequential(model.blocks[1], Formula(_late))
    wrap(model)
    optimizer = _trained(model)
    dist.barrier()
    with overlap_tracker(model) as overlap:
        _step(model, optimizer)
    found: OverlapReport = overlap.result
    assert 0.2 <= found.seconds < 5.0
    if dist.get_rank() == 0:
        longest = max(found.exposures, key=lambda each: each.seconds)
        assert (longest.unit, longest.purpose) == ("blocks.3", "unshard")
        assert 0.1 < longest.seconds <= found.exposed_seconds <= found.seconds
        assert longest.reason in (Reason.COMPUTE, Reason.LIMIT)
        assert "blocks.3" in overlap.report()
    else:
        assert found.exposed_seconds < 0.1


@on_ranks(4)
def test_every_collective_of_a_step_is_listed_and_no_bit_of_a_result_is_another() -> None:
    for strategy in STRATEGIES:
        bits = []
        for is_tracked in (False, True):
            torch.manual_seed(0)
            model = wrap(Stack(3), sharding_strategy=strategy, **on_mesh("HSDP 2x2"))
            optimizer = _trained(model)
            if is_tracked:
                with memory_tracker(model, optimizer), overlap_tracker(model) as overlap:
                    _step(model, optimizer)
                listed = [(each.kind, each.nbytes) for each in overlap.result.exposures]
                wire = listen(model)
                with overlap_tracker(model) as again:
                    _step(model, optimizer)
                assert len(again.result.exposures) == len(listed) >= 8, strategy
                assert {each.axis for each in again.result.exposures} == {"inner", "outer"}
                gathers = sum(kind == "all_gather" for kind, _ in listed)
                assert gathers == wire.count("all_gather"), strategy
            else:
                for _ in range(2):
                    _step(model, optimizer)
            # Tracking is over, and so is what it put in place.
            _step(model, optimizer)
            bits.append([param.to_local().clone() for param in model.parameters()])
        assert all(map(torch.equal, *bits)), strategy
