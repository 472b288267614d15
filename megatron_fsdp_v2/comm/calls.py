"""Collectives of one tensor, with the names of the installed version of torch.

torch 2.14 renamed `all_gather_into_tensor` and `reduce_scatter_tensor` and warns about the old
names, the only names before 2.14. All other files import the functions of this file.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_HAS_NEW_NAMES = hasattr(dist, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _HAS_NEW_NAMES else "all_gather_into_tensor"
_CPU = torch.device("cpu")
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_KNOWN_DTYPES = frozenset((*_FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64))
"""Dtypes that every backend supports. Tensors of other dtypes are gathered as bytes."""

_REDUCE_SCATTER = "reduce_scatter_single" if _HAS_NEW_NAMES else "reduce_scatter_tensor"


def all_gather_single(
    output: torch.Tensor, shard: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """Fill `output` with the shards of all ranks of a group, in rank order.

    Args:
        output: `world size * shard.numel()` elements, contiguous.
        shard: This rank's part.
        group: Participating ranks.
        async_op: Return a handle to wait for, instead of waiting.
    """
    if output.dtype not in _KNOWN_DTYPES:
        output, shard = output.view(torch.uint8), shard.view(torch.uint8)
    # Looked up at each call, since tests that count collectives replace torch's function.
    return getattr(dist, _ALL_GATHER)(output, shard, group=group, async_op=async_op)


class _Broadcasts(list[Any]):
    """Work handle of several broadcasts: a list of their handles."""

    def wait(self) -> None:
        """Wait for all broadcasts."""
        for work in self:
            work.wait()


def broadcast_shards(output: torch.Tensor, shard: torch.Tensor, *, group: dist.ProcessGroup) -> Any:
    """Gather like `all_gather_single`, by concurrent broadcasts of every rank's shard.

    Args:
        output: See `all_gather_single`.
        shard: This rank's part; copied into `output` unless it is a view of its place there.
        group: Participating ranks.

    Returns:
        A handle to wait for.
    """
    if output.dtype not in _KNOWN_DTYPES:
        output, shard = output.view(torch.uint8), shard.view(torch.uint8)
    places = list(output.view(group.size(), -1).unbind())
    own, places[group.rank()] = places[group.rank()], shard
    works = _Broadcasts(
        dist.broadcast(place, group=group, group_src=source, async_op=True)
        for source, place in enumerate(places)
    )
    if own.data_ptr() != shard.data_ptr():
        # Overlaps the broadcasts, which send from `shard`.
        own.copy_(shard)
    return works


def broadcast_single(tensor: torch.Tensor, *, group: dist.ProcessGroup, source: int = 0) -> None:
    """Broadcast a tensor of any dtype and strides from one rank of a group.

    Args:
        tensor: Tensor of the same shape on all ranks.
        group: Participating ranks.
        source: Rank in the group that has the values.
    """
    flat = tensor.detach().contiguous()
    sent = flat if flat.dtype in _KNOWN_DTYPES else flat.view(-1).view(torch.uint8)
    dist.broadcast(sent, group=group, group_src=source)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether a group runs collectives of CPU tensors with gloo."""
    # torch may be built without gloo, and groups implemented in Python have no backend.
    if not dist.is_gloo_available() or _CPU not in group._device_types:
        return False
    return isinstance(group._get_backend(_CPU), dist.ProcessGroupGloo)


def reduce_scatter_single(
    output: torch.Tensor, full: torch.Tensor, *, op: Any, group: dist.ProcessGroup
) -> None:
    """Reduce this rank's slice of `full` over a group into `output`.

    Args:
        output: `full.numel() / world size` elements.
        full: Slices for all ranks, in rank order.
        op: Reduction operator.
        group: Participating ranks.
    """
    getattr(dist, _REDUCE_SCATTER)(output, full, op=op, group=group)
