"""Bytes alive in a step never pass the bound, and are within 2 % of it but for activations."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.diagnostics import Role, memory_tracker
from megatron_fsdp_v2.runtime.fsdp_module import named_units
from tests.cases import quick_if, quick_rows
from tests.distributed.allocations import peak_nbytes
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    BF16,
    STRATEGIES,
    listen,
    on_mesh,
    said,
    sends,
    step_all,
    strategies_on,
    wrap,
)
from tests.parity.patterns import PATTERNS
from tests.ranks import RankPools
from tests.reference.models import CheckpointedRegion, Stack
from tests.reference.training import train_sharded

WIDTH = 64
NUM_BLOCKS = 6
BLOCK_NUMEL = 6 * (WIDTH * WIDTH + WIDTH)
ROOT_NUMEL = 2 * (WIDTH * WIDTH + WIDTH)
POLICIES = {"fp32": None, "bf16": BF16}
TEMPORARY = (Role.GATHERED, Role.GRAD_BUFFER, Role.COMMUNICATION)
CHUNK_NBYTES = 4 << 14
"""What a sum in another dtype than that of the wire takes on a CPU besides."""


def _layers(width: int) -> nn.Module:
    """A unit of several layers, so that the gradient autograd hands over is a small part of it."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))


def _nest(width: int) -> nn.Module:
    """A unit with layers before and after the unit inside it."""
    return nn.Sequential(_layers(width), _layers(width), nn.Linear(width, width))


def deep(
    num_blocks: int = NUM_BLOCKS, width: int = WIDTH, *, kind: Any = Stack, **options: Any
) -> Any:
    """Units inside a root that has parameters of its own, first and last."""
    return kind(num_blocks, width, ends=(width, width), **{"block": _layers, **options})


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def _step(model: Any, optimizer: Any, num_microbatches: int = 1) -> None:
    for _ in range(num_microbatches - 1):
        with model.no_sync():
            model(torch.ones(2, WIDTH)).square().mean().backward()
    model(torch.ones(2, WIDTH)).square().mean().backward()
    step_all(optimizer)


def tracked(model: Any, num_microbatches: int = 1) -> Any:
    """The memory of a second step."""
    optimizer = _optimizer(model)
    _step(model, optimizer, num_microbatches)
    with memory_tracker(model, optimizer) as memory:
        _step(model, optimizer, num_microbatches)
    return memory


def without_activations(memory: Any) -> tuple[int, int]:
    """What the peak and the bound have of all other roles."""
    peak, bound = memory.peak, memory.bound
    return peak.total - peak.of_role(Role.ACTIVATIONS), bound.total - bound.activations


PEAKS = [
    quick_if(case[0] == "2" or case[2] == 1, *case)
    for case in itertools.product(("2", "HSDP 2x2", "HFSDP 2x2"), POLICIES, (1, 2))
]


@pytest.mark.parametrize(("mesh_name", "policy", "num_microbatches"), PEAKS)
@on_ranks("mesh_name")
def test_a_step_peaks_at_its_bound_within_two_percent(
    mesh_name: str, policy: str, num_microbatches: int
) -> None:
    """In all, and without activations, which are not at their own peak when all else is."""
    # Sums after accumulation in another dtype than that of the wire.
    slack = CHUNK_NBYTES if policy == "bf16" and num_microbatches > 1 else 0
    for strategy in strategies_on(mesh_name):
        options = {"sharding_strategy": strategy, **on_mesh(mesh_name)}
        memory = tracked(wrap(deep(), mp_policy=POLICIES[policy], **options), num_microbatches)
        assert memory.peak.total <= memory.bound.total + slack, strategy
        peak, bound = without_activations(memory)
        assert 0.98 * bound <= peak <= bound + slack, strategy


