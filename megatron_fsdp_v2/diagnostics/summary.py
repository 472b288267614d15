"""A table of the parameter groups: what is sharded how, and the bytes it takes.

Runs of equal units are folded into one row.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, override

import torch
from torch import nn

from megatron_fsdp_v2._text import compact, table
from megatron_fsdp_v2.diagnostics.memory_units import group_bytes
from megatron_fsdp_v2.diagnostics.walk import ROOT, parameters_below, units_below
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.layout.placement import Placement

if TYPE_CHECKING:
    from megatron_fsdp_v2.params.group import ParameterGroup

__all__ = ["GroupRow", "GroupSummary", "group_summary"]

MAX_COLUMNS = 140
HEADER = (
    *("unit", "params", "elements", "dtypes", "placements", "state", "shard", "pad"),
    *("main", "model", "grad", "gather", "reduce"),
)
LEFT_ALIGNED = {"unit", "dtypes", "placements", "state"}
LEGEND = (
    "A folded row shows one of its units. Bytes on this rank: main, model at rest; grad while set; "
    "gather, reduce in temporary buffers.",
    "Dtypes of model weight/main weight/main gradient/communication. Placements: size of a "
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
_LETTERS = {Placement.REPLICATE: "R", Placement.SHARD: "S", Placement.PARTIAL: "P"}


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One parameter group.

    Attributes:
        unit: Name of its unit; empty for the module that was asked about.
        num_params: Parameters.
        numel: Elements of all its parameters, over all ranks.
        dtypes: Dtypes of weights and gradients.
        placements: Per mesh axis, outermost first: its size and a letter (replicated, sharded,
            partial) for each of model weight, main weight, main gradient and the gradient between
            micro-batches.
        is_trained: Whether it has gradients.
        shard_numel: Elements of a slice of the flat buffer, which is what this rank holds of the
            main weight.
        padding_numel: Elements of the flat buffer, over all slices, that belong to no parameter.
        main_weight_nbytes: Bytes of the main weight on this rank.
        model_weight_nbytes: Bytes of the model weight on this rank; 0 where it shares the main
            weight's storage.
        main_grad_nbytes: Bytes of the main gradient on this rank, from a reduction until gradients
            are None.
        gathered_nbytes: Bytes of the temporary buffer of gathered weights; 0 where the model
            weight is whole.
        full_grad_nbytes: Bytes of the temporary buffers a gradient passes through: the full one,
            a copy in the communication dtype, and a shard that waits for the outer axis.
    """

    unit: str
    num_params: int
    numel: int
    dtypes: GroupDtypes
    placements: str
    is_trained: bool
    shard_numel: int
    padding_numel: int
    main_weight_nbytes: int
    model_weight_nbytes: int
    main_grad_nbytes: int
    gathered_nbytes: int
    full_grad_nbytes: int

    @property
    def steady_nbytes(self) -> int:
        """Bytes on this rank between steps, when gradients are None."""
        return self.main_weight_nbytes + self.model_weight_nbytes


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """All parameter groups of a module; `str()` is a table of at most 140 columns.

    Attributes:
        rows: One per group, in the order of `modules()`.
        num_plain_params: Parameters outside of any group, which `fully_shard` was told to ignore.
        plain_nbytes: Their bytes on this rank.
    """

    rows: tuple[GroupRow, ...]
    num_plain_params: int = 0
    plain_nbytes: int = 0

    @property
    def num_params(self) -> int:
        """Parameters in groups."""
        return sum(row.num_params for row in self.rows)

    @property
    def numel(self) -> int:
        """Elements of parameters in groups, over all ranks."""
        return sum(row.numel for row in self.rows)

    @property
    def shard_numel(self) -> int:
        """Elements of main weights on this rank."""
        return sum(row.shard_numel for row in self.rows)

    @property
    def padding_numel(self) -> int:
        """Elements of flat buffers, over all slices, that belong to no parameter."""
        return sum(row.padding_numel for row in self.rows)

    @property
    def main_weight_nbytes(self) -> int:
        """Bytes of main weights on this rank."""
        return sum(row.main_weight_nbytes for row in self.rows)

    @property
    def model_weight_nbytes(self) -> int:
        """Bytes of model weights on this rank that main weights do not hold."""
        return sum(row.model_weight_nbytes for row in self.rows)

    @property
    def main_grad_nbytes(self) -> int:
        """Bytes of main gradients on this rank, from the first backward on."""
        return sum(row.main_grad_nbytes for row in self.rows)

    @property
    def steady_nbytes(self) -> int:
        """Bytes of all groups on this rank between steps; without optimizer state."""
        return sum(row.steady_nbytes for row in self.rows)

    @property
    def largest_gathered_nbytes(self) -> int:
        """Bytes of gathered weights of the unit with most of them."""
        return self._largest("gathered_nbytes")

    @property
    def largest_full_grad_nbytes(self) -> int:
        """Bytes of temporary gradient buffers of the unit with most of them."""
        return self._largest("full_grad_nbytes")

    def _largest(self, column: str) -> int:
        by_unit: dict[str, int] = {}
        for row in self.rows:
            by_unit[row.unit] = by_unit.get(row.unit, 0) + getattr(row, column)
        return max(by_unit.values(), default=0)

    @override
    def __str__(self) -> str:
        return _render(self)


