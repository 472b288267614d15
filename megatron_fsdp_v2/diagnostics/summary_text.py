"""The text of a group summary: an aligned table, with runs of equal units folded into one row."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_fsdp_v2.diagnostics.walk import ROOT

if TYPE_CHECKING:
    from megatron_fsdp_v2.diagnostics.summary import GroupRow, GroupSummary
    from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes

__all__ = ["render"]

MAX_COLUMNS = 140
HEADER = (
    *("unit", "params", "elements", "dtypes", "placements", "state", "shard", "pad"),
    *("main", "model", "grad", "gather", "reduce"),
)
LEFT_ALIGNED = {"unit", "dtypes", "placements", "state"}
LEGEND = (
    "A folded row shows one of its units. Bytes on this rank: main, model, grad at rest; gather, "
    "reduce in temporary buffers.",
    "Dtypes of model weight/main weight/main gradient/gradient on the wire. Placements: size of a "
    "mesh axis, then model weight,",
    "main weight, main gradient, gradient between micro-batches: R replicated, S sharded, "
    "P partial.",
)
_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


@dataclass(frozen=True, slots=True)
class _Units:
    """Units that differ in nothing but numbers in their names.

    Attributes:
        parts: The name at its dots; a folded part holds ranges of numbers.
        rows: Their groups, without the unit's name.
        count: How many.
    """

    parts: tuple[str, ...]
    rows: tuple[GroupRow, ...]
    count: int

    @property
    def label(self) -> str:
        """The name, and how many units share it."""
        name = ".".join(self.parts) or ROOT
        return name if self.count == 1 else f"{name} ({self.count} units)"


def render(summary: GroupSummary) -> str:
    """A table with a row for each group, or for each group of a run of equal units."""
    table: list[Sequence[str]] = [HEADER]
    for units in _folded(summary.rows):
        for number, row in enumerate(units.rows):
            table.append((units.label if number == 0 else "", *_cells(row)))
    table.append(_total_cells(summary))
    table = _fitted(table)
    widths = [max(len(line[column]) for line in table) for column in range(len(HEADER))]
    separator = _separator(widths)
    lines = [
        separator.join(
            cell.ljust(width) if name in LEFT_ALIGNED else cell.rjust(width)
            for cell, width, name in zip(line, widths, HEADER, strict=True)
        ).rstrip()
        for line in table
    ]
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], *_closing(summary), *LEGEND])


def _closing(summary: GroupSummary) -> list[str]:
    lines = [
        f"At rest {_bytes(summary.resting_nbytes)} on this rank; the largest unit gathers "
        f"{_bytes(summary.largest_gathered_nbytes)} and has gradient buffers of "
        f"{_bytes(summary.largest_full_grad_nbytes)}."
    ]
    if summary.num_plain_params:
        lines.append(
            f"Not sharded: {summary.num_plain_params} parameters, {_bytes(summary.plain_nbytes)}."
        )
    return lines


# -- folding ----------------------------------------------------------------------------------


def _folded(rows: Sequence[GroupRow]) -> list[_Units]:
    """Units, those folded together whose names differ in numbers and whose groups are equal."""
    units = []
    for name, groups in itertools.groupby(rows, key=lambda row: row.unit):
        parts = tuple(name.split(".")) if name else ()
        alike = tuple(dataclasses.replace(group, unit="") for group in groups)
        units.append(_Units(parts, alike, 1))
    depth = max((len(unit.parts) for unit in units), default=0)
    # From the innermost number outwards: experts of a layer first, then the layers.
    for position in reversed(range(depth)):
        units = _folded_at(units, position)
    return units


def _folded_at(units: Sequence[_Units], position: int) -> list[_Units]:
    runs: dict[object, list[_Units]] = {}
    for number, unit in enumerate(units):
        key: object = number
        if position < len(unit.parts) and unit.parts[position].isdecimal():
            around = (unit.parts[:position], unit.parts[position + 1 :])
            key = (around, unit.rows, unit.count)
        runs.setdefault(key, []).append(unit)
    folded = []
    for run in runs.values():
        first = run[0]
        if len(run) > 1:
            numbers = _ranges([int(unit.parts[position]) for unit in run])
            parts = (*first.parts[:position], numbers, *first.parts[position + 1 :])
            first = _Units(parts, first.rows, sum(unit.count for unit in run))
        folded.append(first)
    return folded


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as ranges, such as `0-2,5`; the first and the last alone where those are many."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ",".join(texts) if len(texts) <= 3 else f"{texts[0]},..,{texts[-1]}"


# -- cells ------------------------------------------------------------------------------------


def _cells(row: GroupRow) -> tuple[str, ...]:
    return (
        str(row.num_params),
        _count(row.numel),
        _dtypes(row.dtypes, row.is_trained),
        row.placements,
        "trained" if row.is_trained else "frozen",
        _count(row.shard_numel),
        _percent(row.padding_numel, row.numel),
        *(
            _bytes(nbytes) if nbytes else "-"
            for nbytes in (
                row.main_weight_nbytes,
                row.model_weight_nbytes,
                row.main_grad_nbytes,
                row.gathered_nbytes,
                row.full_grad_nbytes,
            )
        ),
    )


def _total_cells(summary: GroupSummary) -> tuple[str, ...]:
    return (
        "total",
        str(summary.num_params),
        _count(summary.numel),
        *("", "", ""),
        _count(summary.shard_numel),
        _percent(summary.padding_numel, summary.numel),
        _bytes(summary.main_weight_nbytes),
        _bytes(summary.model_weight_nbytes),
        _bytes(summary.main_grad_nbytes),
        *("", ""),
    )


def _dtypes(dtypes: GroupDtypes, is_trained: bool) -> str:
    used = [dtypes.model_weight, dtypes.main_weight]
    if is_trained:
        used += [dtypes.main_grad, dtypes.grad_comm]
    names = [_DTYPES.get(dtype, str(dtype).removeprefix("torch.")) for dtype in used]
    return names[0] if len(set(names)) == 1 else "/".join(names)


def _percent(padding: int, numel: int) -> str:
    return f"{100.0 * padding / max(padding + numel, 1):.1f}%"


def _count(number: int) -> str:
    return str(number) if number < 10_000 else _scaled(number, 1000, ("K", "M", "B", "T"))


def _bytes(number: int) -> str:
    return str(number) if number < 1024 else _scaled(number, 1024, ("K", "M", "G", "T"))


def _scaled(number: int, base: int, suffixes: Sequence[str]) -> str:
    """About three digits, in the first unit in which the number is below the base."""
    power = 1
    while power < len(suffixes) and number / base**power >= base - 0.5:
        power += 1
    value = number / base**power
    digits = 1 if value < 99.95 else 0
    return f"{value:.{digits}f}{suffixes[power - 1]}"


# -- width ------------------------------------------------------------------------------------


def _separator(widths: Sequence[int]) -> str:
    return "  " if sum(widths) + 2 * (len(widths) - 1) <= MAX_COLUMNS else " "


def _fitted(table: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The table with unit names shortened in their middle where lines would be too long."""
    others = sum(max(len(line[column]) for line in table) for column in range(1, len(HEADER)))
    room = max(MAX_COLUMNS - others - (len(HEADER) - 1), len(HEADER[0]))
    return [(_shortened(line[0], room), *line[1:]) for line in table]


def _shortened(label: str, room: int) -> str:
    if len(label) <= room:
        return label
    # The end tells one unit from another, and says how many there are.
    kept = room - 2
    head = kept // 4
    return f"{label[:head]}..{label[len(label) - (kept - head) :]}"
