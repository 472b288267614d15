"""Plans compared with real trainings: bytes by role, and the events of a step in order."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.diagnostics import Role, memory_tracker
from megatron_fsdp_v2.dtensor.sharded_rows import local_of
from megatron_fsdp_v2.memory.host_memory import is_in_host_memory
from megatron_fsdp_v2.params.formats import register_format
from megatron_fsdp_v2.plan import (
    MeshDescription,
    Plan,
    Strategy,
    TrainingDescription,
    describe_module,
    plan_one,
)
from megatron_fsdp_v2.plan.optimizer_state import step_counter_nbytes
from megatron_fsdp_v2.plan.run import Run, run_training
from megatron_fsdp_v2.plan.step import Step, StepEvent, StepRecorder
from megatron_fsdp_v2.runtime.module import named_units
from megatron_fsdp_v2.runtime.options import RuntimeOptions
from tests.cases import quick_only
from tests.distributed.checkpoint_trainings import block_muon
from tests.distributed.test_weight_formats import Layers
from tests.distributed.wrapping import BF16, Dispatched, batch, count_collectives, mesh_of, wrap
from tests.ranks import RankPools
from tests.reference.models import Checkpointed, Formula, Stack, UsedTwice
from tests.reference.two_way import TwoWayFormat

FP32_SUMS = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16,
    main_params_dtype=torch.float32,
    main_grads_dtype=torch.float32,
    grad_comm_dtype=torch.float32,
)


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        strategy: Sharding strategy along the inner axis.
        mesh: Ranks along each axis.
        outer: Sharding strategy along the outer axis.
        policy: Mixed precision policy.
        optimizer: Name of the optimizer in plans.
        num_microbatches: Number of micro-batches of a step.
        num_in_flight: Number of forwards that run before the first backward.
        is_offloaded: Whether `CPUOffloadPolicy` is given.
        syncs: When gradients are synchronized: in the last backward, in each, or after all.
        options: Other options of `fully_shard`.
        model: Name of the model.
    """

    strategy: str
    mesh: tuple[int, ...] = (2,)
    outer: str = "no_shard"
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    optimizer: str = "adam"
    num_microbatches: int = 1
    num_in_flight: int = 1
    is_offloaded: bool = False
    syncs: Literal["last", "each", "after"] = "last"
    options: dict[str, Any] = field(default_factory=dict)
    model: str = "stack"

    @property
    def num_ranks(self) -> int:
        """Number of all ranks."""
        return torch.Size(self.mesh).numel()


def case(strategy: str, mesh: tuple[int, ...] = (2,), **given: Any) -> Case:
    """A case with these attributes; other names are options of `fully_shard`."""
    names = {each.name for each in fields(Case)}
    options = {name: given.pop(name) for name in given.keys() - names}
    return Case(strategy, mesh, options=options, **given)


