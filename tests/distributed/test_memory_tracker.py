"""The memory tracker tells roles and units apart, changes nothing, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2.diagnostics import Role, group_summary, memory_tracker, profile_ranges
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.allocations import left_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.test_memory_bound import deep
from tests.distributed.wrapping import BF16, STRATEGIES, said, shards_of, step_all, wrap
from tests.processes import ROOT
from tests.ranks import RankPools
from tests.reference.models import INPUT, Stack

TEMPORARY = (Role.GATHERED, Role.GRAD_BUFFER, Role.COMMUNICATION, Role.ACTIVATIONS)


def _step(model: Any, optimizer: Any) -> torch.Tensor:
    loss = model(torch.ones(4, INPUT)).square().mean()
    loss.backward()
    step_all(optimizer)
    return loss.detach()


def _made(build: Any = Stack, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A sharded model and its optimizer."""
    model = wrap(build(), **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@on_ranks(2, strategy=STRATEGIES)
def test_between_steps_only_resting_roles_live_with_the_bytes_they_have(strategy: str) -> None:
    model, optimizer = _made(sharding_strategy=strategy, mp_policy=BF16)
    for _ in range(2):
        with memory_tracker(model, optimizer) as memory:
            _step(model, optimizer)
        summary = group_summary(model)
        state = {
            id(tensor.untyped_storage()): tensor.untyped_storage().nbytes()
            for values in optimizer.state.values()
            for value in values.values()
            for tensor in [getattr(value, "_local_tensor", value)]
        }
        assert memory.live[Role.MAIN_WEIGHT] == summary.main_weight_nbytes
        assert memory.live[Role.MODEL_WEIGHT] == summary.model_weight_nbytes
        assert memory.live[Role.MAIN_GRAD] == 0
        assert memory.role_peaks[Role.MAIN_GRAD] == summary.main_grad_nbytes
        assert memory.live[Role.OPTIMIZER] == sum(state.values())
        assert not any(memory.live[role] for role in TEMPORARY), memory.live


class Tagged(Stack):
    """The second block keeps a large tensor for the backward, and a buffer rests."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(300))
        self.blocks[1].forward = self._large  # type: ignore[method-assign]

    def _large(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.sum() + torch.ones(50_000)
        return x + wide.sin().mean()


@on_ranks(2)
def test_activations_belong_to_the_unit_that_made_them() -> None:
    model, optimizer = _made(Tagged)
    _step(model, optimizer)
    with memory_tracker(model, optimizer) as memory:
        _step(model, optimizer)
    accounts = memory.peak.accounts
    found = {a.unit: n for a, n in accounts.items() if a.role is Role.ACTIVATIONS}
    assert found["blocks.1"] >= 200_000
    assert all(n < 20_000 for unit, n in found.items() if unit != "blocks.1")
    assert memory.live[Role.OTHER] == 1200


@on_ranks(2)
def test_tracking_changes_no_bit_and_leaves_nothing_in_the_units() -> None:
    results = []
    for tracks in (False, True):
        torch.manual_seed(0)
        model, optimizer = _made()
        losses = []
        for _ in range(3):
            tracker = memory_tracker(model, optimizer) if tracks else contextlib.nullcontext()
            with tracker:
                losses.append(_step(model, optimizer))
        results.append([*losses, *shards_of(model)])
    assert all(map(torch.equal, *results))
    assert not unit_of(model).context.observer.subscribers


@on_ranks(2)
def test_an_exception_inside_leaves_a_model_that_can_be_tracked_again() -> None:
    model, optimizer = _made()

    def fail() -> None:
        with memory_tracker(model, optimizer):
            model(torch.ones(4, INPUT))
            raise KeyError("in the middle")

    said(KeyError, fail)
    clean = not unit_of(model).context.observer.subscribers
    with memory_tracker(model, optimizer) as memory:
        _step(model, optimizer)
    assert clean
    assert memory.live[Role.GATHERED] == 0


@on_ranks(2)
def test_what_was_tracked_keeps_no_model_alive() -> None:
    def train() -> list[Any]:
        model, optimizer = _made()
        with memory_tracker(model, optimizer) as memory:
            _step(model, optimizer)
        return [model, memory, optimizer]

    num_alive, memory = left_of(train)
    assert memory.peak.total > 0
    assert num_alive == 0


@on_ranks(2)
def test_profiler_ranges_and_the_tracker_go_together() -> None:
    model, optimizer = _made()
    profile_ranges(model)
    before = unit_of(model).context.observer.subscribers
    with memory_tracker(model, optimizer) as memory:
        _step(model, optimizer)
    assert len(before) == 1 and before == unit_of(model).context.observer.subscribers
    assert memory.role_peaks[Role.GATHERED] > 0


def printed_report(path: str) -> str:
    model = wrap(deep(6, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def step() -> None:
        model(torch.ones(2, 256)).square().mean().backward()
        step_all(optimizer)

    step()
    with memory_tracker(model, optimizer) as memory:
        step()
    memory.plot(path)
    labels = {(moment.phase, moment.unit) for moment in memory.intervals}
    assert {("forward", "blocks.2"), ("backward", "blocks.2"), ("optimizer step", "")} <= labels
    return memory.report()


def _without_temporaries(report: str) -> str:
    """A report without what torch's optimizer takes for a moment, which differs by version."""
    return re.sub(r"(?m)^(optimizer(?: +\S+ MiB){2}) +\S+ MiB", r"\1", report)


def test_the_printed_report_in_the_docs_is_real(pools: RankPools, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "memory_bound.md").read_text()
    report = pools(2).run(printed_report, str(tmp_path / "step.png"))[0]
    assert _without_temporaries(report) in _without_temporaries(text)
    assert (tmp_path / "step.png").stat().st_size > 10_000


@on_ranks(1)
def test_a_module_that_is_no_root_and_an_early_question_are_rejected() -> None:
    model = wrap(Stack())
    outer = nn.Sequential(model)

    def ask_early() -> None:
        with memory_tracker(model) as memory:
            memory.report()

    def track(module: nn.Module) -> None:
        with memory_tracker(module):
            pass

    assert "Stack contains no sharded module" in said(ValueError, lambda: track(Stack()))
    assert "Sequential is not sharded itself" in said(ValueError, lambda: track(outer))
    assert "after the with block" in said(RuntimeError, ask_early)


@on_ranks(2)
def test_a_pool_is_booked_once_whoever_uses_it() -> None:
    peaks: list[dict[Role, int]] = []
    for enable_trace_pool in (False, True):
        model, optimizer = _made(enable_trace_pool=enable_trace_pool)
        # Not planned yet, planned while it is looked at, and planned before.
        for _ in range(6):
            with memory_tracker(model, optimizer) as memory:
                _step(model, optimizer)
        # With a pool, all of it peaks in the optimizer's step, which takes memory for a moment.
        peaks.append(memory.role_peaks | {Role.OPTIMIZER: memory.live[Role.OPTIMIZER]})
    pool = model.trace_pool()
    block = sum(memory.nbytes for memory in pool.blocks())
    used = [memory.peak.of_role(role) for role in (Role.GATHERED, Role.GRAD_BUFFER, Role.POOL)]
    left = memory.live[Role.POOL]
    pool.release()
    with memory_tracker(model, optimizer) as memory:
        pass
    plain, pooled = peaks
    assert sum(used) == block > 0
    assert left == block
    assert memory.live[Role.POOL] == 0
    for role in (Role.MAIN_WEIGHT, Role.MODEL_WEIGHT, Role.MAIN_GRAD, Role.OPTIMIZER):
        assert pooled[role] == plain[role], role
