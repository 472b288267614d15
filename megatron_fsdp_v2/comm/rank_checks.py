"""Do all ranks shard, and run, the same thing? Asked before a difference becomes a hang."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm.calls import all_gather_single
from megatron_fsdp_v2.comm.errors import naming_failures
from megatron_fsdp_v2.comm.interface import Axis

__all__ = ["CheckRanks", "UnitRecord", "checksum", "compare_steps", "compare_units"]


class CheckRanks(enum.Enum):
    """How often ranks compare what they do."""

    NEVER = "never"
    ONCE = "once"
    """At the first use: the same units, layouts, options and replicated weights everywhere?"""
    ALWAYS = "always"
    """And before every collective of a unit: the same unit everywhere? For debugging."""

    @classmethod
    def parse(cls, text: str) -> CheckRanks:
        """Read a name.

        Raises:
            ValueError: There is no such choice.
        """
        if text not in {choice.value for choice in cls}:
            raise ValueError(
                f"check_ranks must be 'never', 'once' or 'always', got {text!r}: how often ranks "
                "compare what they do"
            )
        return cls(text)


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """What ranks compare of a unit.

    Attributes:
        name: Its name, the same on every rank.
        options: Class, parameters, layouts and options, as text.
        copies: Per mesh axis, a checksum of the main weights replicated along it.
    """

    name: str
    options: str
    copies: tuple[int, ...]


def checksum(tensor: torch.Tensor) -> int:
    """A sum over the bits of a tensor, which no order of summation changes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(tensor.detach().view(integers[tensor.element_size()]).sum(dtype=torch.int64))


def compare_units(
    records: Sequence[UnitRecord], axes: Sequence[Axis], device: torch.device
) -> None:
    """Compare the units of one mesh over its ranks. Collective: a few integers per rank.

    Raises:
        RuntimeError: Ranks differ, said on every rank; names the first unit that does.
    """
    text = repr([(record.name, record.options) for record in records])
    digest = hashlib.sha256(text.encode()).digest()[:8]
    sums = [sum(r.copies[axis] for r in records) & (2**62 - 1) for axis in range(len(axes))]
    mine = [int.from_bytes(digest, signed=True), *sums]
    what = "comparison of what ranks sharded, at the first use"
    everyone = _gather(torch.tensor(mine, dtype=torch.int64, device=device), axes, what)
    flat = everyone.flatten(0, -2)
    if bool((flat[:, 0] != flat[0, 0]).any()):
        raise RuntimeError(_first_difference(records, axes, lambda r: (r.name, r.options)))
    for axis in range(len(axes)):
        column = everyone[..., 1 + axis]
        if bool((column != column.select(axis, 0).unsqueeze(axis)).any()):
            raise RuntimeError(
                _first_difference(records, axes, lambda r, a=axis: (r.name, r.copies[a]))
                + "; copies of one weight must be identical across ranks: seed every rank "
                "identically before the model is built, or load a checkpoint before the first "
                "forward"
            )


def compare_steps(
    what: str, name: str, code: int, axis: Axis, device: torch.device, names: Sequence[str]
) -> None:
    """Compare what every rank along an axis is about to communicate. Collective.

    Args:
        what: What is about to happen, such as `gather`.
        name: Of this rank's unit.
        code: A number that is equal exactly where unit and action are.
        axis: The ranks.
        device: Where their process group communicates.
        names: What the codes mean.

    Raises:
        RuntimeError: A rank is about to do something else.
    """
    if axis.size == 1:
        return
    mine = torch.tensor([code], dtype=torch.int64, device=device)
    codes = _gather(mine, [axis], f"comparison of ranks before they {what} {name}").flatten()
    others = {rank: int(other) for rank, other in enumerate(codes.tolist()) if other != code}
    if others:
        rank, other = next(iter(others.items()))
        raise RuntimeError(
            f"rank {axis.rank} is about to {what} {name} where rank {rank} is about to "
            f"{names[other]}: a unit whose weights are gathered for use (ZeRO-3) must run on "
            "every rank, in one order; run it on dummy input where it has nothing to do, or use "
            "sharding_strategy='optim_grads'"
        )


def _gather(mine: torch.Tensor, axes: Sequence[Axis], what: str) -> torch.Tensor:
    """The vectors of all ranks of a mesh, of shape `(*axis sizes, numel)`."""
    piece = mine
    for axis in reversed(axes):
        gathered = piece.new_empty(axis.size * piece.numel())
        with naming_failures(what, axis.group):
            all_gather_single(gathered, piece.flatten(), group=axis.group)
        piece = gathered
    return piece.view(*(axis.size for axis in axes), mine.numel())


def _first_difference(records: Sequence[UnitRecord], axes: Sequence[Axis], key: Any) -> str:
    """Gather everything and say where ranks first differ. Collective, on the way to an error."""
    value: Any = [key(record) for record in records]
    lists = [value]
    for axis in reversed(axes):
        gathered: list[Any] = [None] * axis.size
        dist.all_gather_object(gathered, lists, group=axis.group)
        lists = [item for part in gathered for item in part]
    first = lists[0]
    for rank, other in enumerate(lists):
        if other == first:
            continue
        for mine, theirs in zip(first, other, strict=False):
            if mine != theirs:
                return (
                    f"ranks differ at unit {mine[0]!r}: data-parallel rank 0 has {mine[1]}, "
                    f"rank {rank} has {theirs[0]!r} with {theirs[1]}"
                )
        more, fewer = (0, rank) if len(first) > len(other) else (rank, 0)
        longer = max(first, other, key=len)
        extra = longer[min(len(first), len(other))][0]
        return f"ranks differ: rank {more} sharded unit {extra!r} as well, rank {fewer} did not"
    return "ranks differ"
