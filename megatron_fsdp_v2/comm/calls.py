"""Collectives of one tensor, under the names that the version of torch at hand has for them.

torch 2.14 renamed `all_gather_into_tensor` and `reduce_scatter_tensor` and warns of the old names,
which are the only ones before it. This is the only file that knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "all_gather_several",
    "all_gather_single",
    "broadcast_shards",
    "broadcast_single",
    "in_one_launch",
    "is_gloo",
    "reduce_scatter_single",
]

_HAS_NEW_NAMES = hasattr(dist, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _HAS_NEW_NAMES else "all_gather_into_tensor"
_CPU = torch.device("cpu")
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_KNOWN_DTYPES = frozenset((*_FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64))
"""What every backend communicates; anything else is moved as bytes where it is only moved."""

_REDUCE_SCATTER = "reduce_scatter_single" if _HAS_NEW_NAMES else "reduce_scatter_tensor"


def all_gather_single(
    output: torch.Tensor,
    shard: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> Any:
    """Fill `output` with the shards of all ranks of a group, in rank order.

    Args:
        output: `world size * shard.numel()` elements, contiguous.
        shard: This rank's part.
        group: Ranks that take part.
        async_op: Return a handle to wait for, instead of waiting.
    """
    if output.dtype not in _KNOWN_DTYPES:
        output, shard = output.view(torch.uint8), shard.view(torch.uint8)
    # Looked up when it is called: who counts collectives replaces torch's function.
    return getattr(dist, _ALL_GATHER)(output, shard, group=group, async_op=async_op)


def all_gather_several(
    outputs: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> Any:
    """Fill each of `outputs` as `all_gather_single` does, all of them in one collective.

    Args:
        outputs: See `all_gather_single`; all of one dtype.
        shards: Likewise.
        group: Ranks that take part.
        async_op: Return a handle to wait for, instead of waiting.
    """
    if outputs[0].dtype not in _KNOWN_DTYPES:
        outputs = [output.view(torch.uint8) for output in outputs]
        shards = [shard.view(torch.uint8) for shard in shards]
    work = group.allgather_into_tensor_coalesced(list(outputs), list(shards))
    if async_op:
        return work
    work.wait()
    return None


class _Several:
    """Asynchronous operations that are waited for together. As a work handle of c10d."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        """Whether all of them are done."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()


def broadcast_shards(
    output: torch.Tensor,
    shard: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> Any:
    """Do what `all_gather_single` does by a broadcast of every rank's shard, all under way at once.

    Args:
        output: See `all_gather_single`.
        shard: Likewise; where it is not its own place in `output`, it is copied there.
        group: Ranks that take part.
        async_op: Return a handle to wait for, instead of waiting.
    """
    if output.dtype not in _KNOWN_DTYPES:
        output, shard = output.view(torch.uint8), shard.view(torch.uint8)
    places = list(output.view(group.size(), -1).unbind())
    own, places[group.rank()] = places[group.rank()], shard
    calls = (
        dist.broadcast(place, group=group, group_src=source, async_op=True)
        for source, place in enumerate(places)
    )
    work = _Several(list(calls))
    if own.data_ptr() != shard.data_ptr():
        # While the others already receive it.
        own.copy_(shard)
    if async_op:
        return work
    work.wait()
    return None


def broadcast_single(tensor: torch.Tensor, *, group: dist.ProcessGroup) -> None:
    """Give every rank of a group the values of its first one, whatever their dtype and strides.

    Args:
        tensor: Of one shape on all ranks.
        group: Ranks that take part.
    """
    flat = tensor.detach().contiguous()
    is_known = flat.dtype in _KNOWN_DTYPES
    sent = flat if is_known else flat.view(-1).view(torch.uint8)
    dist.broadcast(sent, group=group, group_src=0)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether a group's collectives of tensors on the CPU are gloo's."""
    # The class is missing where torch was built without it, and a backend in groups of Python's.
    if not dist.is_gloo_available() or _CPU not in group._device_types:
        return False
    return isinstance(group._get_backend(_CPU), dist.ProcessGroupGloo)


def in_one_launch(group: dist.ProcessGroup) -> AbstractContextManager[Any]:
    """Have the collectives that a context issues in a group, all of one kind, be one of its.

    They are issued at its end.
    """
    return dist._coalescing_manager(group)  # type: ignore[attr-defined]


def reduce_scatter_single(
    output: torch.Tensor, full: torch.Tensor, *, op: Any, group: dist.ProcessGroup
) -> None:
    """Fill `output` with the reduction over a group of this rank's slice of `full`.

    Args:
        output: `full.numel() / world size` elements.
        full: Slices for all ranks, in rank order.
        op: How elements are reduced.
        group: Ranks that take part.
    """
    getattr(dist, _REDUCE_SCATTER)(output, full, op=op, group=group)
