"""Checks that all ranks shard and run the same units: a difference raises instead of hanging."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm.calls import all_gather_single
from megatron_fsdp_v2.comm.interface import Axis, naming_failures

CheckRanks = Literal["never", "once", "always"]
"""How often ranks compare their sharded units and their collectives.

`once`: ranks compare the parameters of a unit when they shard it; at the first use units, layouts,
options and replicated weights; and at ZeRO-3 the unit before each collective, until the first
backward ends. `always`: the unit before every collective; for debugging.
"""


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """Properties of a unit that ranks compare.

    Attributes:
        name: Name of the unit.
        options: Class, parameters, layouts and options, as text.
        copies: Per mesh axis, a checksum of the main weights replicated along it.
    """

    name: str
    options: str
    copies: tuple[int, ...]


def checksum(tensor: torch.Tensor) -> int:
    """Return a sum over the bits of a tensor as integers, independent of summation order."""
    return int(bits_of(tensor).sum(dtype=torch.int64))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a plain tensor's elements as integers, sharing memory."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(integers[tensor.element_size()])


type Entry = tuple[str, object]
"""One compared item: what it is, as in an error message, and its properties."""


def compare_sharding(
    entries: Sequence[Entry],
    unset: Sequence[str],
    names: Sequence[str],
    axes: Sequence[Axis],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Compare what the ranks of a mesh are about to shard. Collective: a few integers per rank.

    Ranks that shard different units, or that use a unit already, take part in the same collectives.

    Args:
        entries: What must be the same on all ranks.
        unset: Names of tensors on the meta device, which may differ between ranks.
        names: Names of all tensors.
        axes: Axes of the mesh.
        device: Device that their process groups communicate on.

    Returns:
        Of each tensor that is on the meta device on some ranks only, which ranks have its values:
        a tensor of the shape of the mesh.

    Raises:
        RuntimeError: Ranks differ. Raised on every rank; names the first entry that differs.
    """
    if all(axis.size == 1 for axis in axes):
        return {}
    what = "comparison of what ranks shard"
    mine = [_digest(entries), _digest(unset), *[0] * (len(axes) - 1)]
    flat = _gather(torch.tensor(mine, device=device), axes, what).flatten(0, -2)
    if bool((flat[:, 0] != flat[0, 0]).any()):
        raise RuntimeError(_first_difference(entries, axes))
    if bool((flat[:, 1] == flat[0, 1]).all()):
        return {}
    found = gather_objects((unset, names), axes)
    partly = dict.fromkeys(name for here, _ in found for name in here)
    for name in partly:
        lacking = [rank for rank, (_, there) in enumerate(found) if name not in there]
        if lacking:
            raise RuntimeError(
                f"ranks differ at {name} of {entries[0][0]}: it is on the meta device on some "
                f"data-parallel ranks and does not exist on rank {lacking[0]}"
            )
    sizes = [axis.size for axis in axes]
    tables = {name: torch.tensor([name not in here for here, _ in found]) for name in partly}
    return {name: table.view(sizes) for name, table in tables.items() if bool(table.any())}


@contextmanager
def reporting_errors(what: str, axes: Sequence[Axis], device: torch.device) -> Iterator[None]:
    """Report an error of the context to ranks that call `compare_sharding`. Collective if it fails.

    Args:
        what: What this rank shards.
        axes: Axes of the mesh; empty for no report.
        device: Device that their process groups communicate on.
    """
    try:
        yield
    except Exception as error:
        with suppress(RuntimeError):
            if axes:
                entry = (f"unit {what!r}", f"the error {str(error)!r}")
                compare_sharding([entry], (), (), axes, device)
        raise