def group_summary(module: nn.Module) -> GroupSummary:
    """Describe the parameter groups at and below a module. No communication.

    Bytes follow from layouts and dtypes, and are known before the first step.

    Args:
        module: A sharded module, or one that contains some.

    Raises:
        ValueError: Nothing in the module is sharded.
    """
    rows = [_row_of(name, group) for name, unit in units_below(module) for group in unit.groups]
    plain = [param for param in parameters_below(module) if not param.is_sharded]
    nbytes = sum(param.local.numel() * param.local.element_size() for param in plain)
    return GroupSummary(tuple(rows), len(plain), nbytes)


def _row_of(unit: str, group: ParameterGroup) -> GroupRow:
    layout, spec = group.layout, group.spec
    mesh = group.sharded_params[0].device_mesh  # type: ignore[attr-defined]
    placements = " ".join(
        f"{mesh.size(axis)}:"
        + "".join(
            _LETTERS[p] for p in (at.model_weight, at.main_weight, at.main_grad, at.unreduced_grad)
        )
        for axis, at in enumerate(spec.placements)
    )
    held = group_bytes(group)
    return GroupRow(
        unit=unit,
        num_params=len(group.names),
        numel=layout.param_numel,
        dtypes=spec.dtypes,
        placements=placements,
        is_trained=group.grads is not None,
        shard_numel=group.main_weight.tensor.numel(),
        padding_numel=layout.padding_numel,
        main_weight_nbytes=held.main_weight,
        model_weight_nbytes=held.model_weight,
        main_grad_nbytes=held.main_grad,
        gathered_nbytes=held.gathered,
        full_grad_nbytes=held.grad_buffer + held.grad_comm + held.partial_grad,
    )


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


def _render(summary: GroupSummary) -> str:
    """A table with a row for each group, or for each group of a run of equal units."""
    rows: list[Sequence[str]] = [HEADER]
    for units in _folded(summary.rows):
        for number, row in enumerate(units.rows):
            rows.append((units.label if number == 0 else "", *_cells(row)))
    rows.append(_total_cells(summary))
    rows = _fitted(rows)
    left = {number for number, name in enumerate(HEADER) if name in LEFT_ALIGNED}
    header, rule, *lines, total = table(rows, left=left, separator=_separator(rows))
    return "\n".join([header, rule, *lines, rule, total, *_closing(summary), *LEGEND])


def _closing(summary: GroupSummary) -> list[str]:
    lines = [
        f"At rest {_bytes(summary.steady_nbytes)} on this rank, besides "
        f"{_bytes(summary.main_grad_nbytes)} while gradients are set; the largest unit gathers "
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
    return str(number) if number < 10_000 else compact(number, 1000, "KMBT")


def _bytes(number: int) -> str:
    return compact(number, 1024)


# -- width ------------------------------------------------------------------------------------


def _separator(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
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
