"""Memory of a step equals its plan; memory cost of each option; attribution of tracked memory."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.diagnostics import Moment, Role, group_summary, memory_tracker, profile_ranges
from megatron_fsdp_v2.plan import MeshDescription, Strategy, TrainingDescription, describe_module
from megatron_fsdp_v2.plan.run import run_training
from megatron_fsdp_v2.runtime.module import unit_of
from tests.cases import longer
from tests.distributed.allocations import count_live_buffers, peak_nbytes
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    BF16,
    MESHES,
    STRATEGIES,
    error_message,
    on_mesh,
    own_loss,
    record_collectives,
    shards_of,
    step_all,
    strategies_on,
    wrap,
)
from tests.pictures import has_clear_ground
from tests.processes import ROOT
from tests.ranks import RankPools
from tests.reference.models import INPUT, CheckpointedRegion, Stack

WIDTH = 64
NUM_BLOCKS = 6
BLOCK_NUMEL = 6 * (WIDTH * WIDTH + WIDTH)
ROOT_NUMEL = 2 * (WIDTH * WIDTH + WIDTH)
POLICIES = {"fp32": None, "bf16": BF16}
TEMPORARY = (Role.GATHERED, Role.GRAD_BUFFER, Role.COMMUNICATION)


def _layers(width: int) -> nn.Module:
    """A unit of several layers, so that one gradient from autograd is a small part of the unit."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))


def deep(
    num_blocks: int = NUM_BLOCKS, width: int = WIDTH, *, kind: Any = Stack, **options: Any
) -> Any:
    """Units inside a root whose first and last layers are its own."""
    return kind(num_blocks, width, ends=(width, width), **{"block": _layers, **options})


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def _backward(model: Any) -> torch.Tensor:
    loss = model(torch.ones(2, model.input.in_features)).square().mean()
    loss.backward()
    return loss.detach()


def _step(model: Any, optimizer: Any, num_microbatches: int = 1) -> torch.Tensor:
    """Run a step; return the loss of its last micro-batch."""
    for _ in range(num_microbatches - 1):
        with model.no_sync():
            _backward(model)
    loss = _backward(model)
    step_all(optimizer)
    return loss


def tracked(model: Any, num_microbatches: int = 1) -> Any:
    """The tracked memory of a second step."""
    optimizer = _optimizer(model)
    _step(model, optimizer, num_microbatches)
    with memory_tracker(model, optimizer) as memory:
        _step(model, optimizer, num_microbatches)
    return memory


def peaks(mesh_name: str, policy: str, num_microbatches: int) -> dict[str, int]:
    """Peak bytes by strategy, without activations and optimizer state."""
    found = {}
    for strategy in strategies_on(mesh_name):
        options = {"sharding_strategy": strategy, **on_mesh(mesh_name)}
        memory = tracked(wrap(deep(), mp_policy=POLICIES[policy], **options), num_microbatches)
        found[strategy] = _without_activations(memory.peak)
    return found


def _without_activations(peak: Moment) -> int:
    return peak.total - peak.of_role(Role.ACTIVATIONS) - peak.of_role(Role.OPTIMIZER)


