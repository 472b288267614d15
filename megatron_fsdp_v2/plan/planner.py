"""Plans of a training under every strategy, the best plan, and advice if none fits."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_fsdp_v2._text import readable_size
from megatron_fsdp_v2.diagnostics.memory_ledger import Role
from megatron_fsdp_v2.layout.placement import (
    OUTER_STRATEGIES,
    STRATEGIES,
    ShardingStrategy,
    resolve_placements,
)
from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.plan.description import (
    MeshDescription,
    Strategy,
    TrainingDescription,
    mesh_sizes,
)
from megatron_fsdp_v2.plan.exposure import OverlapReport
from megatron_fsdp_v2.plan.machine import Machine
from megatron_fsdp_v2.plan.matrix_work import matrix_work
from megatron_fsdp_v2.plan.optimizer_state import state_nbytes, step_counter_nbytes
from megatron_fsdp_v2.plan.run import PlannedGroup, Run, run_training
from megatron_fsdp_v2.plan.step import Step, StepCollective

_SAME_TIME = 1.01

RESTING = (Role.MODEL_WEIGHT, Role.MAIN_WEIGHT, Role.OPTIMIZER, Role.OTHER)
"""Roles with bytes between steps, when gradients are None."""

_MOST_TIMES_RANKS = 64
"""Largest factor of the number of ranks that `advice` tries."""


@dataclass(frozen=True, slots=True)
class UnitSize:
    """A unit, or several equal units.

    Attributes:
        name: Name of the first unit; empty for the root.
        count: Number of equal units.
        num_groups: Flat buffers of each unit.
        numel: Elements of its parameters.
        padding_numel: Elements of its flat buffers that belong to no parameter.
        alignment_nbytes: Alignment of slices and parameters, in bytes of the smallest element of
            each flat buffer; the least over its buffers.
        gathered_nbytes: Bytes of its gathered weights.
        grad_buffer_nbytes: Bytes of its full gradient buffers.
    """

    name: str
    count: int
    num_groups: int
    numel: int
    padding_numel: int
    alignment_nbytes: int
    gathered_nbytes: int
    grad_buffer_nbytes: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """All collectives of one kind along one axis in a step.

    Attributes:
        mesh: Name of the mesh.
        axis: `inner` or `outer`.
        kind: See `StepCollective`.
        purpose: See `StepCollective`.
        size: Ranks that take part.
        count: Number of collectives.
        nbytes: Bytes of all full buffers; of all-to-alls, bytes that this rank sends.
        largest_nbytes: Bytes of the largest collective.
    """

    mesh: str
    axis: str
    kind: str
    purpose: str
    size: int
    count: int
    nbytes: int
    largest_nbytes: int


@dataclass(frozen=True)
class Plan:
    """A training under one strategy, on its first rank; optimizer state of the rank with most.

    Attributes:
        training: The training.
        strategy: The strategy.
        machine: The machine; None for a plan without times.
        step: Communication and time of a step.
        peak: Bytes by role at the peak of a step.
        units: Sizes of units.
        traffic: Collectives by kind.
        padding_numel: Elements of whole flat buffers that belong to no parameter.
        host_nbytes: Bytes of host memory: step counters, which an optimizer may keep there, and
            offloaded tensors.
        optimizer_seconds: Time in which a matrix optimizer exchanges and computes.
        idle_seconds: Time in which this pipeline stage waits for other stages.
    """

    training: TrainingDescription
    strategy: Strategy
    machine: Machine | None
    step: Step
    peak: Mapping[Role, int]
    units: tuple[UnitSize, ...]
    traffic: tuple[Traffic, ...]
    padding_numel: int
    host_nbytes: int
    optimizer_seconds: float
    idle_seconds: float

    @property
    def seconds(self) -> float:
        """Estimated time of a step."""
        return self.step.seconds + self.optimizer_seconds + self.idle_seconds

    @property
    def exposed_seconds(self) -> float:
        """Estimated time in which computation waits for communication."""
        return self.step.seconds - self.step.compute_seconds

    @property
    def overlap(self) -> OverlapReport:
        """Exposed collectives of the step, without those of the optimizer."""
        exposures = sorted(self.step.exposures, key=lambda each: each.issued_at)
        return OverlapReport(tuple(exposures), self.step.seconds)

    @property
    def moved_nbytes(self) -> int:
        """Bytes of the full buffers of all collectives of a step."""
        return sum(traffic.nbytes for traffic in self.traffic)

    @property
    def peak_nbytes(self) -> int:
        """Bytes alive at the peak of a step."""
        return sum(self.peak.values())

    @property
    def steady_nbytes(self) -> int:
        """Bytes alive between steps."""
        return sum(self.peak[role] for role in RESTING)

    def fits(self, memory_nbytes: int) -> bool:
        """Whether the peak is at most `memory_nbytes`."""
        return self.peak_nbytes <= memory_nbytes


def strategies(
    training: TrainingDescription,
    outer_sizes: Sequence[int] = (),
    others: tuple[tuple[str, ShardingStrategy], ...] = (),
) -> Iterator[Strategy]:
    """Every strategy that the meshes allow.

    Args:
        training: The training.
        outer_sizes: Sizes of an outer axis to try, besides 1-D meshes.
        others: See `Strategy.others`.

    Raises:
        ValueError: An outer size does not divide the ranks.
    """
    for outer_size, outer, inner in itertools.product(
        (None, *outer_sizes), OUTER_STRATEGIES, STRATEGIES
    ):
        strategy = Strategy(inner, outer, outer_size, others)
        sizes = [mesh_sizes(mesh, strategy) for mesh in training.meshes.values()]
        # Not every pair of names goes together.
        with contextlib.suppress(ValueError):
            resolve_placements(inner, outer, sizes[0])
            yield strategy


def plan_one(
    training: TrainingDescription, strategy: Strategy, machine: Machine | None = None
) -> Plan:
    """Plan a training under one strategy: its first rank runs in a simulated cluster.

    Raises:
        ValueError: The strategy is unknown or does not fit the meshes.
        RuntimeError: This process has a process group.
    """
    run = run_training(training, strategy, machine)
    groups, step = run.groups, run.step
    work = matrix_work(training, groups)
    step.collectives.update(work.collectives)
    optimizer_seconds = idle_seconds = 0.0
    if machine is not None:
        optimizer_seconds = machine.compute_seconds(work.flops) + sum(
            count * machine.seconds(collective.kind, collective.nbytes, collective.ranks)
            for collective, count in work.collectives.items()
        )
        per_microbatch = step.seconds / training.num_microbatches
        idle_seconds = (training.stages - 1) * per_microbatch / training.num_chunks
    state, host_state = state_nbytes(training, groups)
    return Plan(
        training,
        strategy,
        machine,
        step,
        peak=_peak(training, run, state, work.temporary_nbytes),
        units=tuple(_unit_sizes(groups)),
        traffic=tuple(_traffic(step.collectives)),
        padding_numel=sum(planned.group.layout.padding_numel for planned in groups),
        host_nbytes=step_counter_nbytes(training)
        + sum(run.host_memory.role_peaks.values())
        + host_state,
        optimizer_seconds=optimizer_seconds,
        idle_seconds=idle_seconds,
    )


def best_plan(plans: Sequence[Plan], memory_nbytes: int) -> Plan | None:
    """The best plan that fits; None if no plan does.

    The best plan takes the least time. Of plans within 1 % of that, which an estimate cannot tell
    apart, it takes the least memory. Without times it communicates the fewest bytes.
    """
    fitting = [plan for plan in plans if plan.fits(memory_nbytes)]
    if not fitting:
        return None
    fastest = min(plan.seconds for plan in fitting)
    if not fastest:
        return min(fitting, key=lambda plan: (plan.moved_nbytes, plan.peak_nbytes))
    equal = [plan for plan in fitting if plan.seconds <= fastest * _SAME_TIME]
    return min(equal, key=lambda plan: (plan.peak_nbytes, plan.seconds))


def advice(training: TrainingDescription, plans: Sequence[Plan], memory_nbytes: int) -> list[str]:
    """Changes that make a training fit. Each sentence is checked by a plan.

    Args:
        training: The training.
        plans: Its plans, none of which fits.
        memory_nbytes: Memory to fit in, in bytes.
    """
    known = {plan.strategy.name for plan in plans}
    further = [
        plan_one(training, strategy, plans[0].machine)
        for strategy in strategies(training, others=plans[0].strategy.others)
        if strategy.name not in known
    ]
    found = [
        f"--strategy {plan.strategy.inner} fits" for plan in further if plan.fits(memory_nbytes)
    ]
    # If another strategy fits, further advice is about the planned strategies.
    candidates = plans if found else [*plans, *further]
    least = min(candidates, key=lambda plan: plan.peak_nbytes)
    strategy, peak = least.strategy, least.peak_nbytes
    lighter, lightest = [], peak
    for alternative in training.alternatives:
        changed = _with_activations(training, alternative.activation_nbytes)
        then = plan_one(changed, strategy).peak_nbytes
        fits = "fits" if then <= memory_nbytes else "is not enough alone"
        found.append(
            f"{alternative.text} saves {readable_size(peak - then)} with {strategy.name}: {fits}"
        )
        if then < lightest:
            lighter, lightest = [(alternative.text, changed)], then
    found += _with_more_ranks([("", training), *lighter], strategy, memory_nbytes)
    temporary = least.peak[Role.GATHERED] + least.peak[Role.GRAD_BUFFER]
    if temporary * 2 > memory_nbytes:
        largest = max(least.units, key=lambda unit: unit.gathered_nbytes + unit.grad_buffer_nbytes)
        found.append(
            f"gathered weights and gradient buffers take {readable_size(temporary)}: make the "
            f"largest unit ({largest.name or 'the root'}) smaller, with units inside it or tensor "
            "parallelism"
        )
    if not any("fit" in sentence for sentence in found):
        found.append(
            f"no number of data-parallel ranks up to {_MOST_TIMES_RANKS} times these is enough: "
            "cut the model with tensor, pipeline or expert parallelism, or train fewer tokens at "
            "a time"
        )
    return found


def _with_more_ranks(
    changes: Sequence[tuple[str, TrainingDescription]], strategy: Strategy, memory_nbytes: int
) -> Iterator[str]:
    """The number of ranks that is enough, alone and together with the change that saves most."""
    fewest = _MOST_TIMES_RANKS + 1
    for text, training in changes:
        times = 2
        while times < fewest and not _multiplied(training, strategy, times).fits(memory_nbytes):
            times *= 2
        if times >= fewest or plan_one(training, strategy).fits(memory_nbytes):
            continue
        fewest = times
        counts = [f"{mesh.num_ranks * times} on {n}" for n, mesh in training.meshes.items()]
        together = f", together with {text}" if text else ""
        yield (
            f"{times} times the data-parallel ranks ({', '.join(counts)}) fit with "
            f"{strategy.name}{together}"
        )


def _multiplied(training: TrainingDescription, strategy: Strategy, times: int) -> Plan:
    meshes = {
        name: MeshDescription(mesh.num_ranks * times, mesh.stride)
        for name, mesh in training.meshes.items()
    }
    return plan_one(replace(training, meshes=meshes), strategy)


def _with_activations(training: TrainingDescription, nbytes: int) -> TrainingDescription:
    """The training with other bytes of activations, distributed over the units as before."""
    ratio = nbytes / max(training.activation_nbytes, 1)
    units = tuple(
        replace(unit, activation_nbytes=int(unit.activation_nbytes * ratio))
        for unit in training.units
    )
    return replace(training, units=units)


def _peak(
    training: TrainingDescription, run: Run, state_nbytes: int, optimizer_temporary: int
) -> dict[Role, int]:
    """The peak of forward and backward, or the optimizer's step if that holds more."""
    peak = {role: run.device_memory.peak.of_role(role) for role in Role}
    peak |= {Role.OPTIMIZER: state_nbytes, Role.OTHER: training.plain_nbytes}
    at_step = {role: nbytes if role in RESTING else 0 for role, nbytes in peak.items()}
    at_step[Role.MAIN_GRAD] = run.device_memory.role_peaks[Role.MAIN_GRAD]
    at_step[Role.COMMUNICATION] = optimizer_temporary
    peak[Role.ACTIVATIONS] += training.activation_nbytes
    return max(peak, at_step, key=lambda each: sum(each.values()))


