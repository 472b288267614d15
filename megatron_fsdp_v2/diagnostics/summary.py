"""A table of the parameter groups: their sharding and their bytes.

Consecutive equal units are one row.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, override

from torch import nn

from megatron_fsdp_v2._text import compact, table
from megatron_fsdp_v2.diagnostics.walk import ROOT, parameters_below, units_below
from megatron_fsdp_v2.layout.mixed_precision import DTYPES, GroupDtypes
from megatron_fsdp_v2.layout.placement import Placement
from megatron_fsdp_v2.params.group import ParameterGroup

MAX_COLUMNS = 140
LEGEND = (
    "A folded row shows one of its units. Bytes on this rank: main, model at rest; grad while set; "
    "gather, reduce in temporary buffers.",
    "Dtypes of model weight/main weight/main gradient/communication. Placements: size of a "
    "mesh axis, then model weight,",
    "main weight, main gradient, gradient between micro-batches: R replicated, S sharded, "
    "P partial.",
)
_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
_LETTERS = {Placement.REPLICATE: "R", Placement.SHARD: "S", Placement.PARTIAL: "P"}


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One parameter group.

    Attributes:
        unit: Name of its unit; empty for the given module.
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
        num_plain_params: Number of ignored parameters, which are in no group.
        plain_nbytes: Their bytes on this rank.
    """

    rows: tuple[GroupRow, ...]
    num_plain_params: int = 0
    plain_nbytes: int = 0

    def total(self, column: str) -> int:
        """Return the sum of a number of `GroupRow` over all groups."""
        return sum(getattr(row, column) for row in self.rows)

    def largest(self, column: str) -> int:
        """Return the sum of a number of `GroupRow` over the groups of the unit with most."""
        by_unit = Counter[str]()
        for row in self.rows:
            by_unit[row.unit] += getattr(row, column)
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
            _LETTERS[p]
            for p in (at.model_weight, at.main_weight, at.main_weight, at.unreduced_grad)
        )
        for axis, at in enumerate(spec.placements)
    )
    main, grads, is_here = group.main_weight, group.grads, spec.offload is None
    is_trained = group.is_trained
    kept = [payload.model.nbytes for payload in group.payloads if payload.model is not main]
    collected = [grads.full, grads.full.comm_copy, grads.partial] if is_trained else []
    main_grad = main.tensor.numel() * spec.dtypes.main_grad.itemsize
    return GroupRow(
        unit=unit,
        num_params=len(group.names),
        numel=layout.param_numel,
        dtypes=spec.dtypes,
        placements=placements,
        is_trained=is_trained,
        shard_numel=group.main_weight.tensor.numel(),
        padding_numel=layout.padding_numel,
        main_weight_nbytes=main.nbytes * is_here,
        model_weight_nbytes=sum(kept),
        main_grad_nbytes=main_grad * is_here * is_trained,
        gathered_nbytes=group.gathered_nbytes,
        full_grad_nbytes=sum(buffer.nbytes for buffer in collected if buffer is not None),
    )


def _render(summary: GroupSummary) -> str:
    """A table with a row for each group, or for each group of a run of equal units."""
    rows = [["unit", *_COLUMNS]]
    for (_, groups), names in _folded(summary.rows).items():
        for number, row in enumerate(groups):
            cells = [cell(row) for cell in _COLUMNS.values()]
            rows.append(["" if number else _label(names), *cells])
    sums = SimpleNamespace(**{name: summary.total(name) for name in _NUMBERS})
    totals = ["" if name in _OF_A_GROUP else cell(sums) for name, cell in _COLUMNS.items()]
    rows = _fitted([*rows, ["total", *totals]])
    left = {number for number, name in enumerate(rows[0]) if name in _LEFT_ALIGNED}
    header, rule, *lines, total = table(rows, left=left, separator=_separator(rows))
    return "\n".join([header, rule, *lines, rule, total, *_closing(summary), *LEGEND])


def _closing(summary: GroupSummary) -> list[str]:
    lines = [
        f"At rest {_bytes(summary.total('steady_nbytes'))} on this rank, besides "
        f"{_bytes(summary.total('main_grad_nbytes'))} while gradients are set; the largest unit "
        f"gathers {_bytes(summary.largest('gathered_nbytes'))} and has gradient buffers of "
        f"{_bytes(summary.largest('full_grad_nbytes'))}."
    ]
    if summary.num_plain_params:
        lines.append(
            f"Not sharded: {summary.num_plain_params} parameters, {_bytes(summary.plain_nbytes)}."
        )
    return lines


