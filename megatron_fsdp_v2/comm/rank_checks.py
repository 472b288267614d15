"""Checks that all ranks shard and run the same units: a difference raises instead of hanging."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm.calls import all_gather_single
from megatron_fsdp_v2.comm.interface import Axis, naming_failures

CheckRanks = Literal["never", "once", "always"]
"""How often ranks compare their sharded units and their collectives.

`once`: at the first use, ranks compare units, layouts, options and replicated weights. `always`:
also before every collective of a unit, ranks compare the unit; for debugging.
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
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(tensor.detach().view(integers[tensor.element_size()]).sum(dtype=torch.int64))


def compare_units(units: Sequence[UnitRecord], axes: Sequence[Axis], device: torch.device) -> None:
    """Compare the units of one mesh over its ranks. Collective: a few integers per rank.

    Raises:
        RuntimeError: Ranks differ. Raised on every rank; names the first unit that differs.
    """
    text = repr([(record.name, record.options) for record in units])
    digest = hashlib.sha256(text.encode()).digest()[:8]
    sums = [sum(unit.copies[axis] for unit in units) & (2**62 - 1) for axis in range(len(axes))]
    mine = [int.from_bytes(digest, signed=True), *sums]
    what = "comparison of what ranks sharded, at the first use"
    everyone = _gather(torch.tensor(mine, dtype=torch.int64, device=device), axes, what)
    flat = everyone.flatten(0, -2)
    if bool((flat[:, 0] != flat[0, 0]).any()):
        raise RuntimeError(_first_difference(units, axes, lambda unit: (unit.name, unit.options)))
    for axis in range(len(axes)):
        column = everyone[..., 1 + axis]
        if bool((column != column.select(axis, 0).unsqueeze(axis)).any()):
            raise RuntimeError(
                _first_difference(units, axes, lambda unit, a=axis: (unit.name, unit.copies[a]))
                + "; copies of one weight must be identical across ranks: seed every rank "
                "identically before the model is built, or load a checkpoint before the first "
                "forward"
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


def _first_difference(records: Sequence[UnitRecord], axes: Sequence[Axis], key: Any) -> str:
    """Gather all records and describe the first difference. Collective, before raising an error."""
    value: Any = [key(record) for record in records]
    lists = [value]
    for axis in reversed(axes):
        gathered: list[Any] = [None] * axis.size
        dist.all_gather_object(gathered, lists, group=axis.group)
        lists = [item for part in gathered for item in part]
    first = lists[0]
    for rank, other in enumerate(lists):
        for mine, theirs in itertools.zip_longest(first, other):
            if mine is None or theirs is None:
                more, fewer = (rank, 0) if mine is None else (0, rank)
                what = f"sharded unit {(mine or theirs)[0]!r} as well, rank {fewer} did not"
                return f"ranks differ: rank {more} {what}"
            if mine != theirs:
                return (
                    f"ranks differ at unit {mine[0]!r}: data-parallel rank 0 has {mine[1]}, "
                    f"rank {rank} has {theirs[0]!r} with {theirs[1]}"
                )
    return "ranks differ"