def _unit_sizes(groups: Sequence[PlannedGroup]) -> Iterator[UnitSize]:
    by_unit: dict[str, list[PlannedGroup]] = {}
    for planned in groups:
        by_unit.setdefault(planned.unit.name, []).append(planned)
    alike: dict[object, list[list[PlannedGroup]]] = {}
    for members in by_unit.values():
        unit = members[0].unit
        alike.setdefault((unit.params, unit.mesh), []).append(members)
    for first, *others in alike.values():
        unit, own = first[0].unit, [planned.group for planned in first]
        yield UnitSize(
            name=unit.name,
            count=1 + len(others),
            num_groups=len(own),
            numel=unit.numel,
            padding_numel=sum(group.layout.padding_numel for group in own),
            alignment_nbytes=min(
                int(group.layout.alignment.line * group.format.smallest_itemsize(group.spec.dtypes))
                for group in own
            ),
            gathered_nbytes=max(
                sum(p.gathered.nbytes for group in own for p in group.payloads if p.uses & use)
                for use in (WeightUse.FORWARD, WeightUse.BACKWARD)
            ),
            grad_buffer_nbytes=sum(group.grads.full.nbytes for group in own if group.is_trained),
        )


def _traffic(collectives: Counter[StepCollective]) -> Iterator[Traffic]:
    def kind_of(collective: StepCollective) -> tuple[str, str, str, str, int]:
        c = collective
        return c.mesh, c.axis, c.kind, c.purpose, c.size

    for kind, found in itertools.groupby(sorted(collectives, key=kind_of), kind_of):
        members = list(found)
        yield Traffic(
            *kind,
            count=sum(collectives[each] for each in members),
            nbytes=sum(collectives[each] * each.nbytes for each in members),
            largest_nbytes=max(each.nbytes for each in members),
        )
