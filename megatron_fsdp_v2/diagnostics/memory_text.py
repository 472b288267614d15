"""The report of tracked memory as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_fsdp_v2._text import readable_size, table
from megatron_fsdp_v2.diagnostics.memory_ledger import Moment, Role
from megatron_fsdp_v2.diagnostics.walk import ROOT
from megatron_fsdp_v2.plan.memory_bound import PeakBytes

__all__ = ["MemoryText", "place", "render_memory"]

MAX_UNITS = 12
_OF_UNIT = (Role.GATHERED, Role.GRAD_BUFFER, Role.COMMUNICATION, Role.ACTIVATIONS)


@dataclass(frozen=True, slots=True)
class MemoryText:
    """Numbers of the report.

    Attributes:
        peak: The moment with most bytes.
        role_peaks: The most bytes of each role.
        unit_peaks: The most bytes of each unit.
        live: Bytes of each role at the end.
        bound: The bound of the peak.
        allocated: The peak of CUDA's statistics; None on a CPU.
        offloaded: Bytes of each role in host memory at the end.
        offloaded_peaks: The most bytes of each role in host memory.
    """

    peak: Moment
    role_peaks: Mapping[Role, int]
    unit_peaks: Mapping[str, int]
    live: Mapping[Role, int]
    bound: PeakBytes
    allocated: int | None
    offloaded: Mapping[Role, int]
    offloaded_peaks: Mapping[Role, int]


def render_memory(memory: MemoryText) -> str:
    """The report."""
    peak, bound = memory.peak, memory.bound
    share = 100.0 * peak.total / bound.total if bound.total else 100.0
    lines = [
        f"Peak {_size(peak.total)} on this rank, {place(peak)}; "
        f"the bound is {_size(bound.total)} ({share:.1f}% of it reached).",
        "",
        *_by_role(memory),
        "",
        *_by_unit(memory),
    ]
    found = [
        f"{role.value} {_size(memory.offloaded[role])} (peak {_size(peak)})"
        for role, peak in memory.offloaded_peaks.items()
        if peak
    ]
    if found:
        lines += ["", f"Offloaded to host memory: {', '.join(found)}."]
    if memory.allocated is not None:
        lines += ["", f"Peak by torch.cuda.max_memory_allocated: {_size(memory.allocated)}."]
    return "\n".join(lines)


def _by_role(memory: MemoryText) -> list[str]:
    limits = {
        Role.MAIN_WEIGHT: memory.bound.main_weight,
        Role.MODEL_WEIGHT: memory.bound.model_weight,
        Role.MAIN_GRAD: memory.bound.main_grad,
        Role.OPTIMIZER: memory.bound.optimizer,
        Role.GATHERED: memory.bound.gathered,
        Role.GRAD_BUFFER: memory.bound.grad_buffer,
        Role.COMMUNICATION: memory.bound.communication,
    }
    rows: list[Sequence[str]] = [("role", "at the peak", "bound", "own peak", "at the end")]
    for role in Role:
        numbers = (memory.peak.of_role(role), memory.role_peaks[role], memory.live[role])
        if any(numbers):
            limit = _size(limits[role]) if role in limits else ""
            rows.append((role.value, _size(numbers[0]), limit, *map(_size, numbers[1:])))
    totals = (memory.peak.total, memory.bound.total)
    ending = _size(sum(memory.live.values()))
    rows.append(("total", *map(_size, totals), "", ending))
    return table(rows)


def _by_unit(memory: MemoryText) -> list[str]:
    """Temporary memory of units at the peak, largest first."""
    units = {account.unit for account in memory.peak.accounts}
    at_peak = {unit: memory.peak.of_unit(unit) for unit in units}
    temporary = {unit: sum(found.get(r, 0) for r in _OF_UNIT) for unit, found in at_peak.items()}
    largest = sorted(units, key=lambda unit: (-temporary[unit], unit))
    header = ("unit", "resting", *(role.value for role in _OF_UNIT), "own peak")
    rows: list[Sequence[str]] = [header]
    for unit in largest[:MAX_UNITS]:
        found = at_peak[unit]
        resting = sum(found.values()) - temporary[unit]
        numbers = (resting, *(found.get(role, 0) for role in _OF_UNIT), memory.unit_peaks[unit])
        rows.append((unit or ROOT, *(_size(n) if n else "-" for n in numbers)))
    left = len(units) - MAX_UNITS
    return table(rows) + ([f"and {left} units more"] if left > 0 else [])


def place(moment: Moment) -> str:
    """A moment's phase and unit in words."""
    if moment.phase in ("forward", "backward"):
        return f"in the {moment.phase} of {moment.unit or ROOT}"
    return f"at: {moment.phase}"


def _size(nbytes: float) -> str:
    return readable_size(nbytes, digits=2)
