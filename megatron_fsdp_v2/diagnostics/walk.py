"""Units, parameters and mesh axes of a sharded model, for the diagnostics."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.dtensor.sharded_rows import plain_of
from megatron_fsdp_v2.runtime.module import named_units
from megatron_fsdp_v2.runtime.unit import Unit

ROOT = "(root)"
"""Name of the given module in reports, whose own name is empty."""

CHUNK_NUMEL = 1 << 22
"""Elements processed at a time, so that copies in another dtype stay small."""


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter of a sharded model.

    Attributes:
        name: Name relative to the given module.
        param: The sharded parameter, also while its unit is gathered, or a plain one.
    """

    name: str
    param: torch.Tensor

    @property
    def is_sharded(self) -> bool:
        """Whether it belongs to a parameter group, or is a DTensor of another kind."""
        return isinstance(self.param, DTensor)

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of the parameter; no copy."""
        return plain_of(self.param).detach()

    @property
    def local_grad(self) -> torch.Tensor | None:
        """This rank's part of the gradient; no copy."""
        return None if self.param.grad is None else plain_of(self.param.grad).detach()

    def axes(self, *, sharded: bool) -> list[dist.ProcessGroup]:
        """Mesh axes of several ranks along which it is sharded, or else replicated."""
        if not isinstance(self.param, DTensor):
            return []
        mesh = self.param.device_mesh
        return [
            mesh.get_group(axis)
            for axis, placement in enumerate(self.param.placements)
            if mesh.size(axis) > 1 and placement.is_replicate() is not sharded
        ]


def units_below(module: nn.Module) -> list[tuple[str, Unit]]:
    """Every unit at or below a module with its name, parents first.

    Raises:
        ValueError: There is none.
    """
    units = named_units(module)
    if not units:
        raise ValueError(
            f"{type(module).__name__} contains no sharded module; pass a module that fully_shard "
            "was called on, or one that contains such modules"
        )
    return units


def parameters_below(module: nn.Module) -> list[NamedParameter]:
    """Every parameter at or below a module, each once, in the order of `named_parameters()`.

    Raises:
        ValueError: The module contains no sharded module.
    """
    # While a unit is gathered, its modules have gathered parameters in place of the sharded ones.
    sharded = {
        id(gathered): param
        for context in dict.fromkeys(unit.context for _, unit in units_below(module))
        for unit in context.units()
        for group in unit.groups
        for gathered, param in zip(group.unsharded_params, group.sharded_params, strict=True)
    }
    return [
        NamedParameter(name, sharded.get(id(param), param))
        for name, param in module.named_parameters()
    ]


def parent_of(name: str, known: Container[str]) -> str:
    """The innermost unit that contains a unit, by their names."""
    while name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return ""


def joined(prefix: str, name: str) -> str:
    """Return the qualified name of a child of a module, whose own name may be empty."""
    return f"{prefix}.{name}" if prefix else name


def chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements of a tensor in flat pieces of at most `CHUNK_NUMEL`; none when it is empty."""
    if tensor.numel():
        yield from torch.split(tensor.reshape(-1), CHUNK_NUMEL)


def reduce_rows(
    values: torch.Tensor,
    axes: Sequence[Sequence[dist.ProcessGroup]],
    op: dist.ReduceOp.RedOpType,
) -> None:
    """Reduce each row of a table over its own process groups, in place. Collective.

    Rows that share a group are reduced together: one collective for each group of ranks, in the
    order in which groups first appear, which is the same on all ranks.

    Args:
        values: `(rows, numbers)`.
        axes: Process groups of every row.
        op: The reduction.
    """
    members: dict[tuple[int, ...], tuple[dist.ProcessGroup, list[int]]] = {}
    for row, groups in enumerate(axes):
        for group in groups:
            # Axes of two meshes may have the same ranks, but separate process groups.
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            members.setdefault(ranks, (group, []))[1].append(row)
    for group, rows in members.values():
        part = values[rows]
        dist.all_reduce(part, op=op, group=group)
        values[rows] = part
