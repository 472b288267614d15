"""Plans as text and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_fsdp_v2._text import compact, readable_size, table
from megatron_fsdp_v2.diagnostics.memory_ledger import Role
from megatron_fsdp_v2.plan.description import TrainingDescription
from megatron_fsdp_v2.plan.machine import Machine
from megatron_fsdp_v2.plan.planner import RESTING, Plan
from megatron_fsdp_v2_cli.plan.overlap import overlap_as_dict, overlap_lines

ROLES = (
    Role.MODEL_WEIGHT,
    Role.MAIN_WEIGHT,
    Role.MAIN_GRAD,
    Role.OPTIMIZER,
    Role.GATHERED,
    Role.GRAD_BUFFER,
    Role.COMMUNICATION,
    Role.ACTIVATIONS,
)
"""Roles of bytes at the peak, in the order of columns."""

_HEAD = (
    *("strategy", "model", "main", "grads", "optim", "gather", "reduce", "comm", "activ."),
    *("peak", "padding", "calls", "moved"),
)
_HOST_HEAD = ("host", "h2d", "d2h")
_TIME_HEAD = ("step", "exposed")
_LEGEND = (
    "Bytes on the rank with most, at the peak of a step. model, main: weights the forward computes "
    "with (0 where they are",
    "the main weights) and weights the optimizer steps; optim: its state; all kept between steps. "
    "grads: main gradients allocated by",
    "then. gather, reduce, comm, activ.: gathered weights, gradient buffers being reduced, "
    "copies in the communication",
    "dtype, activations. calls, moved: collectives of a step, bytes of their full buffers.",
)
_HOST_LEGEND = (
    "host: main weights, main gradients and optimizer state in host memory. h2d, d2h: what a step "
    "copies from there to the",
    "device, and back.",
)


@dataclass(frozen=True)
class PlanReport:
    """Plans of a training under several strategies.

    Attributes:
        plans: A plan for every strategy.
        best: The best plan that fits; None if none does, or the memory is unknown.
        shown: The plan shown in detail.
        memory_nbytes: Memory to fit in, in bytes; None if unknown.
        advice: Changes that make a plan fit, if none does.
        num_ranks: Ranks of the job.
        shows_overlap: Whether to list exposed collectives.
    """

    plans: tuple[Plan, ...]
    best: Plan | None
    shown: Plan
    memory_nbytes: int | None
    advice: tuple[str, ...]
    num_ranks: int
    shows_overlap: bool = False

    @property
    def training(self) -> TrainingDescription:
        """The planned training; of a pipeline, the stage with the largest peak."""
        return self.shown.training

    @property
    def machine(self) -> Machine | None:
        """The machine; None without times."""
        return self.shown.machine


def lines(report: PlanReport) -> Iterator[str]:
    """The report as text."""
    yield from _header(report)
    yield ""
    yield from _strategies(report)
    yield ""
    yield from _LEGEND
    if report.training.cpu_offload:
        yield from _HOST_LEGEND
    yield ""
    if report.training.offload_fraction:
        yield (
            f"host memory with {report.shown.strategy.name}: {_size(report.shown.host_nbytes)} a "
            f"rank for {report.training.offload_fraction:.0%} of what Adam steps: state, and "
            "copies of main weights and gradients"
        )
        yield ""
    yield from _units(report.shown)
    yield ""
    yield from _traffic(report.shown)
    yield ""
    if report.shows_overlap:
        yield f"What a step of {report.shown.strategy.name} waits for:"
        yield from overlap_lines(report.shown.overlap)
        yield ""
    yield from _verdict(report)


def _header(report: PlanReport) -> Iterator[str]:
    training, machine = report.training, report.machine
    meshes = ", ".join(f"{mesh.num_ranks} on {name}" for name, mesh in training.meshes.items())
    yield (
        f"{report.num_ranks} ranks ({meshes}); {training.numel:,} parameters in "
        f"{len(training.units)} units on each{training.label and ', ' + training.label}; "
        f"{training.optimizer}; {training.num_microbatches} micro-batch"
        f"{'es' * (training.num_microbatches > 1)} of {training.tokens} tokens a step"
    )
    if machine is not None:
        yield (
            f"machine {machine.name}: {machine.gpus_per_node} GPUs a node, "
            f"{machine.node_bandwidth / 1e9:g} GB/s between them, "
            f"{machine.network_bandwidth / 1e9:g} GB/s each to other nodes, "
            f"{machine.flops / 1e12:g} TFLOP/s of which {machine.efficiency:.0%} are reached"
        )
    if report.memory_nbytes is not None:
        yield f"memory for the training: {readable_size(report.memory_nbytes)} a rank"
    for note in training.notes:
        yield f"note: {note}"


def _strategies(report: PlanReport) -> Iterator[str]:
    head = [*_HEAD]
    if report.training.cpu_offload:
        head += _HOST_HEAD
    if report.machine is not None:
        head += _TIME_HEAD
    if report.memory_nbytes is not None:
        head.append("fits")
    rows = [head]
    for plan in report.plans:
        row = [plan.strategy.name]
        row += [_size(plan.peak[role]) for role in ROLES]
        row += [_size(plan.peak_nbytes), f"{plan.padding_numel / plan.training.numel:.2%}"]
        row += [str(sum(t.count for t in plan.traffic)), _size(plan.moved_nbytes)]
        if report.training.cpu_offload:
            copied = plan.step.to_device_nbytes, plan.step.to_host_nbytes
            row += [_size(nbytes) for nbytes in (plan.host_nbytes, *copied)]
        if report.machine is not None:
            row += [_seconds(plan.seconds), _seconds(plan.exposed_seconds)]
        if report.memory_nbytes is not None:
            row.append("yes" if plan.fits(report.memory_nbytes) else "no")
        rows.append(row)
    yield from table(rows)


def _units(plan: Plan) -> Iterator[str]:
    head = ("units", "how many", "buffers", "parameters", "padding", "aligned")
    rows = [[*head, "gathered", "gradients"]]
    for unit in sorted(plan.units, key=lambda unit: -unit.gathered_nbytes):
        row = [unit.name or "(root)", str(unit.count), str(unit.num_groups), f"{unit.numel:,}"]
        row += [f"{unit.padding_numel / max(unit.numel, 1):.2%}", f"{unit.alignment_nbytes} B"]
        rows.append([*row, _size(unit.gathered_nbytes), _size(unit.grad_buffer_nbytes)])
    yield f"With {plan.strategy.name}, the largest unit first:"
    yield from table(rows)


def _traffic(plan: Plan) -> Iterator[str]:
    if not plan.traffic:
        yield "Nothing is communicated: along an axis of one rank no collective is issued."
        return
    rows = [["collective", "for", "mesh", "axis", "ranks", "calls", "largest", "all of a step"]]
    for traffic in plan.traffic:
        row = [traffic.kind, traffic.purpose, traffic.mesh, traffic.axis]
        row += [str(traffic.size), str(traffic.count)]
        rows.append([*row, _size(traffic.largest_nbytes), _size(traffic.nbytes)])
    yield from table(rows)


def _verdict(report: PlanReport) -> Iterator[str]:
    if report.memory_nbytes is None:
        yield "No memory was given to fit in: add --machine or --memory for a verdict."
        return
    if report.best is not None:
        best = report.best
        time = f", {_seconds(best.seconds)} a step" if report.machine is not None else ""
        yield (
            f"Best that fits: {best.strategy.name} (peak {readable_size(best.peak_nbytes)}{time})."
        )
        return
    least = min(report.plans, key=lambda plan: plan.peak_nbytes)
    yield (
        f"Nothing fits: {least.strategy.name} has the least, "
        f"{readable_size(least.peak_nbytes)} of {readable_size(report.memory_nbytes)}. "
        "What would change that:"
    )
    for sentence in report.advice:
        yield f"  - {sentence}"


def _size(nbytes: int) -> str:
    return compact(nbytes, 1024) if nbytes else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


# -- data -------------------------------------------------------------------------------------


def as_dict(report: PlanReport) -> dict[str, Any]:
    """The report as plain data, for JSON: bytes, elements and seconds."""
    return {
        "num_ranks": report.num_ranks,
        "meshes": {name: mesh.num_ranks for name, mesh in report.training.meshes.items()},
        "optimizer": report.training.optimizer,
        "offload_fraction": report.training.offload_fraction,
        "cpu_offload": report.training.cpu_offload,
        "num_microbatches": report.training.num_microbatches,
        "numel": report.training.numel,
        "memory_nbytes": report.memory_nbytes,
        "machine": report.machine and dataclasses.asdict(report.machine),
        "best": None if report.best is None else report.best.strategy.name,
        "advice": list(report.advice),
        "notes": list(report.training.notes),
        "plans": [_plan_as_dict(plan, report) for plan in report.plans],
    }


def _plan_as_dict(plan: Plan, report: PlanReport) -> dict[str, Any]:
    found: dict[str, Any] = {
        "strategy": plan.strategy.name,
        "sharding_strategy": plan.strategy.inner,
        "outer_dp_sharding_strategy": plan.strategy.outer,
        "outer_size": plan.strategy.outer_size,
        "resting": {role.name.lower(): plan.peak[role] for role in ROLES if role in RESTING},
        "peak": {role.name.lower(): plan.peak[role] for role in ROLES},
        "other_nbytes": plan.peak[Role.OTHER],
        "host_nbytes": plan.host_nbytes,
        "to_device_nbytes": plan.step.to_device_nbytes,
        "to_host_nbytes": plan.step.to_host_nbytes,
        "steady_nbytes": plan.steady_nbytes,
        "peak_nbytes": plan.peak_nbytes,
        "padding_numel": plan.padding_numel,
        "units": [dataclasses.asdict(unit) for unit in plan.units],
        "collectives": [dataclasses.asdict(traffic) for traffic in plan.traffic],
    }
    if plan.machine is not None:
        found["seconds"] = {
            "step": plan.seconds,
            "compute": plan.step.compute_seconds,
            "exposed": plan.exposed_seconds,
            "optimizer": plan.optimizer_seconds,
            "idle": plan.idle_seconds,
        }
    if report.shows_overlap and plan is report.shown:
        found["overlap"] = overlap_as_dict(plan.overlap)
    if report.memory_nbytes is not None:
        found["fits"] = plan.fits(report.memory_nbytes)
    return found
