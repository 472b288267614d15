"""The memory tracker tells roles and units apart, changes nothing, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2.diagnostics import Role, group_summary, memory_tracker, profile_ranges
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.test_memory_bound import Deep
from tests.distributed.wrapping import BF16, STRATEGIES, said, wrap
from tests.ranks import RankPools
from tests.reference.models import INPUT, Stack

ROOT = Path(__file__).parents[2]
TEMPORARY = (Role.GATHERED, Role.GRAD_BUFFER, Role.COMMUNICATION, Role.ACTIVATIONS)


def _step(model: Any, optimizer: Any) -> torch.Tensor:
    loss = model(torch.ones(4, INPUT)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def resting_roles(strategy: str) -> list[tuple[dict[Role, int], tuple[int, ...]]]:
    """After a first and a second step: what the tracker says lives, and what there is."""
    model = wrap(Stack(), sharding_strategy=strategy, mp_policy=BF16)
    optimizer = _adamw(model)
    found = []
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
        there = (
            summary.main_weight_nbytes,
            summary.model_weight_nbytes,
            summary.main_grad_nbytes,
            sum(state.values()),
        )
        found.append((memory.live, there))
    return found


def test_between_steps_only_resting_roles_live_with_the_bytes_they_have(pools: RankPools) -> None:
    roles = (Role.MAIN_WEIGHT, Role.MODEL_WEIGHT, Role.MAIN_GRAD, Role.OPTIMIZER)
    for strategy in STRATEGIES:
        for found in pools(2).run(resting_roles, strategy):
            for live, there in found:
                assert tuple(live[role] for role in roles) == there, strategy
                assert not any(live[role] for role in TEMPORARY), (strategy, live)


class Tagged(Stack):
    """The second block keeps a large tensor for the backward, and a buffer rests."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(300))
        self.blocks[1].forward = self._large  # type: ignore[method-assign]

    def _large(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.sum() + torch.ones(50_000)
        return x + wide.sin().mean()


def activation_peaks() -> dict[str, int]:
    model = wrap(Tagged())
    optimizer = _adamw(model)
    _step(model, optimizer)
    with memory_tracker(model, optimizer) as memory:
        _step(model, optimizer)
    accounts = memory.peak.accounts
    found = {a.unit: n for a, n in accounts.items() if a.role is Role.ACTIVATIONS}
    return {**found, "other": memory.live[Role.OTHER]}


def test_activations_belong_to_the_unit_that_made_them(pools: RankPools) -> None:
    for found in pools(2).run(activation_peaks):
        assert found["blocks.1"] >= 200_000
        assert all(n < 20_000 for unit, n in found.items() if unit != "blocks.1")
        assert found["other"] == 1200


def trained_with_and_without() -> tuple[bool, list[Any]]:
    """Whether the tracker changes bits, and what it leaves in the units."""
    results = []
    for tracks in (False, True):
        torch.manual_seed(0)
        model = wrap(Stack())
        optimizer = _adamw(model)
        losses = []
        for _ in range(3):
            tracker = memory_tracker(model, optimizer) if tracks else contextlib.nullcontext()
            with tracker:
                losses.append(_step(model, optimizer))
        results.append([*losses, *(p.to_local().clone() for p in model.parameters())])
    left = [type(unit_of(m).groups[0].weights._temporary).__name__ for m in [*model.blocks, model]]
    left += [unit_of(m).ranges for m in model.blocks] + [unit_of(model).context.reductions.ranges]
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True)), left


def test_tracking_changes_no_bit_and_leaves_nothing_in_the_units(pools: RankPools) -> None:
    for same, left in pools(2).run(trained_with_and_without):
        assert same
        assert set(left) == {"ResizedBuffer", None}


def after_an_exception() -> tuple[bool, int]:
    model = wrap(Stack())
    optimizer = _adamw(model)

    def fail() -> None:
        with memory_tracker(model, optimizer):
            model(torch.ones(4, INPUT))
            raise KeyError("in the middle")

    said(KeyError, fail)
    clean = all(unit_of(m).ranges is None for m in [*model.blocks, model])
    with memory_tracker(model, optimizer) as memory:
        _step(model, optimizer)
    return clean, memory.live[Role.GATHERED]


