"""Bytes alive in a step never pass the bound and come within 2 % of it, on `fully_shard` itself."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.diagnostics import Role, memory_tracker
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.allocations import peak_nbytes
from tests.distributed.wrapping import BF16, STRATEGIES, mesh_of, said, wrap
from tests.parity.patterns import PATTERNS
from tests.ranks import RankPools
from tests.reference.training import train_sharded

WIDTH = 64
NUM_BLOCKS = 6
BLOCK_NUMEL = 6 * (WIDTH * WIDTH + WIDTH)
FOUR_RANKS = [
    (strategy, outer)
    for strategy in STRATEGIES
    for outer in ("no_shard", "optim")
    if outer == "no_shard" or strategy != "no_shard"
]
POLICIES = {"fp32": None, "bf16": BF16}
TEMPORARY = (Role.GATHERED, Role.GRAD_BUFFER, Role.COMMUNICATION)
CHUNK_NBYTES = 4 << 14
"""What a sum in another dtype than that of the wire takes on a CPU besides."""


class Layers(nn.Module):
    """A unit of several layers, so that the gradient autograd hands over is a small part of it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Deep(nn.Module):
    """Units inside a root that has parameters of its own, first and last."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, width: int = WIDTH) -> None:
        super().__init__()
        self.input = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Layers(width) for _ in range(num_blocks))
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


class Region(Deep):
    """All units are recomputed as one region."""

    def forward(self, x: torch.Tensor) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

        return self.output(checkpoint(run, self.input(x), use_reentrant=False))


class Nest(nn.Module):
    """A unit with layers before and after the unit inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = Layers()
        self.inner = Layers()
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.inner(self.before(x)))


