"""Plans of a training under every strategy, the best plan, and advice if none fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_fsdp_v2._text import readable_size
from megatron_fsdp_v2.layout.placement import OUTER_STRATEGIES, STRATEGIES, resolve_placements
from megatron_fsdp_v2.plan.description import MeshDescription, TrainingDescription
from megatron_fsdp_v2.plan.exposure import OverlapReport
from megatron_fsdp_v2.plan.machine import Machine
from megatron_fsdp_v2.plan.matrix_work import matrix_work
from megatron_fsdp_v2.plan.memory_bound import PeakBytes, peak_bytes
from megatron_fsdp_v2.plan.optimizer_state import (
    offloaded_nbytes,
    state_nbytes,
    step_counter_nbytes,
)
from megatron_fsdp_v2.plan.schedule import parent_of, replay
from megatron_fsdp_v2.plan.sharding import PlannedGroup, Strategy, mesh_sizes, shard
from megatron_fsdp_v2.plan.step import Step, StepCollective
from megatron_fsdp_v2.plan.unit_bytes import UnitBytes

__all__ = [
    "Plan",
    "Traffic",
    "UnitSize",
    "advice",
    "best_plan",
    "plan_all",
    "plan_one",
    "planned_units",
    "strategies",
]

_SAME_TIME = 1.01

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
    """A training under one strategy, on the rank that holds the most bytes.

    Attributes:
        strategy: The strategy.
        step: Communication and time of a step.
        peak: Bytes by role at the peak of a step.
        units: Sizes of units.
        traffic: Collectives by kind.
        numel: Elements of parameters of this rank's part of the model.
        padding_numel: Elements of whole flat buffers that belong to no parameter.
        plain_nbytes: Bytes of buffers and parameters that are not sharded.
        host_nbytes: Bytes of host memory: step counters, which an optimizer may keep there, and
            offloaded tensors.
        optimizer_seconds: Time in which a matrix optimizer exchanges and computes.
        idle_seconds: Time in which this pipeline stage waits for other stages.
        machine: The machine; None for a plan without times.
    """

    strategy: Strategy
    step: Step
    peak: PeakBytes
    units: tuple[UnitSize, ...]
    traffic: tuple[Traffic, ...]
    numel: int
    padding_numel: int
    plain_nbytes: int
    host_nbytes: int
    optimizer_seconds: float
    idle_seconds: float
    machine: Machine | None

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
        return self.peak.total + self.plain_nbytes

    @property
    def steady_nbytes(self) -> int:
        """Bytes alive between steps."""
        return self.peak.resting + self.plain_nbytes

    def fits(self, memory_nbytes: int) -> bool:
        """Whether the peak is at most `memory_nbytes`."""
        return self.peak_nbytes <= memory_nbytes


def strategies(
    training: TrainingDescription, outer_sizes: Sequence[int] = ()
) -> Iterator[Strategy]:
    """Every strategy that the meshes allow.

    Args:
        training: The training.
        outer_sizes: Sizes of an outer axis to try, besides 1-D meshes.

    Raises:
        ValueError: An outer size does not divide the ranks.
    """
    for inner in STRATEGIES:
        yield Strategy(inner)
    for outer_size in outer_sizes:
        for outer in OUTER_STRATEGIES:
            for inner in STRATEGIES:
                strategy = Strategy(inner, outer, outer_size)
                sizes = [mesh_sizes(mesh, strategy) for mesh in training.meshes.values()]
                try:
                    resolve_placements(inner, outer, sizes[0])
                except ValueError:
                    # Not every pair of names goes together.
                    continue
                yield strategy


def plan_one(
    training: TrainingDescription, strategy: Strategy, machine: Machine | None = None
) -> Plan:
    """Plan a training under one strategy, without communication and tensors.

    Raises:
        ValueError: The strategy is unknown or does not fit the meshes.
    """
    groups = shard(training, strategy)
    step = replay(training, groups, machine)
    work = matrix_work(training, groups)
    step.collectives.update(work.collectives)
    optimizer_seconds = 0.0
    idle_seconds = 0.0
    if machine is not None:
        optimizer_seconds = machine.compute_seconds(work.flops) + sum(
            count * machine.collective_seconds(c.kind, c.nbytes, c.size, c.stride)
            for c, count in work.collectives.items()
        )
        per_microbatch = step.seconds / training.num_microbatches
        idle_seconds = (training.stages - 1) * per_microbatch / training.num_chunks
    planned = [group for unit in groups for group in unit]
    return Plan(
        strategy=strategy,
        step=step,
        peak=_peak(training, groups, work.temporary_nbytes),
        units=tuple(_unit_sizes(training, groups)),
        traffic=tuple(_traffic(step.collectives)),
        numel=training.numel,
        padding_numel=sum(group.layout.padding_numel for group in planned),
        plain_nbytes=training.plain_nbytes,
        host_nbytes=step_counter_nbytes(training) + offloaded_nbytes(training, groups),
        optimizer_seconds=optimizer_seconds,
        idle_seconds=idle_seconds,
        machine=machine,
    )


def plan_all(
    training: TrainingDescription,
    chosen: Sequence[Strategy],
    machine: Machine | None = None,
) -> list[Plan]:
    """Plan a training under several strategies."""
    return [plan_one(training, strategy, machine) for strategy in chosen]


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


def advice(
    training: TrainingDescription,
    plans: Sequence[Plan],
    memory_nbytes: int,
) -> list[str]:
    """Changes that make a training fit. Each sentence is checked by a plan.

    Args:
        training: The planned training.
        plans: Its plans, none of which fits.
        memory_nbytes: Memory to fit in, in bytes.
    """
    machine = plans[0].machine
    known = {plan.strategy.name for plan in plans}
    apart = plans[0].strategy.others
    others = [replace(s, others=apart) for s in strategies(training) if s.name not in known]
    further = plan_all(training, others, machine)
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
    temporary = least.peak.gathered + least.peak.grad_buffer
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


def planned_units(
    training: TrainingDescription, groups: Sequence[tuple[PlannedGroup, ...]]
) -> list[UnitBytes]:
    """Units as `peak_bytes` takes them.

    Args:
        training: The training.
        groups: Groups of every unit.
    """
    indices = {unit.name: index for index, unit in enumerate(training.units)}
    owners = {
        (unit.name, param.name): group
        for unit, planned in zip(training.units, groups, strict=True)
        for group in planned
        for param in group.params
        if training.has_ties
    }
    units = []
    for index, (unit, planned) in enumerate(zip(training.units, groups, strict=True)):
        tied_groups = {id(owners[key]): owners[key] for key in unit.tied}
        units.append(
            UnitBytes(
                tuple(group.nbytes for group in planned),
                indices[parent_of(unit.name, indices)] if index else None,
                sum(group.nbytes.gathered for group in tied_groups.values()),
                unit.keeps_gathered or not training.reshard_after_forward,
                recomputes=bool(index) and training.recompute_factor > 0,
            )
        )
    return units


def _peak(
    training: TrainingDescription,
    groups: Sequence[tuple[PlannedGroup, ...]],
    optimizer_temporary: int,
) -> PeakBytes:
    """The peak of forward and backward, or the optimizer's step if that holds more."""
    units = planned_units(training, groups)
    backward = peak_bytes(
        units,
        training.options,
        optimizer_state=state_nbytes(training, groups),
        activations=training.activation_nbytes,
        num_held_beside=training.num_held_beside,
        accumulates=training.accumulates,
        has_gradients=training.has_gradients,
    )
    at_step = replace(
        backward,
        main_grad=sum(unit.sum("main_grad") for unit in units),
        gathered=0,
        grad_buffer=0,
        communication=optimizer_temporary,
        activations=0,
        unit=0,
    )
    return max(backward, at_step, key=lambda peak: peak.total)


