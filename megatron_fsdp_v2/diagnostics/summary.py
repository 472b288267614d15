"""A table of the parameter groups: what is sharded how, and the bytes it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, override

from torch import nn

from megatron_fsdp_v2.diagnostics.memory_units import group_bytes
from megatron_fsdp_v2.diagnostics.summary_text import render
from megatron_fsdp_v2.diagnostics.walk import parameters_below, units_below
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.layout.placement import Placement

if TYPE_CHECKING:
    from megatron_fsdp_v2.params.group import ParameterGroup

__all__ = ["GroupRow", "GroupSummary", "group_summary"]

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
        main_grad_nbytes: Bytes of the main gradient on this rank, from the first backward on.
        gathered_nbytes: Bytes of the temporary buffer of gathered weights; 0 where the model
            weight is whole.
        full_grad_nbytes: Bytes of the temporary buffers a gradient passes through: the full one,
            a copy in the dtype of the wire, and a shard that waits for the outer axis.
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
    def resting_nbytes(self) -> int:
        """Bytes on this rank between steps."""
        return self.main_weight_nbytes + self.model_weight_nbytes + self.main_grad_nbytes


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
    def resting_nbytes(self) -> int:
        """Bytes of all groups on this rank between steps; without optimizer state."""
        return sum(row.resting_nbytes for row in self.rows)

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
        return render(self)


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
            _LETTERS[p] for p in (at.model_weight, at.main_weight, at.main_grad, at.unsynced_grad)
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