class Nested(Deep):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Nest() for _ in range(4))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def _step(model: Any, optimizer: Any, num_microbatches: int = 1) -> None:
    width = model.input.in_features
    for _ in range(num_microbatches - 1):
        with model.no_sync():
            model(torch.ones(2, width)).square().mean().backward()
    model(torch.ones(2, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def tracked(model: Any, num_microbatches: int = 1) -> Any:
    """The memory of a second step."""
    optimizer = _optimizer(model)
    _step(model, optimizer, num_microbatches)
    with memory_tracker(model, optimizer) as memory:
        _step(model, optimizer, num_microbatches)
    return memory


def peaks(configurations: list[tuple[Any, ...]]) -> list[tuple[int, int, int, int]]:
    """Per configuration: the peak, the bound, and of both what comes and goes."""
    found = []
    for shape, strategy, outer, policy, num_microbatches in configurations:
        mesh = mesh_of(*(shape or (dist.get_world_size(),)))
        model = wrap(
            Deep(),
            mesh=mesh,
            sharding_strategy=strategy,
            outer_dp_sharding_strategy=outer,
            mp_policy=POLICIES[policy],
        )
        memory = tracked(model, num_microbatches)
        temporary = sum(memory.peak.of_role(role) for role in TEMPORARY)
        found.append((memory.peak.total, memory.bound.total, temporary, memory.bound.temporary))
    return found


def _check(pools: RankPools, world_size: int, configurations: list[Any], slack: int = 0) -> None:
    for found in pools(world_size).run(peaks, configurations):
        for which, (peak, bound, temporary, of_bound) in zip(configurations, found, strict=True):
            assert 0.98 * bound <= peak <= bound + slack, which
            assert 0.98 * of_bound <= temporary <= of_bound + slack, which


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_peaks_at_its_bound_within_two_percent(pools: RankPools, policy: str) -> None:
    _check(pools, 2, [(None, strategy, "no_shard", policy, 1) for strategy in STRATEGIES])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_on_two_axes_peaks_at_its_bound_within_two_percent(
    pools: RankPools, policy: str
) -> None:
    cases = [((2, 2), strategy, outer, policy, 1) for strategy, outer in FOUR_RANKS]
    _check(pools, 4, cases)


def test_an_accumulating_step_peaks_at_its_bound_within_two_percent(pools: RankPools) -> None:
    _check(pools, 2, [(None, strategy, "no_shard", "fp32", 2) for strategy in STRATEGIES])
    _check(pools, 2, [(None, s, "no_shard", "bf16", 2) for s in STRATEGIES], slack=CHUNK_NBYTES)


@pytest.mark.functional
@pytest.mark.parametrize("policy", POLICIES)
def test_an_accumulating_step_on_two_axes_peaks_at_its_bound(pools: RankPools, policy: str) -> None:
    cases = [((2, 2), strategy, outer, policy, 2) for strategy, outer in FOUR_RANKS]
    _check(pools, 4, cases, slack=CHUNK_NBYTES if policy == "bf16" else 0)


def by_knobs(knobs: list[dict[str, Any]]) -> list[tuple[int, int, int, int]]:
    """Per set of knobs: peak, bound, most gathered bytes, most bytes of gradient buffers."""
    found = []
    for options in knobs:
        memory = tracked(wrap(Deep(), **options))
        roles = (memory.role_peaks[role] for role in (Role.GATHERED, Role.GRAD_BUFFER))
        found.append((memory.peak.total, memory.bound.total, *roles))
    return found


def test_each_unit_of_prefetch_depth_and_each_gradient_buffer_costs_one_buffer(
    pools: RankPools,
) -> None:
    knobs: list[dict[str, Any]] = [
        {"enable_unshard_prefetch": False},
        *({"unshard_prefetch_depth": depth} for depth in (1, 2, 3)),
        {"enable_async_reduce_grad": False},
        *({"max_live_grad_buffers": number} for number in (1, 2, 3)),
    ]
    block, root = 4 * BLOCK_NUMEL, 4 * 2 * (WIDTH * WIDTH + WIDTH)
    for found in pools(2).run(by_knobs, knobs):
        assert all(0.98 * bound <= peak <= bound for peak, bound, *_ in found), found
        gathered, buffers = [f[2] for f in found], [f[3] for f in found]
        assert gathered[:4] == [root + number * block for number in (1, 2, 3, 4)]
        assert gathered[4:] == gathered[1:2] * 4
        assert buffers[4:] == [root + number * block for number in (1, 1, 2, 3)]
        assert buffers[:4] == buffers[6:7] * 4


type Found = dict[str, tuple[int, tuple[int, ...]]]


def by_number_of_blocks(num_blocks: int, num_microbatches: int) -> Found:
    """By strategy: the peak, and the most bytes of each role that comes and goes."""
    found = {}
    for strategy in STRATEGIES:
        memory = tracked(wrap(Deep(num_blocks), sharding_strategy=strategy), num_microbatches)
        roles = tuple(memory.role_peaks[role] for role in TEMPORARY)
        found[strategy] = memory.peak.total, roles
    return found


@pytest.fixture(scope="module")
def depths(pools: RankPools) -> dict[tuple[int, int], Found]:
    """`by_number_of_blocks` for few and many blocks, for one and two micro-batches."""
    return {
        case: pools(2).run(by_number_of_blocks, *case)[0]
        for case in ((4, 1), (10, 1), (4, 2), (10, 2))
    }


def test_temporary_memory_is_the_same_for_four_and_for_ten_blocks(depths: Any) -> None:
    four, ten = ({s: roles for s, (_, roles) in depths[n, 1].items()} for n in (4, 10))
    assert four == ten
    # ZeRO-2 and ZeRO-1 differ in nothing with one micro-batch; DDP's all-reduce is in place.
    assert four["optim_grads"] == four["optim"]
    assert four["no_shard"][2] == 0 < four["optim"][2]


def test_reductions_take_the_same_after_accumulation_for_four_and_for_ten_blocks(
    depths: Any,
) -> None:
    four, ten = ({s: roles for s, (_, roles) in depths[n, 2].items()} for n in (4, 10))
    for strategy in STRATEGIES:
        # Full gradients of all units wait where they are not sharded; what reduces them does not.
        assert four[strategy][2] == ten[strategy][2], strategy
    assert four["optim_grads"] == ten["optim_grads"]
    assert four["optim_grads_params"] == ten["optim_grads_params"]


def test_each_zero_level_peaks_no_higher_than_the_one_before(depths: Any) -> None:
    for case, found in depths.items():
        totals = [found[strategy][0] for strategy in STRATEGIES]
        assert totals == sorted(totals, reverse=True), case
        assert totals[0] > totals[1] > totals[3], case


def roles_of_one_rank() -> dict[str, dict[Role, int]]:
    return {
        strategy: tracked(wrap(Deep(), sharding_strategy=strategy)).role_peaks
        for strategy in STRATEGIES
    }


def test_one_rank_gathers_nothing_and_has_no_buffer_for_communication(pools: RankPools) -> None:
    root = 2 * (WIDTH * WIDTH + WIDTH)
    for strategy, found in pools(1).run(roles_of_one_rank)[0].items():
        assert found[Role.GATHERED] == found[Role.COMMUNICATION] == 0, strategy
        assert found[Role.MODEL_WEIGHT] == 0, strategy
        assert found[Role.GRAD_BUFFER] == 4 * (root + 2 * BLOCK_NUMEL), strategy


def region_peaks() -> tuple[int, int]:
    memory = tracked(wrap(Region()))
    return memory.role_peaks[Role.GATHERED], memory.bound.gathered


def test_a_recomputed_region_of_units_keeps_two_of_them_gathered(pools: RankPools) -> None:
    for measured, bound in pools(2).run(region_peaks):
        assert measured == bound


def nested_peaks() -> list[tuple[int, ...]]:
    """Measured and bound, by role, with units inside units."""
    found = []
    for depth, buffers in ((1, 2), (2, 1), (2, 3)):
        model = Nested()
        units = [unit for nest in model.blocks for unit in (nest.inner, nest)]
        wrap(model, units, unshard_prefetch_depth=depth, max_live_grad_buffers=buffers)
        memory = tracked(model)
        found.append(
            (
                memory.peak.total,
                memory.bound.total,
                memory.role_peaks[Role.GATHERED],
                memory.bound.gathered,
                memory.role_peaks[Role.GRAD_BUFFER],
                memory.bound.grad_buffer,
            )
        )
    return found


def test_units_inside_units_stay_below_the_bound(pools: RankPools) -> None:
    for found in pools(2).run(nested_peaks):
        for peak, bound, gathered, of_bound, buffers, of_buffers in found:
            assert 0.9 * bound <= peak <= bound
            assert gathered <= of_bound
            assert buffers <= of_buffers


def allocated_and_tracked() -> dict[str, tuple[int, int]]:
    """The peak of a forward and backward above what rests: by torch's allocator, and tracked."""
    found, x = {}, torch.ones(2, WIDTH)
    for strategy in ("no_shard", "optim_grads_params"):
        for name, policy in POLICIES.items():
            model = wrap(Deep(), sharding_strategy=strategy, mp_policy=policy)
            optimizer = _optimizer(model)
            _step(model, optimizer)
            with memory_tracker(model, optimizer) as memory:
                model(x).square().mean().backward()
            optimizer.zero_grad()
            resting = memory.bound.resting
            allocated = peak_nbytes(lambda m=model: m(x).square().mean().backward())
            found[f"{strategy} {name}"] = (allocated, memory.peak.total - resting)
    return found


def test_the_tracked_peak_is_what_the_allocator_hands_out(pools: RankPools) -> None:
    for found in pools(2).run(allocated_and_tracked):
        for which, (allocated, seen) in found.items():
            # Gloo gathers into buffers of its own first; its threads free them when they next run.
            itemsize = 4 if "fp32" in which else 2
            own = 0 if "no_shard" in which else 2 * BLOCK_NUMEL * itemsize
            assert seen <= allocated <= seen + own, which


KNOBS = (
    {"unshard_prefetch_depth": 2, "max_live_grad_buffers": 1},
    {"unshard_prefetch_depth": 3, "max_live_grad_buffers": 4},
)
KNOB_PATTERNS = (
    "accumulation under no_sync",
    "module used twice in a forward",
    "tied parameters across units",
    "unit skipped on some steps",
    "nested units",
    "evaluation between",
    "checkpointing, reentrant",
    "checkpointed region of units, non-reentrant",
    "exception in a backward",
)


def patterns_with_other_bits(shape: tuple[int, ...], strategy: str) -> list[str]:
    """Patterns of training whose results depend on a knob."""
    found = []
    for name in KNOB_PATTERNS:
        traces = []
        for knobs in ({}, *KNOBS):

            def shard(module: nn.Module, name: str = name, knobs: Any = knobs) -> None:
                options = {**PATTERNS[name].options, **knobs}
                fully_shard(module, mesh=mesh_of(*shape), sharding_strategy=strategy, **options)

            traces.append(train_sharded(PATTERNS[name], shard))
        first, *others = traces
        for other in others:
            same = all(torch.equal(other.params[key], first.params[key]) for key in first.params)
            if not same or other.losses != first.losses:
                found.append(name)
    return found


def test_no_bit_of_any_result_depends_on_the_knobs(pools: RankPools) -> None:
    assert pools(2).run(patterns_with_other_bits, (2,), "optim_grads_params") == [[], []]


@pytest.mark.functional
def test_no_bit_of_any_result_depends_on_the_knobs_of_any_strategy(pools: RankPools) -> None:
    for strategy in STRATEGIES:
        assert not any(pools(2).run(patterns_with_other_bits, (2,), strategy)), strategy
        assert not any(pools(4).run(patterns_with_other_bits, (2, 2), strategy)), strategy


def _counted(calls: list[Any], weights: Any, gather: Any, **options: Any) -> Any:
    if not weights.is_gathered:
        calls.append(weights)
    return gather(**options)


def gathers_by_depth() -> list[int]:
    """Gathers of a step, by prefetch depth."""
    found = []
    for depth in (1, 2, 3, 20):
        model = wrap(Deep(), unshard_prefetch_depth=depth)
        optimizer = _optimizer(model)
        _step(model, optimizer)
        calls: list[Any] = []
        for module in [*model.blocks, model]:
            weights = unit_of(module).groups[0].weights
            weights._gather = functools.partial(_counted, calls, weights, weights._gather)
        _step(model, optimizer)
        found.append(len(calls))
    return found


def test_a_deeper_prefetch_gathers_nothing_twice(pools: RankPools) -> None:
    assert pools(2).run(gathers_by_depth) == [[2 * NUM_BLOCKS + 1] * 4] * 2


def refusals() -> list[str]:
    bad: list[dict[str, Any]] = [
        {"unshard_prefetch_depth": 0},
        {"unshard_prefetch_depth": 1.5},
        {"max_live_grad_buffers": 0},
        {"max_live_grad_buffers": True},
    ]
    return [said(ValueError, lambda b=b: wrap(Deep(1), **b)) for b in bad]


def test_a_knob_below_one_is_rejected_by_name(pools: RankPools) -> None:
    first, second, third, fourth = pools(1).run(refusals)[0]
    assert "unshard_prefetch_depth must be a whole number of at least 1, got 0" in first
    assert "unshard_prefetch_depth" in second and "1.5" in second
    assert "max_live_grad_buffers must be a whole number of at least 1, got 0" in third
    assert "max_live_grad_buffers" in fourth and "True" in fourth