PEAKS = [
    case(mesh, *given)
    for mesh in ("2", "HSDP 2x2", "HFSDP 2x2")
    for case, given in ((longer, ("fp32", 1)), (pytest.param, ("bf16", 2)))
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh_name", "policy", "num_microbatches"), PEAKS)
def test_peak_memory_of_a_step_is_within_two_percent_of_its_plan(
    mesh_name: str, policy: str, num_microbatches: int, pools: RankPools
) -> None:
    """Excludes activations, which differ in a plan and shift the moment of the peak."""
    sizes, outer = MESHES[mesh_name]
    num_ranks = torch.Size(sizes).numel()
    with torch.device("meta"):
        units, _ = describe_module(deep())
    training = TrainingDescription(
        units,
        {"dp": MeshDescription(num_ranks)},
        POLICIES[policy] or MixedPrecisionPolicy(),
        num_microbatches=num_microbatches,
        on_cpu=True,
    )
    outer_size = sizes[0] if len(sizes) > 1 else None
    (found, *_) = pools(num_ranks).run(peaks, mesh_name, policy, num_microbatches)
    for strategy, peak in found.items():
        run = run_training(training, Strategy(strategy, outer, outer_size))
        planned = _without_activations(run.device_memory.peak)
        assert peak == pytest.approx(planned, rel=0.02), strategy


# Options, and the numbers of gathered blocks and of gradient buffers, besides the root's.
COSTS: list[tuple[dict[str, Any], int, int]] = [
    ({}, 2, 2),
    ({"enable_unshard_prefetch": False}, 1, 2),
    ({"unshard_prefetch_depth": 3}, 4, 2),
    ({"unshard_prefetch_depth": 20}, NUM_BLOCKS, 2),
    # Fewer bytes than one block, and the bytes of two and a half blocks.
    ({"unshard_prefetch_bytes": 1}, 2, 2),
    ({"unshard_prefetch_bytes": 4 * 5 * BLOCK_NUMEL // 2}, 3, 2),
    ({"enable_async_reduce_grad": False}, 2, 1),
    ({"max_live_grad_buffers": 3}, 2, 3),
]


@pytest.mark.parametrize(("knobs", "num_gathered", "num_buffers"), COSTS, ids=str)
@on_ranks(2)
def test_each_unit_of_prefetch_depth_and_each_gradient_buffer_costs_one_buffer(
    knobs: dict[str, Any], num_gathered: int, num_buffers: int
) -> None:
    model = wrap(deep(), **knobs)
    recorded = record_collectives(model)
    memory = tracked(model)
    block, root = 4 * BLOCK_NUMEL, 4 * ROOT_NUMEL
    assert memory.role_peaks[Role.GATHERED] == root + num_gathered * block
    assert memory.role_peaks[Role.GRAD_BUFFER] == root + num_buffers * block
    # In both steps, each block once for its forward and once for its backward, and the root once.
    assert recorded.count("all_gather") == 2 * (2 * NUM_BLOCKS + 1)


@on_ranks(1, strategy=STRATEGIES[::3])
def test_one_rank_gathers_nothing_and_has_no_buffer_for_communication(strategy: str) -> None:
    found = tracked(wrap(deep(), sharding_strategy=strategy)).role_peaks
    assert found[Role.GATHERED] == found[Role.COMMUNICATION] == found[Role.MODEL_WEIGHT] == 0
    assert found[Role.GRAD_BUFFER] == 4 * (ROOT_NUMEL + 2 * BLOCK_NUMEL)


@on_ranks(2)
def test_a_recomputed_region_of_units_keeps_two_of_them_gathered() -> None:
    memory = tracked(wrap(deep(kind=CheckpointedRegion, use_reentrant=False)))
    assert memory.role_peaks[Role.GATHERED] == 4 * (ROOT_NUMEL + 2 * BLOCK_NUMEL)


@pytest.mark.slow
@on_ranks(2, strategy=["no_shard", "optim_grads_params"], policy=POLICIES)
def test_tracked_peak_equals_the_allocated_peak(strategy: str, policy: str) -> None:
    model = wrap(deep(), sharding_strategy=strategy, mp_policy=POLICIES[policy])
    optimizer = _optimizer(model)
    _step(model, optimizer)
    with memory_tracker(model, optimizer) as memory:
        _backward(model)
    optimizer.zero_grad()
    resting = (Role.MAIN_WEIGHT, Role.MODEL_WEIGHT, Role.OPTIMIZER)
    seen = memory.peak.total - sum(memory.live[role] for role in resting)
    allocated = peak_nbytes(lambda: _backward(model))
    # Gloo first gathers into its own buffers; its threads free these when they next run.
    itemsize = 4 if policy == "fp32" else 2
    own = 0 if strategy == "no_shard" else 2 * BLOCK_NUMEL * itemsize
    assert seen <= allocated <= seen + own


@on_ranks(2)
def test_explicit_prefetch_lists_gather_every_unit_once() -> None:
    model = wrap(Stack(4))
    own_loss(model).backward()
    first, second, third, fourth = model.blocks
    ahead = []

    def look(*_: Any) -> None:
        ahead.append([unit_of(block).is_unsharded for block in model.blocks])

    first.up.register_forward_hook(look)
    counts = []
    for forward, backward in (([], []), ([second, third], []), ([], [third, second])):
        first.set_modules_to_forward_prefetch(forward)
        fourth.set_modules_to_backward_prefetch(backward)
        recorded = record_collectives(model)
        own_loss(model).backward()
        counts.append(recorded.count("all_gather"))
    assert ahead == [[True, True, number == 1, False] for number in range(3)]
    assert counts == [2 * 4 + 1] * 3


def _made(build: Any = Stack, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A sharded model and its optimizer."""
    model = wrap(build(), **options)
    return model, _optimizer(model)


@on_ranks(2, strategy=STRATEGIES)
def test_only_weights_and_optimizer_state_are_live_between_steps(strategy: str) -> None:
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
        assert memory.live[Role.MAIN_WEIGHT] == summary.total("main_weight_nbytes")
        assert memory.live[Role.MODEL_WEIGHT] == summary.total("model_weight_nbytes")
        assert memory.live[Role.MAIN_GRAD] == 0
        assert memory.role_peaks[Role.MAIN_GRAD] == summary.total("main_grad_nbytes")
        assert memory.live[Role.OPTIMIZER] == sum(state.values())
        assert not any(memory.live[role] for role in (*TEMPORARY, Role.ACTIVATIONS)), memory.live


class Tagged(Stack):
    """A model whose second block saves a large tensor for the backward, with a buffer."""

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
def test_tracking_changes_no_results_and_leaves_no_subscribers() -> None:
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
    # Another subscriber, which stays.
    profile_ranges(model)

    def fail() -> None:
        with memory_tracker(model, optimizer):
            model(torch.ones(4, INPUT))
            raise KeyError("in the middle")

    error_message(KeyError, fail)
    num_left = len(unit_of(model).context.observer.subscribers)
    with memory_tracker(model, optimizer) as memory:
        _step(model, optimizer)
    assert num_left == 1
    assert memory.live[Role.GATHERED] == 0


@on_ranks(2)
def test_deleting_a_model_frees_its_buffers_while_its_memory_record_is_kept() -> None:
    def train() -> list[Any]:
        model, optimizer = _made()
        with memory_tracker(model, optimizer) as memory:
            _step(model, optimizer)
        return [model, memory, optimizer]

    num_alive, memory = count_live_buffers(train)
    assert memory.peak.total > 0
    assert num_alive == 0


def printed_report(path: str) -> str:
    memory = tracked(wrap(deep(6, 256)))
    memory.plot(path)
    labels = {(moment.phase, moment.unit) for moment in memory.intervals}
    assert {("forward", "blocks.2"), ("backward", "blocks.2"), ("optimizer step", "")} <= labels
    return memory.report()


def _without_temporaries(report: str) -> str:
    """A report without the temporary memory of torch's optimizer, which depends on the version."""
    return re.sub(r"(?m)^(optimizer +\S+ MiB) +\S+ MiB", r"\1", report)


@pytest.mark.slow
def test_the_printed_report_in_the_docs_is_real(pools: RankPools, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "memory.md").read_text()
    report = pools(2).run(printed_report, str(tmp_path / "step.png"))[0]
    assert _without_temporaries(report) in _without_temporaries(text)
    assert has_clear_ground(tmp_path / "step.png")


@on_ranks(2)
def test_trace_pool_memory_is_counted_once() -> None:
    peaks: list[dict[Role, int]] = []
    for enable_trace_pool in (False, True):
        model, optimizer = _made(enable_trace_pool=enable_trace_pool)
        # Steps before the plan, with the creation of the plan, and after it.
        for _ in range(6):
            with memory_tracker(model, optimizer) as memory:
                _step(model, optimizer)
        # With a pool, the total peaks in the optimizer's step, whose temporary memory is excluded.
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
