"""A memory tracker: bytes by role and unit during a step, as text and as a plot.

Example:
    with memory_tracker(model, optimizer) as memory:
        train_step()
    print(memory.report())
    memory.plot("step.png")
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2._picture import picture_style
from megatron_fsdp_v2._text import readable_size, table
from megatron_fsdp_v2.diagnostics.memory_ledger import Ledger, Moment, Role
from megatron_fsdp_v2.diagnostics.memory_watch import MemoryWatch
from megatron_fsdp_v2.diagnostics.walk import ROOT, units_below

MAX_UNITS = 12
MAX_LABELS = 40
_OF_UNIT = (Role.GATHERED, Role.GRAD_BUFFER, Role.COMMUNICATION, Role.ACTIVATIONS)
_MIB = 1 << 20


class TrackedMemory:
    """The result of a memory tracker. All numbers are bytes on this rank.

    Args:
        ledger: Bytes on the device.
        host_ledger: Bytes of offloaded tensors in host memory.

    Attributes:
        live: Bytes by role now, or when tracking ended.
        role_peaks: The most bytes of each role, at any moment.
        unit_peaks: The most bytes of each unit, at any moment; the root's name is empty.
        offloaded: Bytes in host memory by role now, or when tracking ended: offloaded tensors, and
            allocations of steps for them. No other number includes these bytes.
        offloaded_peaks: The most bytes of each role in host memory, at any moment.
        max_memory_allocated: The peak of torch's statistics of a CUDA device; None on a CPU.
    """

    def __init__(self, ledger: Ledger, host_ledger: Ledger) -> None:
        self._ledger = ledger
        self.live = ledger.by_role
        self.role_peaks = ledger.role_peaks
        self.unit_peaks = ledger.unit_peaks
        self.offloaded = host_ledger.by_role
        self.offloaded_peaks = host_ledger.role_peaks
        self.max_memory_allocated: int | None = None

    @property
    def peak(self) -> Moment:
        """The moment with the most bytes."""
        return self._ledger.peak

    @property
    def intervals(self) -> list[Moment]:
        """The peak of each unit's forward and backward, in the order of time."""
        return [moment for moment in self._ledger.intervals if moment.total]

    def report(self) -> str:
        """The peak, and tables of bytes by role and by unit."""
        lines = [f"Peak {_size(self.peak.total)} on this rank, {_place(self.peak)}.", ""]
        lines += [*self._roles(), "", *self._units()]
        found = [
            f"{role.value} {_size(self.offloaded[role])} (peak {_size(peak)})"
            for role, peak in self.offloaded_peaks.items()
            if peak
        ]
        if found:
            lines += ["", f"Offloaded to host memory: {', '.join(found)}."]
        if self.max_memory_allocated is not None:
            allocated = _size(self.max_memory_allocated)
            lines += ["", f"Peak by torch.cuda.max_memory_allocated: {allocated}."]
        return "\n".join(lines)

    def _roles(self) -> list[str]:
        peak, peaks, live = self.peak, self.role_peaks, self.live
        rows: list[Sequence[str]] = [("role", "at the peak", "own peak", "at the end")]
        for role in Role:
            numbers = peak.of_role(role), peaks[role], live[role]
            if any(numbers):
                rows.append((role.value, *map(_size, numbers)))
        rows.append(("total", _size(peak.total), "", _size(sum(live.values()))))
        return table(rows)

    def _units(self) -> list[str]:
        """Temporary memory of units at the peak, largest first."""
        units = {account.unit for account in self.peak.accounts}
        at_peak = {unit: self.peak.of_unit(unit) for unit in units}
        temporary = {unit: sum(at_peak[unit].get(role, 0) for role in _OF_UNIT) for unit in units}
        largest = sorted(units, key=lambda unit: (-temporary[unit], unit))
        header = ("unit", "resting", *(role.value for role in _OF_UNIT), "own peak")
        rows: list[Sequence[str]] = [header]
        for unit in largest[:MAX_UNITS]:
            found = at_peak[unit]
            resting = sum(found.values()) - temporary[unit]
            numbers = resting, *(found.get(role, 0) for role in _OF_UNIT), self.unit_peaks[unit]
            rows.append((unit or ROOT, *(_size(n) if n else "-" for n in numbers)))
        left = len(units) - MAX_UNITS
        return table(rows) + ([f"and {left} units more"] if left > 0 else [])

    def plot(self, path: str | Path) -> None:
        """Draw a step: bytes by role, stacked, over forwards and backwards of the units.

        Args:
            path: File to write; its suffix selects the format, such as `.png` or `.svg`.

        Raises:
            RuntimeError: matplotlib is not installed.
        """
        try:
            # matplotlib is an optional dependency.
            figure_type: Any = importlib.import_module("matplotlib.figure").Figure
        except ImportError as error:
            raise RuntimeError("a plot needs matplotlib; install it, or print report()") from error
        with picture_style():
            figure = figure_type(figsize=(10, 5), layout="constrained")
            _draw(figure, self.intervals)
            figure.savefig(path, dpi=120)


