"""The report of a proof: verdict, tables, data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fsdp_v2._text import aligned, readable_size
from megatron_fsdp_v2_mcore.prove import sides
from megatron_fsdp_v2_mcore.prove.proof import ProofPhase, RunResult
from megatron_fsdp_v2_mcore.prove.shrink import NOT_RUN, Flags, as_words

PROVEN, DIFFERS, CANNOT_RUN = range(3)
"""Exit codes."""


@dataclass(frozen=True)
class ProofReport:
    """The results of a proof.

    Attributes:
        flags: The user's flags.
        impl: Layers of the rehearsal; None without a rehearsal.
        warnings: Sentences of the pre-flight.
        results: The runs.
        seconds: Duration of the proof.
    """

    flags: Flags
    impl: str | None
    warnings: Sequence[str]
    results: Sequence[RunResult]
    seconds: float

    @property
    def phases(self) -> list[tuple[int, RunResult, ProofPhase]]:
        """All comparisons, with the number and the result of their run."""
        return [
            (number, result, phase)
            for number, result in enumerate(self.results, start=1)
            for phase in result.phases
        ]

    @property
    def exit_code(self) -> int:
        """`PROVEN`, `DIFFERS` or `CANNOT_RUN`."""
        ours = [phase for _, _, phase in self.phases if phase.is_ours]
        if any(phase.differences for phase in ours):
            return DIFFERS
        return CANNOT_RUN if any(phase.error for phase in ours) else PROVEN

    @property
    def verdict(self) -> str:
        """One line: whether the configuration trains as Megatron's own data parallelism does."""
        ours = [each for each in self.phases if each[2].is_ours]
        for number, _, phase in ours:
            if phase.differences:
                return f"DIFFERS: run {number}, {phase.name}: {phase.differences[0]}"
        for number, _, phase in ours:
            if phase.error:
                return f"CANNOT RUN: run {number}, {phase.name}: {phase.error}"
        largest = max(phase.loss for _, _, phase in ours)
        compared = sum(phase.num_compared for _, _, phase in ours)
        runs = f"{len(self.results)} run{'s' * (len(self.results) > 1)}"
        return (
            f"PROVEN: {runs} trained as Megatron's own DDP does; losses differ by at most "
            f"{largest:.1e}, and {compared:,} elements of gradients and weights were compared"
        )


def flag_table(report: ProofReport) -> dict[str, list[str]]:
    """Sort the user's flags by what the proof says about them."""
    impl = report.impl
    needs_gpu = dict(sides.needs_gpu(report.flags, impl)) if impl else {}
    trained: Flags = {}
    for result in report.results:
        flags = sides.sharded(result.run).flags
        trained |= sides.on_cpu(flags, impl) if impl else flags
    table: dict[str, list[str]] = {"proven": [], "proven with another value": []}
    table |= {"only parsed": [], "not proven without a GPU": []}
    for name, values in sorted(report.flags.items()):
        text = " ".join((name, *values))
        if name in needs_gpu:
            table["not proven without a GPU"].append(f"{text} ({needs_gpu[name]})")
        elif name in NOT_RUN or name not in trained:
            table["only parsed"].append(text)
        elif trained[name] == values:
            table["proven"].append(text)
        else:
            table["proven with another value"].append(f"{text} ({' '.join(trained[name])})")
    return table


def lines(report: ProofReport) -> Iterator[str]:
    """Format a report as text, line by line."""
    yield report.verdict
    for number, _, phase in report.phases:
        if not phase.is_ours and phase.differences:
            yield f"Megatron itself: run {number}, {phase.name}: {phase.differences[0]}"
        if not phase.is_ours and phase.error:
            yield f"run {number}, {phase.name}: not compared: {phase.error}"
    for number, result in enumerate(report.results, start=1):
        axes = ", ".join(map(_short, result.run.axes))
        yield f"run {number}: {result.run.world_size} ranks; {axes}"
    if report.impl:
        yield f"layers: {sides.layers_of(report.flags)[1]}"
    yield ""
    rows: list[tuple[str, ...]] = [
        ("run", "comparison", "losses", "norms", "elements", "seconds", "result")
    ]
    for number, _, phase in report.phases:
        what = "equal" if phase.is_equal else "cannot run" if phase.error else "differs"
        numbers = [_number(phase.loss), _number(phase.norm), f"{phase.num_compared:,}"]
        cells = numbers if phase.curves else ["", "", ""]
        rows.append((str(number), phase.name, *cells, f"{phase.seconds:.0f}", what))
    yield from aligned(rows, left=range(len(rows[0])))
    yield from _memory(report)
    yield ""
    for number, _, phase in report.phases:
        for difference in phase.differences[:_MOST_SHOWN]:
            yield f"run {number}, {phase.name}: {difference}"
    for what, flags in flag_table(report).items():
        if flags:
            yield f"{what}: {', '.join(flags)}"
    for warning in report.warnings:
        yield f"pre-flight: {warning}"
    yield f"{report.seconds:.0f} s"


def _memory(report: ProofReport) -> Iterator[str]:
    """Format what a rank of each run keeps, beside its plan."""
    rows: list[tuple[str, ...]] = [("run", "memory", "measured", "planned", "result")]
    for number, result in enumerate(report.results, start=1):
        if result.unplanned:
            yield f"run {number}: the memory was not planned: {result.unplanned}"
        for name, (measured, planned) in result.memory.items():
            is_near = abs(measured - planned) <= SAME_MEMORY * planned
            what = "equal" if is_near else f"differs by more than {SAME_MEMORY:.0%}"
            rows.append((str(number), name, readable_size(measured), readable_size(planned), what))
    if len(rows) > 1:
        yield ""
        yield from aligned(rows, left=range(len(rows[0])))


_MOST_SHOWN = 5
SAME_MEMORY = 0.01
"""Largest relative difference between measured and planned bytes."""


def as_dict(report: ProofReport) -> dict[str, Any]:
    """Return a report as data for JSON."""
    return {
        "exit_code": report.exit_code,
        "verdict": report.verdict,
        "seconds": report.seconds,
        "preflight": list(report.warnings),
        "layers": sides.layers_of(report.flags)[1] if report.impl else None,
        "flags": flag_table(report),
        "runs": [
            {
                "ranks": result.run.world_size,
                "axes": [_short(axis) for axis in result.run.axes],
                "flags": list(as_words(result.run.flags)),
                "phases": [_finite(dataclasses.asdict(phase)) for phase in result.phases],
                "memory": {
                    name: dict(zip(("measured", "planned"), both, strict=True))
                    for name, both in result.memory.items()
                },
            }
            for result in report.results
        ],
    }


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by their names."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _short(axis: str) -> str:
    return axis.removeprefix("--").removesuffix("-size").replace("-model-parallel", " parallel")


def _number(value: float) -> str:
    return f"{value:.0e}" if value else "0"