def compare_units(units: Sequence[UnitRecord], axes: Sequence[Axis], device: torch.device) -> None:
    """Compare the units of one mesh over its ranks. Collective: a few integers per rank.

    Raises:
        RuntimeError: Ranks differ. Raised on every rank; names the first unit that differs.
    """
    entries = [(f"unit {unit.name!r}", unit.options) for unit in units]
    sums = [sum(unit.copies[axis] for unit in units) & (2**62 - 1) for axis in range(len(axes))]
    mine = [_digest(entries), *sums]
    what = "comparison of what ranks sharded, at the first use"
    everyone = _gather(torch.tensor(mine, dtype=torch.int64, device=device), axes, what)
    flat = everyone.flatten(0, -2)
    if bool((flat[:, 0] != flat[0, 0]).any()):
        raise RuntimeError(_first_difference(entries, axes))
    for axis in range(len(axes)):
        column = everyone[..., 1 + axis]
        if bool((column != column.select(axis, 0).unsqueeze(axis)).any()):
            copies = [(f"unit {unit.name!r}", unit.copies[axis]) for unit in units]
            raise RuntimeError(
                _first_difference(copies, axes, along=axis)
                + "; copies of one weight must be identical across ranks: seed every rank "
                "identically before the model is built or initialized again, or load a checkpoint "
                "before the next forward"
            )


def compare_steps(code: int, steps: Sequence[str], axis: Axis, device: torch.device) -> None:
    """Compare the next collective of every rank along an axis. Collective.

    Args:
        code: Number of this rank's action and unit: different pairs have different codes.
        steps: Action and unit by code, such as `gather layers.3`, for the error message.
        axis: Ranks to compare.
        device: Device that their process group communicates on.

    Raises:
        RuntimeError: A rank is about to issue another collective.
    """
    if axis.size == 1:
        return
    mine = torch.tensor([code], dtype=torch.int64, device=device)
    codes = _gather(mine, [axis], f"comparison of ranks before they {steps[code]}").flatten()
    for rank, other in enumerate(codes.tolist()):
        if other != code:
            raise RuntimeError(
                f"rank {axis.rank} is about to {steps[code]} where rank {rank} is about to "
                f"{steps[other]}: a unit whose weights are gathered for use (ZeRO-3) must run on "
                "every rank, in one order; run it on dummy input where it has nothing to do, or "
                "use sharding_strategy='optim_grads'"
            )


def _gather(mine: torch.Tensor, axes: Sequence[Axis], what: str) -> torch.Tensor:
    """Return the vectors of all ranks of a mesh, of shape `(*axis sizes, numel)`."""
    piece = mine
    for axis in reversed(axes):
        gathered = piece.new_empty(axis.size * piece.numel())
        with naming_failures(what, axis.group):
            all_gather_single(gathered, piece.flatten(), group=axis.group)
        piece = gathered
    return piece.view(*(axis.size for axis in axes), mine.numel())


def gather_objects(value: Any, axes: Sequence[Axis]) -> list[Any]:
    """Return the values of all ranks of a mesh. Collective."""
    values = [value]
    for axis in reversed(axes):
        gathered: list[Any] = [None] * axis.size
        dist.all_gather_object(gathered, values, group=axis.group)
        values = [item for part in gathered for item in part]
    return values


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], signed=True)


def _first_difference(
    entries: Sequence[Entry], axes: Sequence[Axis], along: int | None = None
) -> str:
    """Gather all entries and describe the first difference. Collective, before raising an error.

    Args:
        entries: The entries of this rank.
        axes: Axes of the mesh.
        along: Index of the axis along which ranks must agree; None for all axes.
    """
    lists = gather_objects(list(entries), axes)
    for rank, other in enumerate(lists):
        first = 0
        if along is not None:
            stride = math.prod(axis.size for axis in axes[along + 1 :])
            first = rank - rank // stride % axes[along].size * stride
        for mine, theirs in itertools.zip_longest(lists[first], other):
            if mine is None or theirs is None:
                more, fewer = (rank, first) if mine is None else (first, rank)
                what = f"sharded {(mine or theirs)[0]} as well, rank {fewer} did not"
                return f"ranks differ: rank {more} {what}"
            if mine != theirs:
                where = "" if mine[0] == theirs[0] else f"{theirs[0]} with "
                return (
                    f"ranks differ at {mine[0]}: data-parallel rank {first} has {mine[1]}, "
                    f"rank {rank} has {where}{theirs[1]}"
                )
    return "ranks differ"
