"""What collectives look like to the rest of the core: issue, get a work handle, wait."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm.errors import Label

__all__ = [
    "DONE",
    "Axis",
    "CommStream",
    "Communicator",
    "Registrar",
    "Work",
    "gather_alone",
    "store",
]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the data-parallel mesh as this rank sees it.

    Attributes:
        group: Its process group.
        size: Ranks along it.
        rank: This rank's coordinate on it.
        gather_group: Another group of the same ranks, that weights are gathered in; None for
            `group`.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    gather_group: dist.ProcessGroup | None = None

    def for_gathers(self) -> Axis:
        """The same ranks, with the group that weights are gathered in."""
        if self.gather_group is None:
            return self
        return Axis(self.gather_group, self.size, self.rank)


class CommStream(enum.Enum):
    """Independent queues of communication; each is a stream of its own on a GPU."""

    GATHER = "gather"
    REDUCE = "reduce"
    OUTER = "outer"


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Order what the caller does next after the collective. Idempotent."""
        ...


@runtime_checkable
class Communicator(Protocol):
    """The collectives data parallelism needs.

    With `async_op=False` the result is in place when the call returns. Tensors passed in must
    stay allocated until the work has been waited for; the work holds references to them.

    One that fails, on being issued or waited for, is a RuntimeError with its label's name.
    """

    def labeled(self, label: Label) -> Communicator:
        """The same, on the same communication streams, for what a label names.

        Args:
            label: Read where a collective fails.
        """
        ...

    def all_gather(
        self,
        output: torch.Tensor,
        shard: torch.Tensor,
        axis: Axis,
        comm_stream: CommStream,
        *,
        async_op: bool,
    ) -> Work:
        """Fill `output` with the shards of all ranks, in rank order.

        Args:
            output: Flat, `axis.size * shard.numel()` elements.
            shard: Flat, this rank's part, of the same dtype; may be a view of `output`.
            axis: Ranks that take part.
            comm_stream: Queue to run in.
            async_op: Whether to return before it is done.
        """
        ...

    def reduce_scatter(
        self,
        into: torch.Tensor,
        full: torch.Tensor,
        axis: Axis,
        comm_stream: CommStream,
        *,
        scale: float,
        accumulate: bool,
        async_op: bool,
    ) -> Work:
        """Put (or add) `scale` times the sum over ranks of this rank's slice of `full`.

        Args:
            into: Flat, `full.numel() / axis.size` elements of any floating dtype.
            full: Flat, in the communication dtype; its content is consumed.
            axis: Ranks that take part.
            comm_stream: Queue to run in.
            scale: Factor applied once, to the sum, where it is stored.
            accumulate: Add to `into` instead of overwriting it.
            async_op: Whether to return before it is done.
        """
        ...

    def all_reduce(
        self,
        into: torch.Tensor,
        full: torch.Tensor,
        axis: Axis,
        comm_stream: CommStream,
        *,
        scale: float,
        accumulate: bool,
        async_op: bool,
    ) -> Work:
        """Put (or add) `scale` times the sum over ranks of `full`. See `reduce_scatter`."""
        ...

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_numels: Sequence[int],
        sent_numels: Sequence[int],
        axis: Axis,
        comm_stream: CommStream,
        *,
        async_op: bool,
    ) -> Work:
        """Send every rank its part of `sent`, and receive what all have for this one.

        Args:
            received: Flat, parts from all ranks in rank order.
            sent: Flat, parts for all ranks in rank order.
            received_numels: Elements of each part of `received`.
            sent_numels: Elements of each part of `sent`.
            axis: Ranks that take part.
            comm_stream: Queue to run in.
            async_op: Whether to return before it is done.
        """
        ...

    def begin_pass(self) -> None:
        """Take the stream that operations are queued on now for the compute stream."""
        ...

    def side_stream(self) -> Any | None:
        """The stream that operations are queued on now; None where that is the compute stream."""
        ...

    def wait_for(self, streams: Iterable[Any], *, and_compute: bool) -> None:
        """Order what the caller does next after what is queued on other streams.

        Args:
            streams: Side streams.
            and_compute: Whether on the compute stream as well.
        """
        ...

    def memory(self) -> AbstractContextManager[Any]:
        """Where temporary buffers are given memory: that of the compute stream.

        What the caller does next is ordered after whatever used that memory before.
        """
        ...

    def settle(self) -> None:
        """Order the compute stream after the caller's, before memory is taken away."""
        ...


class Registrar(Protocol):
    """What the registration of memory needs of a device; that of CUDA is in `backends.py`."""

    def new_pool(self, group: dist.ProcessGroup, device: torch.device) -> Any:
        """A pool of memory that can be registered.

        Args:
            group: A process group whose library allocates it.
            device: Where.
        """
        ...

    def allocate(self, pool: Any, nbytes: int, device: torch.device) -> torch.Tensor:
        """A flat block of bytes from a pool."""
        ...

    def register(self, pool: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        """Tell a process group of all memory of a pool. Not collective.

        Raises:
            RuntimeError: It cannot be registered.
        """
        ...

    def deregister(self, pool: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        """Take that back, before the memory is given up."""
        ...


class _CompletedWork:
    def wait(self) -> None:
        return None


DONE: Work = _CompletedWork()


def store(into: torch.Tensor, value: torch.Tensor, scale: float, accumulate: bool) -> None:
    """`into = scale * value`, or `into += scale * value`, in one pass over both.

    The product is made in the wider of both dtypes.

    Args:
        into: Flat; may be `value` itself.
        value: As many elements, of any floating dtype.
        scale: Factor of `value`.
        accumulate: Add instead of overwriting.
    """
    wider = into.dtype
    if value.dtype != wider:
        wider = torch.promote_types(wider, value.dtype)
    if into.data_ptr() == value.data_ptr() and into.dtype == value.dtype:
        if scale != 1.0:
            into.mul_(scale)
    elif accumulate:
        # A wider sum takes narrower terms as they are; a copy of them would be as large as it is.
        into.add_(value if wider == into.dtype else value.to(into.dtype), alpha=scale)
    elif scale == 1.0:
        into.copy_(value)
    elif wider == value.dtype:
        torch.mul(value, scale, out=into)
    else:
        # Times a number, the product would be rounded to the narrower dtype first.
        torch.mul(value, value.new_full((1,), scale, dtype=wider), out=into)


def gather_alone(output: torch.Tensor, shard: torch.Tensor) -> None:
    """An all-gather among one rank: a copy, unless both are the same memory."""
    if output.data_ptr() != shard.data_ptr():
        output.copy_(shard)