# With a set of knobs: how many blocks are gathered, and have a gradient buffer, beside the root.
COSTS: list[tuple[dict[str, Any], int, int]] = [
    ({}, 2, 2),
    ({"enable_unshard_prefetch": False}, 1, 2),
    *(({"unshard_prefetch_depth": depth}, 1 + depth, 2) for depth in (1, 2, 3)),
    # Less than one block takes, and as much as two and a half do.
    ({"unshard_prefetch_bytes": 1}, 2, 2),
    ({"unshard_prefetch_bytes": 4 * 5 * BLOCK_NUMEL // 2}, 3, 2),
    ({"enable_async_reduce_grad": False}, 2, 1),
    *(({"max_live_grad_buffers": number}, 2, number) for number in (1, 2, 3)),
]


@pytest.mark.parametrize(("knobs", "num_gathered", "num_buffers"), COSTS, ids=str)
@on_ranks(2)
def test_each_unit_of_prefetch_depth_and_each_gradient_buffer_costs_one_buffer(
    knobs: dict[str, Any], num_gathered: int, num_buffers: int
) -> None:
    memory = tracked(wrap(deep(), **knobs))
    block, root = 4 * BLOCK_NUMEL, 4 * ROOT_NUMEL
    assert memory.peak.total <= memory.bound.total
    peak, bound = without_activations(memory)
    assert 0.98 * bound <= peak
    assert memory.role_peaks[Role.GATHERED] == root + num_gathered * block
    assert memory.role_peaks[Role.GRAD_BUFFER] == root + num_buffers * block


@on_ranks("mesh_name", mesh_name=["2", "HSDP 2x2"], policy=POLICIES)
def test_buckets_stay_below_the_bound(mesh_name: str, policy: str) -> None:
    bucket = 4 * 5 * BLOCK_NUMEL // 2
    for strategy in strategies_on(mesh_name):
        options = {"sharding_strategy": strategy, **on_mesh(mesh_name)}
        plain, in_buckets = (
            tracked(wrap(deep(), mp_policy=POLICIES[policy], bucket_bytes=nbytes, **options), 2)
            for nbytes in (None, bucket)
        )
        assert in_buckets.peak.total <= in_buckets.bound.total, strategy
        # The bound has room for buckets, and trainings take some of it.
        assert in_buckets.bound.total > plain.bound.total
        if strategy == "optim_grads_params":
            for role in (Role.GATHERED, Role.GRAD_BUFFER):
                assert in_buckets.role_peaks[role] > plain.role_peaks[role]


@on_ranks(2, strategy=STRATEGIES)
def test_blocks_share_collectives_in_buckets_and_none_is_larger_than_told(strategy: str) -> None:
    nbytes = 4 * BLOCK_NUMEL
    for per_bucket in (1, 2, 3):
        options = {"sharding_strategy": strategy, "bucket_bytes": per_bucket * nbytes}
        model = wrap(deep(), **options)
        optimizer = _optimizer(model)
        _step(model, optimizer)
        with sends(named_units(model)[0][1].groups[0].axes) as sent:
            _step(model, optimizer)
        # Of the root, which is no multiple of a block, and of blocks.
        numbers: dict[str, Counter[int]] = {"reduce": Counter(), "gather": Counter()}
        for (kind, _, _, size), times in sent.items():
            numbers["gather" if kind == "all_gather" else "reduce"][size] += times
        most = max(per_bucket * nbytes, 4 * ROOT_NUMEL)
        assert all(max(sizes) <= most for sizes in numbers.values() if sizes)
        full = NUM_BLOCKS // per_bucket
        assert numbers["reduce"][per_bucket * nbytes] >= full - 1
        assert sum(numbers["reduce"].values()) <= NUM_BLOCKS / per_bucket + 2
        if strategy == "optim_grads_params":
            assert sum(numbers["gather"].values()) <= 2 * NUM_BLOCKS / per_bucket + 3


type Found = dict[str, tuple[int, tuple[int, ...]]]


def by_number_of_blocks(num_blocks: int, num_microbatches: int) -> Found:
    """By strategy: the peak, and the most bytes of each role that comes and goes."""
    found = {}
    for strategy in STRATEGIES:
        memory = tracked(wrap(deep(num_blocks), sharding_strategy=strategy), num_microbatches)
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
    # ZeRO-2 and ZeRO-1 differ in nothing with one micro-batch; DDP's all-reduce is in place, and
    # what one other rank sends for a reduce-scatter arrives in the main gradient.
    assert four["optim_grads"] == four["optim"]
    assert four["no_shard"][2] == four["optim"][2] == 0


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
        if case == (4, 2):
            # Where full gradients of all blocks are little more than of two, those of ZeRO-1 are
            # less than these and what ZeRO-2 receives to be added.
            del totals[1]
        assert totals == sorted(totals, reverse=True), case
        assert totals[0] > totals[1] > totals[-1], case


@on_ranks(1, strategy=STRATEGIES)
def test_one_rank_gathers_nothing_and_has_no_buffer_for_communication(strategy: str) -> None:
    found = tracked(wrap(deep(), sharding_strategy=strategy)).role_peaks
    assert found[Role.GATHERED] == found[Role.COMMUNICATION] == found[Role.MODEL_WEIGHT] == 0
    assert found[Role.GRAD_BUFFER] == 4 * (ROOT_NUMEL + 2 * BLOCK_NUMEL)


@on_ranks(2)
def test_a_recomputed_region_of_units_keeps_two_of_them_gathered() -> None:
    memory = tracked(wrap(deep(kind=CheckpointedRegion, use_reentrant=False)))
    assert memory.role_peaks[Role.GATHERED] == memory.bound.gathered


@pytest.mark.parametrize(("depth", "buffers"), [(1, 2), (2, 1), (2, 3)])
@on_ranks(2)
def test_units_inside_units_stay_below_the_bound(depth: int, buffers: int) -> None:
    model = deep(4, block=_nest)
    units = [unit for nest in model.blocks for unit in (nest[1], nest)]
    wrap(model, units, unshard_prefetch_depth=depth, max_live_grad_buffers=buffers)
    memory = tracked(model)
    assert 0.9 * memory.bound.total <= memory.peak.total <= memory.bound.total
    assert memory.role_peaks[Role.GATHERED] <= memory.bound.gathered
    assert memory.role_peaks[Role.GRAD_BUFFER] <= memory.bound.grad_buffer


@on_ranks(2, strategy=["no_shard", "optim_grads_params"], policy=POLICIES)
def test_the_tracked_peak_is_what_the_allocator_hands_out(strategy: str, policy: str) -> None:
    model = wrap(deep(), sharding_strategy=strategy, mp_policy=POLICIES[policy])
    optimizer = _optimizer(model)

    def backward() -> None:
        model(torch.ones(2, WIDTH)).square().mean().backward()

    _step(model, optimizer)
    with memory_tracker(model, optimizer) as memory:
        backward()
    optimizer.zero_grad()
    allocated, seen = peak_nbytes(backward), memory.peak.total - memory.bound.resting
    # Gloo gathers into buffers of its own first; its threads free them when they next run.
    itemsize = 4 if policy == "fp32" else 2
    own = 0 if strategy == "no_shard" else 2 * BLOCK_NUMEL * itemsize
    assert seen <= allocated <= seen + own


KNOBS = (
    {"unshard_prefetch_depth": 2, "max_live_grad_buffers": 1},
    {"unshard_prefetch_depth": 3, "max_live_grad_buffers": 4},
    {"unshard_prefetch_bytes": 2500, "bucket_bytes": 5000, "enable_trace_pool": True},
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


@pytest.mark.parametrize(
    ("strategy", "mesh_name"),
    quick_rows(itertools.product(STRATEGIES, ("2", "HSDP 2x2")), [(STRATEGIES[-1], "2")]),
)
@on_ranks("mesh_name")
def test_no_bit_of_any_result_depends_on_the_knobs(strategy: str, mesh_name: str) -> None:
    for name in KNOB_PATTERNS:
        traces = []
        for knobs in ({}, *KNOBS):

            def shard(module: nn.Module, name: str = name, knobs: Any = knobs) -> None:
                options = {**PATTERNS[name].options, **knobs, **on_mesh(mesh_name)}
                fully_shard(module, sharding_strategy=strategy, **options)

            traces.append(train_sharded(PATTERNS[name], shard))
        first, *others = traces
        for other in others:
            assert other.losses == first.losses, name
            assert all(torch.equal(other.params[k], first.params[k]) for k in first.params), name


@on_ranks(2, depth=[1, 2, 3, 20])
def test_a_deeper_prefetch_gathers_nothing_twice(depth: int) -> None:
    model = wrap(deep(), unshard_prefetch_depth=depth)
    optimizer = _optimizer(model)
    _step(model, optimizer)
    wire = listen(model)
    _step(model, optimizer)
    assert wire.count("all_gather") == 2 * NUM_BLOCKS + 1


@on_ranks(
    1,
    knob=[
        *("unshard_prefetch_depth", "unshard_prefetch_bytes", "max_live_grad_buffers"),
        "bucket_bytes",
    ],
    value=[0, 1.5, True],
)
def test_a_knob_below_one_is_rejected_by_name(knob: str, value: Any) -> None:
    text = said(ValueError, lambda: wrap(deep(1), **{knob: value}))
    assert f"{knob} must be a whole number of at least 1, got {value}" in text