# -- folding ----------------------------------------------------------------------------------


def _folded(rows: Sequence[GroupRow]) -> dict[tuple[object, tuple[GroupRow, ...]], list[str]]:
    """Names of units by their groups, and by their names without numbers."""
    found: dict[tuple[object, tuple[GroupRow, ...]], list[str]] = {}
    for name, groups in itertools.groupby(rows, key=lambda row: row.unit):
        alike = tuple(dataclasses.replace(group, unit="") for group in groups)
        pattern = tuple("" if part.isdecimal() else part for part in name.split("."))
        found.setdefault((pattern, alike), []).append(name)
    return found


def _label(names: Sequence[str]) -> str:
    """Names of units that differ in numbers only, and how many they are."""
    parts = [
        _ranges(set(map(int, part))) if len(set(part)) > 1 else part[0]
        for part in zip(*(name.split(".") for name in names), strict=True)
    ]
    count = f" ({len(names)} units)" if len(names) > 1 else ""
    return (".".join(parts) or ROOT) + count


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, such as `0-2,5`; if there are many, only the first and the last."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ",".join(texts) if len(texts) <= 3 else f"{texts[0]},..,{texts[-1]}"


# -- cells ------------------------------------------------------------------------------------


def _dtypes(row: GroupRow) -> str:
    dtypes = row.dtypes
    used = [dtypes.model_weight, dtypes.main_weight]
    if row.is_trained:
        used += [dtypes.main_grad, dtypes.grad_comm]
    names = [_DTYPES.get(dtype, str(dtype).removeprefix("torch.")) for dtype in used]
    return names[0] if len(set(names)) == 1 else "/".join(names)


def _padding(of: Any) -> str:
    return f"{100.0 * of.padding_numel / max(of.padding_numel + of.numel, 1):.1f}%"


def _count(number: int) -> str:
    return str(number) if number < 10_000 else compact(number, 1000, "KMBT")


def _bytes(number: int) -> str:
    return compact(number, 1024)


def _bytes_or_dash(number: int) -> str:
    return _bytes(number) if number else "-"


_COLUMNS: dict[str, Callable[[Any], str]] = {
    "params": lambda of: str(of.num_params),
    "elements": lambda of: _count(of.numel),
    "dtypes": _dtypes,
    "placements": lambda row: row.placements,
    "state": lambda row: "trained" if row.is_trained else "frozen",
    "shard": lambda of: _count(of.shard_numel),
    "pad": _padding,
    "main": lambda of: _bytes_or_dash(of.main_weight_nbytes),
    "model": lambda of: _bytes_or_dash(of.model_weight_nbytes),
    "grad": lambda of: _bytes_or_dash(of.main_grad_nbytes),
    "gather": lambda row: _bytes_or_dash(row.gathered_nbytes),
    "reduce": lambda row: _bytes_or_dash(row.full_grad_nbytes),
}
"""By title: the cell of a group, or of all of them."""
_NUMBERS = (
    *("num_params", "numel", "shard_numel", "padding_numel"),
    *("main_weight_nbytes", "model_weight_nbytes", "main_grad_nbytes"),
)
"""Numbers of a row that the total shows."""
_OF_A_GROUP = {"dtypes", "placements", "state", "gather", "reduce"}
"""Columns without a total."""
_LEFT_ALIGNED = {"unit", "dtypes", "placements", "state"}


# -- width ------------------------------------------------------------------------------------


def _separator(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "  " if sum(widths) + 2 * (len(widths) - 1) <= MAX_COLUMNS else " "


def _fitted(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows with unit names shortened in their middle where lines would be too long."""
    units, *others = zip(*rows, strict=True)
    width = sum(1 + max(map(len, column)) for column in others)
    room = max(MAX_COLUMNS - width, len(units[0]))
    return [[_shortened(row[0], room), *row[1:]] for row in rows]


def _shortened(label: str, room: int) -> str:
    if len(label) <= room:
        return label
    # The end of a label identifies the unit, and has the number of units of one kind.
    kept = room - 2
    head = kept // 4
    return f"{label[:head]}..{label[len(label) - (kept - head) :]}"