ZERO3 = "optim_grads_params"
CASES = {
    "no_shard": case("no_shard", policy=BF16),
    "optim, 3 micro-batches": case("optim", policy=BF16, num_microbatches=3),
    "optim_grads, momentum": case("optim_grads", policy=FP32_SUMS, optimizer="sgd_momentum"),
    "optim_grads_params, blocks": case(
        ZERO3, policy=BF16, num_microbatches=4, shard_granularity="block:2"
    ),
    "optim_grads_params, synchronous": case(
        ZERO3, num_microbatches=2, enable_unshard_prefetch=False, enable_async_reduce_grad=False
    ),
    "nested, tied and frozen, muon": case(
        ZERO3, model="special", optimizer="muon", unshard_prefetch_bytes=2200
    ),
    "offloaded, HSDP": case(ZERO3, (2, 2), policy=BF16, num_microbatches=2, is_offloaded=True),
    "optim_grads_params, each synchronized": case(
        ZERO3, num_microbatches=2, syncs="each", unshard_prefetch_depth=2
    ),
    "optim, each synchronized": case("optim", num_microbatches=2, syncs="each"),
    "optim_grads_params, forwards first": case(ZERO3, num_microbatches=3, num_in_flight=2),
    "optim_grads, forwards first": case("optim_grads", num_microbatches=3, num_in_flight=3),
    "nested, tied and frozen, ahead by bytes": case(
        ZERO3, model="special", unshard_prefetch_bytes=2200
    ),
    "nested, tied and frozen, in a fixed order": case("optim_grads", model="special", policy=BF16),
    "owners run after sharing units": case(ZERO3, model="tied"),
    "owners run after sharing units, in a fixed order": case(
        "optim_grads", model="tied", num_microbatches=2, syncs="each"
    ),
    "used twice": case(ZERO3, model="used twice", num_microbatches=2),
    "used twice, in a fixed order": case("optim_grads", model="used twice"),
    "recomputed": case(ZERO3, model="recomputed", num_microbatches=2),
    "recomputed, not reentrant": case(
        ZERO3, model="recomputed, not reentrant", unshard_prefetch_depth=2
    ),
    "recomputed, kept gathered": case(ZERO3, model="recomputed", reshard_after_forward=False),
    "muon, replicated": case("optim", mesh=(4,), optimizer="muon"),
    "HSDP, deep": case(
        ZERO3, (2, 2), num_microbatches=2, unshard_prefetch_depth=2, max_live_grad_buffers=1
    ),
    "HSDP, synchronous": case(
        "optim_grads", (2, 2), enable_async_reduce_grad=False, num_microbatches=2
    ),
    "HSDP, owners run after sharing units": case(
        ZERO3, (2, 2), model="tied", max_live_grad_buffers=1
    ),
    "HSDP, synchronized afterwards": case(ZERO3, (2, 2), num_microbatches=2, syncs="after"),
    "DDP, two axes": case("no_shard", (2, 2), num_microbatches=2),
    "HSDP, muon": case("optim_grads", (2, 2), optimizer="muon"),
    "HFSDP": case(ZERO3, (2, 2), outer="optim", policy=FP32_SUMS, num_microbatches=3),
    "HFSDP, ZeRO-1": case("optim", (2, 2), outer="optim", policy=BF16),
    "offloaded, ZeRO-1": case("optim", policy=BF16, num_microbatches=2, is_offloaded=True),
    "offloaded, DDP, each synchronized": case(
        "no_shard", num_microbatches=3, syncs="each", is_offloaded=True
    ),
    "offloaded, nested, tied and frozen": case(
        ZERO3, model="special", optimizer="sgd_momentum", is_offloaded=True
    ),
    "offloaded, HFSDP": case(
        ZERO3, (2, 2), outer="optim", num_microbatches=4, syncs="each", is_offloaded=True
    ),
    "two payloads": case(ZERO3, model="two ways", num_microbatches=2),
    "two payloads, kept gathered": case(ZERO3, model="two ways", reshard_after_forward=False),
    "two payloads, recomputed": case(ZERO3, model="two ways, recomputed", num_microbatches=2),
    "two payloads, ZeRO-1": case("optim", model="two ways", num_microbatches=3),
    "outer axis of one rank": case(ZERO3, (1, 2), outer="optim"),
}


def build(case: Case) -> tuple[Any, list[nn.Module]]:
    """The model and its units, inner ones first."""
    if case.model == "special":
        model: Any = Nested()
        return model, [model.blocks[1].inner, *model.blocks]
    if case.model == "tied":
        model = Tied()
        return model, [*reversed(model.blocks)]
    if case.model.startswith("two ways"):
        register_format(TwoWayFormat)
        model = Layers(recompute="not reentrant" if "recomputed" in case.model else "")
        return model, [*model.blocks]
    torch.manual_seed(0)
    model = UsedTwice(3) if case.model == "used twice" else Stack(5)
    if case.model.startswith("recomputed"):
        model = Checkpointed(use_reentrant=case.model == "recomputed")
    return model, list(model.blocks)


class Tied(Stack):
    """The last two blocks have parameters that earlier modules use first.

    Units are created from last to first, so the last two blocks own these parameters. The last
    block has no other trained parameter.
    """

    def __init__(self) -> None:
        super().__init__(5)
        self.blocks[4].requires_grad_(False)
        self.blocks[4].down.bias.requires_grad_(True)
        self.blocks[1].norm.bias = self.blocks[4].down.bias
        self.input.bias = self.blocks[3].norm.bias


class Nested(Stack):
    """A unit inside a unit, weights tied across units, and frozen ones."""

    def __init__(self) -> None:
        super().__init__(3)
        self.blocks[1] = _outer()
        self.blocks[2].down.bias = self.blocks[0].down.bias
        self.blocks[0].norm.weight.requires_grad_(False)
        self.output.weight.requires_grad_(False)


