"""`--check-weight-hash-across-dp-replicas-interval` for sharded parameters.

Megatron hashes the local values of each parameter, which are different rows on every rank. Two
tensors must be equal on all ranks that share a parameter: replicated main weights, if the strategy
has any (`no_shard`, optimizer instances), and the gathered weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.errors import everyones
from megatron_fsdp_v2.layout.placement import Placement
from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.params.group import ParameterGroup
from megatron_fsdp_v2.runtime.machine import weights
from megatron_fsdp_v2.runtime.module import make_idle, named_units
from megatron_fsdp_v2_mcore.model.replicas import different_from_first


def compare_replicas(original: Callable[..., bool]) -> Callable[..., bool]:
    """Replace Megatron's `check_param_hashes_across_dp_replicas` for sharded models."""

    def check(model: Any, cross_check: bool = False) -> bool:
        chunks = list(model)
        if not any(named_units(chunk) for chunk in chunks):
            return original(model, cross_check)
        compare(chunks)
        return True

    return check


def compare(chunks: Iterable[nn.Module]) -> None:
    """Check that ranks hold equal main weights and gathered weights. Collective over all ranks.

    The function gathers one unit at a time and copies its weights to host memory to hash them.

    Args:
        chunks: Sharded modules, or modules that contain them.

    Raises:
        RuntimeError: Weights differ between ranks. Raised on every rank; on ranks that found a
            difference, the message names the parameters.
    """
    # Process group -> name of a compared tensor -> hash.
    hashes: dict[Any, dict[str, str]] = {}
    for chunk in chunks:
        make_idle(chunk)
        for _, unit in named_units(chunk):
            was_gathered = unit.is_unsharded
            weights.gather_for(unit.state, WeightUse.BOTH)
            for group in unit.groups:
                _hash_group(group, hashes)
            if not was_gathered:
                weights.free(unit.state)
    found = [text for group, mine in hashes.items() for text in different_from_first(group, mine)]
    if not any(everyones(len(found))):
        return
    if not found:
        raise RuntimeError("other ranks hold weights that differ; see their errors")
    problems = listed(found, 4, separator="; ")
    raise RuntimeError(f"weights differ between data-parallel ranks: {problems}")


def _hash_group(group: ParameterGroup, hashes: dict[Any, dict[str, str]]) -> None:
    for placements, axis in zip(group.spec.placements, group.axes, strict=True):
        if axis.size == 1:
            continue
        compared = {" as gathered": group.gathered_weight}
        if placements.main_weight is Placement.REPLICATE:
            compared[""] = group.main_weight
        mine = hashes.setdefault(axis.group, {})
        for what, buffer in compared.items():
            for index, _ in enumerate(group.names):
                mine[f"{group.parameters.label(index)}{what}"] = _hash(buffer.view(index))


def _hash(tensor: torch.Tensor) -> str:
    # Always copy: the storage of a tensor that numpy references could not be freed after use.
    content = tensor.detach().to("cpu", copy=True).contiguous().view(torch.uint8).numpy()
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
