"""Collectives with arguments of Megatron that NCCL supports and gloo does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad


def gather_unequal(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `all_gather` to accept tensors that differ in their first dimension."""

    def gather(
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        longest = _longest(tensor_list)
        if longest is None or async_op:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        mine = _padded(tensor, longest)
        padded = [torch.empty_like(mine) for _ in tensor_list]
        all_gather(padded, mine, group=group)
        for part, whole in zip(tensor_list, padded, strict=True):
            part.copy_(whole[: len(part)])
        return None

    return gather


def scatter_unequal(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `reduce_scatter` to accept tensors that differ in their first dimension."""

    def scatter(
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        longest = _longest(input_list)
        if longest is None or async_op:
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        padded = [_padded(part, longest) for part in input_list]
        mine = torch.empty_like(padded[0])
        reduce_scatter(mine, padded, op=op, group=group)
        output.copy_(mine[: len(output)])
        return None

    return scatter


def _longest(parts: Sequence[torch.Tensor]) -> int | None:
    """Return the length of the longest part; None if all lengths are equal."""
    lengths = {len(part) if part.dim() else 1 for part in parts}
    return max(lengths) if len(lengths) > 1 else None


def _padded(part: torch.Tensor, length: int) -> torch.Tensor:
    return pad(part, (*(0, 0) * (part.dim() - 1), 0, length - len(part))).contiguous()


def lists_for_splits(all_to_all: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `all_to_all_single` to accept arrays as split sizes."""

    def with_lists(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return all_to_all(
            output,
            input,
            _as_list(output_split_sizes),
            _as_list(input_split_sizes),
            *args,
            **kwargs,
        )

    return with_lists


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if hasattr(sizes, "tolist") else sizes


class _Works:
    """One work handle for several collectives."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, *args: Any) -> bool:
        """Wait for all handles."""
        return all([work.wait(*args) for work in self._works])


def gather_dtypes_apart(gather_coalesced: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a group's coalesced all-gather to accept tensors of different dtypes."""

    def gather(
        group: Any, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *options: Any
    ) -> Any:
        if len({part.dtype for part in inputs}) == 1:
            return gather_coalesced(group, outputs, inputs, *options)
        pairs = zip(outputs, inputs, strict=True)
        return _Works([group._allgather_base(*pair, *options) for pair in pairs])

    return gather


def over_gloo(init_process_group: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `init_process_group` to use gloo instead of nccl or of the default backend."""

    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if backend is None or "nccl" in backend:
            backend = "gloo"
        # `device_id` would bind the group to a GPU.
        kwargs.pop("device_id", None)
        return init_process_group(backend, *args, **kwargs)

    return init