def _outer() -> nn.Module:
    """A block with a unit inside."""
    inner = nn.Sequential(nn.Linear(7, 19), nn.Tanh(), nn.Linear(19, 7))
    return Formula(lambda m, x: x + m.inner(m.first(x)), first=nn.Linear(7, 7), inner=inner)


def optimizer_of(case: Case, model: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if case.optimizer == "adam":
        return torch.optim.AdamW(trained)
    if case.optimizer == "sgd_momentum":
        return torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    return block_muon(model, lr=0.01)


def step(case: Case, model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    losses: deque[torch.Tensor] = deque()
    for number in range(case.num_microbatches + case.num_in_flight - 1):
        if number < case.num_microbatches:
            outputs = model(batch(dist.get_rank(), number))
            losses.append(outputs.float().square().mean())
        backward = number - case.num_in_flight + 1
        if backward >= 0:
            is_last = backward == case.num_microbatches - 1
            synchronizes = case.syncs == "each" or (case.syncs == "last" and is_last)
            with nullcontext() if synchronizes else model.no_sync():
                losses.popleft().backward()
    if case.syncs == "after":
        model.reduce_grad()
    optimizer.step()


@dataclass(frozen=True)
class Measured:
    """A training on one rank.

    Attributes:
        nbytes: Bytes by role.
        peaks: Peak bytes of each role in a step.
        step: The events of a step.
        sent: Collectives of a step, including the optimizer's.
    """

    nbytes: dict[str, int]
    peaks: dict[Role, int]
    step: Step
    sent: Counter[Any]


def measure(case: Case) -> Measured:
    """Measure the events, collectives and memory of a step in the steady state."""
    model, units = build(case)
    options: dict[str, Any] = dict(case.options)
    if len(case.mesh) > 1:
        options["outer_dp_sharding_strategy"] = case.outer
    model = wrap(
        model,
        units,
        mesh=mesh_of(*case.mesh),
        sharding_strategy=case.strategy,
        mp_policy=case.policy,
        offload_policy=CPUOffloadPolicy() if case.is_offloaded else None,
        **options,
    )
    optimizer = optimizer_of(case, model)
    for _ in range(2):
        step(case, model, optimizer)
    axes = next(group.axes for _, unit in named_units(model) for group in unit.groups)
    with count_collectives(axes) as sent, StepRecorder(model) as recorder:
        step(case, model, optimizer)
    found = state_bytes(optimizer)

    def count_copies(func: Any, args: Any, _: Any) -> None:
        """Count bytes copied from and to host memory, in the dtype of the host tensor."""
        if func.overloadpacket is torch.ops.aten.copy_:
            to, source = map(is_in_host_memory, args[:2])
            if to is not source:
                found["to_host" if to else "to_device"] += args[not to].nbytes

    optimizer.zero_grad()
    with memory_tracker(model, optimizer) as memory, Dispatched(count_copies):
        step(case, model, optimizer)
    if case.is_offloaded:
        found["host"] = sum(memory.offloaded.values()) - found["counters"]
        on_host = (Role.MAIN_WEIGHT, Role.MAIN_GRAD, Role.OPTIMIZER)
        assert [role for role in on_host if memory.live[role]] == []
    return Measured(found, memory.role_peaks, recorder.step, sent)


def state_bytes(optimizer: torch.optim.Optimizer) -> Counter[str]:
    """Bytes of an optimizer's state on the device, and of its step counters."""

    def nbytes(tensor: torch.Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    found: Counter[str] = Counter()
    for param, state in optimizer.state.items():
        for name, tensor in state.items():
            if name == "step":
                found["counters"] += nbytes(tensor)
            elif not is_in_host_memory(local_of(param)):
                found["optimizer"] += nbytes(local_of(tensor))
    return found


def planned(case: Case) -> tuple[TrainingDescription, Plan, Run]:
    """The description, the plan and the simulated run of the same training."""
    with torch.device("meta"):
        model, units = build(case)
    options = dict(case.options)
    granularity = options.pop("shard_granularity", "row")
    reshard_after_forward = options.pop("reshard_after_forward", True)
    described, plain_nbytes = describe_module(model, units)
    training = TrainingDescription(
        described,
        {"dp": MeshDescription(case.num_ranks)},
        case.policy,
        granularity=granularity,
        reshard_after_forward=reshard_after_forward,
        options=RuntimeOptions(**options),
        optimizer=case.optimizer,
        num_microbatches=case.num_microbatches,
        num_in_flight=case.num_in_flight,
        defers_sync=case.syncs == "last",
        syncs_afterwards=case.syncs == "after",
        runs=RUNS.get(case.model, ()),
        recomputes_reentrantly=case.model == "recomputed",
        recompute_factor=1.0 if "recomputed" in case.model else 0.0,
        plain_nbytes=plain_nbytes,
        on_cpu=True,
        cpu_offload=case.is_offloaded,
    )
    outer_size = case.mesh[0] if len(case.mesh) > 1 else None
    strategy = Strategy(case.strategy, case.outer, outer_size)
    return training, plan_one(training, strategy), run_training(training, strategy)


def planned_bytes(training: TrainingDescription, plan: Plan) -> dict[str, int]:
    """Planned bytes of the optimizer's state and of host memory."""
    found = {"optimizer": plan.peak[Role.OPTIMIZER]}
    if training.cpu_offload:
        found["host"] = plan.host_nbytes - step_counter_nbytes(training)
        found["to_device"] = plan.step.to_device_nbytes
        found["to_host"] = plan.step.to_host_nbytes
    return found


PLANNED_PEAKS = (
    *(Role.MAIN_WEIGHT, Role.MODEL_WEIGHT, Role.MAIN_GRAD),
    *(Role.GATHERED, Role.GRAD_BUFFER, Role.COMMUNICATION),
)
"""Roles whose memory does not depend on the computation of modules."""

RUNS = {"used twice": ("blocks.0", "blocks.1", "blocks.2", "blocks.0")}
"""Order in which units run, by model, if it differs from the order in which they are listed."""


def in_order(events: Sequence[StepEvent]) -> list[StepEvent]:
    """The events of a plan, with repeated micro-batches expanded."""
    runs = itertools.groupby(events, key=lambda each: each.times)
    every = itertools.chain.from_iterable(list(run) * times for times, run in runs)
    return [replace(each, times=1) for each in every]


QUICK = (
    *("optim, 3 micro-batches", "optim_grads, momentum"),
    *("optim_grads_params, blocks", "nested, tied and frozen, muon", "recomputed"),
    *("offloaded, HSDP", "HFSDP", "two payloads, recomputed"),
)


@pytest.mark.parametrize("name", quick_only(CASES, *QUICK))
def test_plan_matches_bytes_and_event_order_of_the_training(name: str, pools: RankPools) -> None:
    case = CASES[name]
    results: list[Measured] = pools(case.num_ranks).run(measure, case)
    training, plan, run = planned(case)
    for role, nbytes in planned_bytes(training, plan).items():
        measured = max(found.nbytes.get(role, 0) for found in results)
        # An optimizer may omit state of empty shards.
        assert nbytes == pytest.approx(measured, rel=0.01 if role == "optimizer" else 0), role
    # An optimizer may omit step counters of empty shards.
    counters = max(found.nbytes.get("counters", 0) for found in results)
    most = step_counter_nbytes(training)
    assert counters <= most <= 4 * sum(len(unit.params) for unit in training.units)
    assert case.is_offloaded or plan.host_nbytes == most
    # A plan excludes temporary memory of a format's writes.
    has_temporaries = case.model.startswith("two ways")
    for role in PLANNED_PEAKS[: -1 if has_temporaries else None]:
        measured = max(found.peaks[role] for found in results)
        assert run.device_memory.role_peaks[role] == measured, role
    order = in_order(plan.step.events)
    for found in results:
        assert found.step.events == order
    counts: Counter[Any] = Counter()
    for collective, count in plan.step.collectives.items():
        key = (collective.kind, collective.axis, collective.size, collective.nbytes)
        counts[key] += count
    measured_counts = [found.sent for found in results]
    if case.optimizer == "muon":
        # Ranks send different parts of matrices; a plan describes the rank that sends the most.
        assert counts in measured_counts
        most = max(sum(key[-1] * n for key, n in sent.items()) for sent in measured_counts)
        assert sum(key[-1] * count for key, count in counts.items()) == most
    else:
        assert all(counts == sent for sent in measured_counts)
    assert counts