def test_an_exception_inside_leaves_a_model_that_can_be_tracked_again(pools: RankPools) -> None:
    assert pools(2).run(after_an_exception) == [(True, 0)] * 2


def storages_that_outlive_the_model() -> int:
    gc.collect()
    gc.disable()
    try:
        model = wrap(Stack())
        optimizer = _adamw(model)
        with memory_tracker(model, optimizer) as memory:
            _step(model, optimizer)
        alive = []
        for module in [*model.blocks, model]:
            for group in unit_of(module).groups:
                for buffer in (group.main_weight, group.main_grad, group.weights.gathered):
                    alive.append(weakref.ref(buffer.tensor))
        del group, module, buffer, optimizer, model
        assert memory.peak.total > 0
        return sum(ref() is not None for ref in alive)
    finally:
        gc.enable()


def test_what_was_tracked_keeps_no_model_alive(pools: RankPools) -> None:
    assert pools(2).run(storages_that_outlive_the_model) == [0, 0]


def beside_profiler_ranges() -> tuple[bool, int]:
    model = wrap(Stack())
    optimizer = _adamw(model)
    profile_ranges(model)
    before = [unit_of(m).ranges for m in model.blocks]
    with memory_tracker(model, optimizer) as memory:
        _step(model, optimizer)
    return before == [unit_of(m).ranges for m in model.blocks], memory.role_peaks[Role.GATHERED]


def test_profiler_ranges_and_the_tracker_go_together(pools: RankPools) -> None:
    for restored, gathered in pools(2).run(beside_profiler_ranges):
        assert restored
        assert gathered > 0


def printed_report(path: str) -> str:
    model = wrap(Deep(6, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def step() -> None:
        model(torch.ones(2, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

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


def refusals() -> tuple[str, ...]:
    model = wrap(Stack())
    outer = nn.Sequential(model)

    def ask_early() -> None:
        with memory_tracker(model) as memory:
            memory.report()

    def track(module: nn.Module) -> None:
        with memory_tracker(module):
            pass

    return (
        said(ValueError, lambda: track(Stack())),
        said(ValueError, lambda: track(outer)),
        said(RuntimeError, ask_early),
    )


def test_a_module_that_is_no_root_and_an_early_question_are_rejected(pools: RankPools) -> None:
    plain, outside, early = pools(1).run(refusals)[0]
    assert "Stack contains no sharded module" in plain
    assert "Sequential is not sharded itself" in outside
    assert "after the with block" in early


def moments_in_a_pool() -> list[Any]:
    """Peaks without and with the pool, what the pool has, and what is left after releasing it."""
    peaks: list[dict[Role, int]] = []
    for enable_trace_pool in (False, True):
        model = wrap(Stack(), enable_trace_pool=enable_trace_pool)
        optimizer = _adamw(model)
        # Not planned yet, planned while it is looked at, and planned before.
        for _ in range(6):
            with memory_tracker(model, optimizer) as memory:
                _step(model, optimizer)
        peaks.append({role: memory.peak.of_role(role) for role in Role})
    pool = model.trace_pool()
    block = sum(memory.nbytes for memory in pool.blocks())
    left = memory.live[Role.POOL]
    pool.release()
    with memory_tracker(model, optimizer) as memory:
        pass
    return [*peaks, block, left, memory.live[Role.POOL]]


def test_a_pool_is_booked_once_whoever_uses_it(pools: RankPools) -> None:
    for plain, pooled, block, left, released in pools(2).run(moments_in_a_pool):
        used = [pooled[role] for role in (Role.GATHERED, Role.GRAD_BUFFER, Role.POOL)]
        assert sum(used) == block > 0
        assert left == block
        assert released == 0
        for role in (Role.MAIN_WEIGHT, Role.MODEL_WEIGHT, Role.MAIN_GRAD, Role.OPTIMIZER):
            assert pooled[role] == plain[role], role