def _unit_sizes(
    training: TrainingDescription, groups: Sequence[tuple[PlannedGroup, ...]]
) -> Iterator[UnitSize]:
    alike: dict[tuple[int, ...], UnitSize] = {}
    for unit, planned in zip(training.units, groups, strict=True):
        if not planned:
            continue
        key = tuple(id(group) for group in planned)
        if key in alike:
            alike[key] = replace(alike[key], count=alike[key].count + 1)
            continue
        alike[key] = UnitSize(
            name=unit.name,
            count=1,
            num_groups=len(planned),
            numel=unit.numel,
            padding_numel=sum(group.layout.padding_numel for group in planned),
            alignment_nbytes=min(
                int(group.layout.alignment.line * group.smallest_itemsize) for group in planned
            ),
            gathered_nbytes=sum(
                group.payload.nbytes(group.layout.numel) * group.payload.most_for_one_use
                for group in planned
            ),
            grad_buffer_nbytes=sum(group.nbytes.grad_buffer for group in planned),
        )
    yield from alike.values()


def _traffic(collectives: Counter[StepCollective]) -> Iterator[Traffic]:
    by_kind: dict[tuple[str, str, str, str, int], list[tuple[StepCollective, int]]] = {}
    for collective, count in collectives.items():
        key = (
            collective.mesh,
            collective.axis,
            collective.kind,
            collective.purpose,
            collective.size,
        )
        by_kind.setdefault(key, []).append((collective, count))
    for (mesh, axis, kind, purpose, size), members in sorted(by_kind.items()):
        yield Traffic(
            mesh,
            axis,
            kind,
            purpose,
            size,
            count=sum(count for _, count in members),
            nbytes=sum(count * collective.nbytes for collective, count in members),
            largest_nbytes=max(collective.nbytes for collective, _ in members),
        )