def _place(moment: Moment) -> str:
    """A moment's phase and unit in words."""
    if moment.phase in ("forward", "backward"):
        return f"in the {moment.phase} of {moment.unit or ROOT}"
    return f"at: {moment.phase}"


def _size(nbytes: float) -> str:
    return readable_size(nbytes, digits=2)


def _draw(figure: Any, moments: Sequence[Moment]) -> None:
    """Stack the bytes of all roles over the peaks of intervals, in the order of time."""
    axes = figure.add_subplot()
    roles = [role for role in Role if any(moment.of_role(role) for moment in moments)]
    edges = range(len(moments) + 1)
    below = [0.0] * len(moments)
    colors = importlib.import_module("matplotlib").colormaps["tab10"].colors
    for role in roles:
        heights = [moment.of_role(role) / _MIB for moment in moments]
        top = [low + height for low, height in zip(below, heights, strict=True)]
        color = colors[list(Role).index(role)]
        axes.stairs(top, edges, baseline=below, fill=True, color=color, label=role.value)
        below = top
    step = max(1, -(-len(moments) // MAX_LABELS))
    axes.set_xticks(
        [position + 0.5 for position in edges[:-1:step]],
        [_label(moment) for moment in moments[::step]],
        rotation=90,
        fontsize=7,
    )
    axes.set_xlim(0, max(len(moments), 1))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB on this rank, highest of each interval")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", reverse=True)


def _label(moment: Moment) -> str:
    if moment.phase in ("forward", "backward"):
        return f"{moment.phase} {moment.unit or ROOT}"
    return moment.phase


@contextlib.contextmanager
def memory_tracker(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[TrackedMemory]:
    """Track the memory of a sharded model on this rank, by role and unit. No communication.

    Counts storages on the model's device, and separately those of offloaded tensors: permanently
    allocated tensors, live temporary buffers, and outputs of operations. Memory that a library
    allocates itself (gloo, NCCL, cuBLAS) is not counted; on CUDA the report also has torch's own
    peak, whose statistics are reset here. Results do not change; every operation takes longer.

    Args:
        module: The root.
        optimizer: Optimizer whose state and temporaries have their own role; None counts them as
            activations.

    Raises:
        ValueError: The module is not sharded, or is not a root.
    """
    if units_below(module)[0][0]:
        raise ValueError(
            f"{type(module).__name__} is not sharded itself; pass the module that fully_shard was "
            "called on last, the root"
        )
    ledger, host_ledger = Ledger(), Ledger()
    tracked = TrackedMemory(ledger, host_ledger)
    watch = MemoryWatch(module, optimizer, ledger, host_ledger)
    on_cuda = watch.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(watch.device)
    try:
        with watch:
            yield tracked
    finally:
        if on_cuda:
            tracked.max_memory_allocated = torch.cuda.max_memory_allocated(watch.device)
