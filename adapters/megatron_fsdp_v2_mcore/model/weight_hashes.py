"""`--check-weight-hash-across-dp-replicas-interval` for sharded parameters.

Megatron hashes what a rank holds of each parameter, which is other rows on every rank. Two things
have to be equal on ranks that share a parameter: copies of main weights, where a strategy keeps any
(`no_shard`, optimizer instances), and the weights that every rank computes with after a gather.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.layout.placement import Placement
from megatron_fsdp_v2.params.formats import WeightUse
from megatron_fsdp_v2.params.group import ParameterGroup
from megatron_fsdp_v2.runtime.fsdp_module import make_idle, named_units

__all__ = ["compare_replicas"]

_WORDS = 2
"""Integers of 8 bytes that are compared of each tensor's hash."""


def compare_replicas(original: Callable[..., bool]) -> Callable[..., bool]:
    """Replace Megatron's `check_param_hashes_across_dp_replicas` for sharded models."""

    def check(model: Any, cross_check: bool = False) -> bool:
        chunks = list(model)
        if not any(named_units(chunk) for chunk in chunks):
            return original(model, cross_check)
        compare(chunks)
        return True

    return check


@dataclass
class _Column:
    """What ranks along one axis compare.

    Attributes:
        axis: The ranks.
        device: Where they communicate.
        names: What each hash is of.
        hashes: This rank's.
    """

    axis: Axis
    device: torch.device
    names: list[str] = field(default_factory=list)
    hashes: list[list[int]] = field(default_factory=list)


def compare(chunks: Iterable[nn.Module]) -> None:
    """See that ranks hold, and compute with, the same weights. Collective over all ranks.

    Every unit is gathered, one after the other, and copied to host memory to be hashed.

    Args:
        chunks: Sharded modules, or what contains some.

    Raises:
        RuntimeError: Ranks differ, said on every rank; those that differ name parameters.
    """
    columns: dict[int, _Column] = {}
    for chunk in chunks:
        make_idle(chunk)
        for _, unit in named_units(chunk):
            was_gathered = unit.is_unsharded
            unit.unshard(WeightUse.BOTH, async_op=False)
            unit.wait_for_unshard()
            for group in unit.groups:
                _hash_group(group, columns)
            if not was_gathered:
                unit.reshard()
    found = [text for column in columns.values() for text in _differences(column)]
    device = next((column.device for column in columns.values()), torch.device("cpu"))
    number = torch.tensor([len(found)], device=device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    if not number.item():
        return
    if not found:
        raise RuntimeError("other ranks hold weights that differ; see their errors")
    problems = listed(found, 4, separator="; ")
    raise RuntimeError(f"weights differ between data-parallel ranks: {problems}")


def _hash_group(group: ParameterGroup, columns: dict[int, _Column]) -> None:
    for placements, axis in zip(group.spec.placements, group.axes, strict=True):
        if axis.size == 1:
            continue
        column = columns.setdefault(id(axis.group), _Column(axis, group.device))
        compared = {" as gathered": group.weights.gathered}
        if placements.main_weight is Placement.REPLICATE:
            compared[""] = group.weights.main
        for what, buffer in compared.items():
            for index, _ in enumerate(group.names):
                column.names.append(f"{group.label(index)}{what}")
                column.hashes.append(_hash(buffer.view(index)))


def _hash(tensor: torch.Tensor) -> list[int]:
    # A copy in any case: memory that numpy has seen could not be taken away after use.
    content = tensor.detach().to("cpu", copy=True).contiguous().view(torch.uint8).numpy()
    digest = hashlib.sha1(content, usedforsecurity=False).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], signed=True) for i in range(_WORDS)]


def _differences(column: _Column) -> list[str]:
    """What differs from the first rank along the axis. Collective along it."""
    mine = torch.tensor(column.hashes, dtype=torch.int64, device=column.device)
    everyones = [torch.empty_like(mine) for _ in range(column.axis.size)]
    dist.all_gather(everyones, mine, group=column.axis.group)
    ranks = dist.get_process_group_ranks(column.axis.group)
    found = []
    for rank, theirs in zip(ranks, everyones, strict=True):
        rows = (theirs != everyones[0]).any(dim=1).nonzero().flatten().tolist()
        found += [f"{column.names[row]} on rank {rank} and rank {ranks[0]}" for row in rows]
    return found
