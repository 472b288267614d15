"""Comparison of parameters of which tensor-parallel ranks or pipeline stages hold replicas.

A parameter without Megatron's mark `tensor_model_parallel` is a replica. If a layer forgets the
mark, a checkpoint contains the values of the first tensor-parallel rank only. Megatron also trains
some replicas apart: without sequence parallelism it does not sum all gradients of latent attention.
Replicas of data-parallel ranks are compared by the core, at the first use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.errors import everyones
from megatron_fsdp_v2.comm.rank_checks import checksum
from megatron_fsdp_v2.dtensor.sharded_rows import local_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor

_MAX_LISTED = 4
_KEPT = "a checkpoint contains the values of the first rank only"


def check_before_step(chunks: Sequence[Any], embedding_group: Any) -> None:
    """Check that replicas are equal before the first step. Collective over all ranks.

    Args:
        chunks: Sharded chunks of this rank.
        embedding_group: Group of the pipeline stages that share an embedding; None on other stages.

    Raises:
        RuntimeError: Replicas differ. Raised on all ranks; names parameters where they differ.
    """
    if _has_replicas(chunks):
        _raise_on_all(_differences(chunks, embedding_group), f"before the first step; {_KEPT}")


def note_after_step(chunks: Sequence[Any], embedding_group: Any) -> None:
    """Print parameters whose replicas differ after the first step: a save will fail. Collective."""
    if _has_replicas(chunks):
        _warn_once(
            _differences(chunks, embedding_group),
            f"after the first step; {_KEPT}, and a save needs --fsdp-save-differing-replicas",
        )


def check_before_save(chunks: Sequence[Any], embedding_group: Any, *, may_differ: bool) -> None:
    """Check that replicas are equal before a save. Collective over all ranks.

    Args:
        chunks: Sharded chunks of this rank.
        embedding_group: As in `check_before_step`.
        may_differ: Whether different replicas are a warning instead of an error.

    Raises:
        RuntimeError: Replicas differ. Raised on all ranks; names parameters where they differ.
    """
    if not _has_replicas(chunks):
        return
    found, when = _differences(chunks, embedding_group), f"before a save; {_KEPT}"
    if may_differ:
        _warn_once(found, when)
    else:
        flag = "--fsdp-save-differing-replicas saves these, as Megatron does"
        _raise_on_all(found, f"{when}. {flag}")


def _has_replicas(chunks: Sequence[Any]) -> bool:
    """Whether a job has tensor-parallel ranks or pipeline stages; equal on all ranks."""
    config = chunks[0].config
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    sizes = [getattr(config, name) or 1 for name in (*names, "expert_tensor_parallel_size")]
    return any(size > 1 for size in sizes)


def _raise_on_all(found: str, when: str) -> None:
    rank = _first_rank(found)
    if rank is not None:
        raise RuntimeError(f"{found or f'replicas differ (see the error of rank {rank})'} {when}")


def _warn_once(found: str, when: str) -> None:
    if _first_rank(found) == dist.get_rank():
        sys.stdout.write(f"WARNING: {found} {when}\n")


def _first_rank(found: str) -> int | None:
    """Return the first rank that found a difference, or None. Collective over all ranks."""
    world_size = dist.get_world_size()
    first = torch.tensor([dist.get_rank() if found else world_size], device="cuda")
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    rank = int(first.item())
    return None if rank == world_size else rank


def _differences(chunks: Sequence[Any], embedding_group: Any) -> str:
    """Describe parameters whose replicas differ; empty if there are none. Collective.

    Replicas are sharded identically, so that the ranks of a group hold the same rows.
    """
    sums: dict[Any, dict[str, int]] = {}
    stages = [] if embedding_group is None else dist.get_process_group_ranks(embedding_group)
    if dist.get_rank() in stages:
        # A stage takes part even if it holds no replica.
        sums[embedding_group] = {}
    for name, param in _named_parameters(chunks):
        tensor = param.row_shards.tensor
        if tensor is not None and tensor.mesh is not None and tensor.dim is None:
            group = tensor.mesh.get_group(tensor.mesh.ndim - 1)
            sums.setdefault(group, {})[name] = checksum(local_of(param))
        if embedding_group in sums and getattr(param, "shared_embedding", False):
            sums[embedding_group]["the shared embedding"] = checksum(local_of(param))
    found = [text for group, mine in sums.items() for text in different_from_first(group, mine)]
    return f"replicas differ: {listed(found, _MAX_LISTED)}" if found else ""


def _named_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    for position, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            if isinstance(param, UnevenDTensor):
                chunk_name = f"chunk {position}, " if len(chunks) > 1 else ""
                yield f"{chunk_name}{name}", param


def different_from_first(group: Any, mine: Mapping[str, int | str]) -> list[str]:
    """Return the tensors that differ from those of a group's first rank. Collective.

    Args:
        group: A process group; ranks without tensors are skipped.
        mine: A checksum or hash of each tensor of this rank, by name.
    """
    ranks = dist.get_process_group_ranks(group)
    every = zip(ranks, everyones(mine, group), strict=True)
    holders = [(rank, theirs) for rank, theirs in every if theirs]
    return [
        f"{name} of rank {rank} and of rank {first}"
        for first, expected in holders[:1]
        for rank, theirs in holders[1:]
        for name, value in theirs.items()
        if value != expected.get(name)
    ]
