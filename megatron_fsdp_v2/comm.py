"""Collectives behind one small interface: issue, get a ticket, wait.

This is the only file that knows how devices differ. On CUDA a collective runs on a side stream
and waiting is an event; on a CPU it is an asynchronous operation of the process group.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = [
    "DONE",
    "Axis",
    "Communicator",
    "CpuCommunicator",
    "CudaCommunicator",
    "Lane",
    "Ticket",
    "communicator_for",
    "store_scaled",
]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the data-parallel mesh as this rank sees it.

    Attributes:
        group: Its process group.
        size: Ranks along it.
        rank: This rank's coordinate on it.
    """

    group: dist.ProcessGroup
    size: int
    rank: int


class Lane(enum.Enum):
    """Independent queues of communication; each is a stream of its own on a GPU."""

    UNSHARD = "unshard"
    REDUCE = "reduce"
    OUTER = "outer"


class Ticket(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Order what the caller does next after the collective. Harmless when repeated."""
        ...


class Communicator(Protocol):
    """The three collectives data parallelism needs.

    With `async_op=False` the result is in place when the call returns. Tensors passed in must
    stay allocated until the ticket has been waited for; the ticket holds references to them.
    """

    def all_gather(
        self, output: torch.Tensor, shard: torch.Tensor, axis: Axis, lane: Lane, *, async_op: bool
    ) -> Ticket:
        """Fill `output` with the shards of all ranks, in rank order.

        Args:
            output: Flat, `axis.size * shard.numel()` elements.
            shard: Flat, this rank's part, of the same dtype; may be a view of `output`.
            axis: Ranks that take part.
            lane: Queue to run in.
            async_op: Whether to return before it is done.
        """
        ...

    def reduce_scatter(
        self,
        into: torch.Tensor,
        full: torch.Tensor,
        axis: Axis,
        lane: Lane,
        *,
        scale: float,
        accumulate: bool,
        async_op: bool,
    ) -> Ticket:
        """Put (or add) `scale` times the sum over ranks of this rank's slice of `full`.

        Args:
            into: Flat, `full.numel() / axis.size` elements of any floating dtype.
            full: Flat, in the dtype of the wire; its content is consumed.
            axis: Ranks that take part.
            lane: Queue to run in.
            scale: Factor applied once to the sum.
            accumulate: Add to `into` instead of overwriting it.
            async_op: Whether to return before it is done.
        """
        ...

    def all_reduce(
        self,
        into: torch.Tensor,
        full: torch.Tensor,
        axis: Axis,
        lane: Lane,
        *,
        scale: float,
        accumulate: bool,
        async_op: bool,
    ) -> Ticket:
        """Put (or add) `scale` times the sum over ranks of `full`. See `reduce_scatter`."""
        ...

    def flush(self) -> None:
        """Order everything issued so far before what the caller does next."""
        ...


class _DoneTicket:
    def wait(self) -> None:
        return None


DONE: Ticket = _DoneTicket()


class _WorkTicket:
    """An asynchronous operation of a CPU process group, and what to do with its result."""

    def __init__(self, work: Any, finish: Callable[[], None] | None, keep: tuple[Any, ...]) -> None:
        self._work = work
        self._finish = finish
        self._keep = keep

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if self._finish is not None:
            self._finish()
        self._finish = None
        self._keep = ()


def store_scaled(into: torch.Tensor, value: torch.Tensor, scale: float, accumulate: bool) -> None:
    """`into = scale * value`, or `into += scale * value`, in the dtype of `into`."""
    if accumulate:
        into.add_(value.to(into.dtype), alpha=scale)
    else:
        into.copy_(value)
        if scale != 1.0:
            into.mul_(scale)


class CpuCommunicator:
    """Collectives of a CPU process group (gloo)."""

    def all_gather(
        self, output: torch.Tensor, shard: torch.Tensor, axis: Axis, lane: Lane, *, async_op: bool
    ) -> Ticket:
        """See `Communicator.all_gather`."""
        del lane
        if axis.size == 1:
            if output.data_ptr() != shard.data_ptr():
                output.copy_(shard)
            return DONE
        work = dist.all_gather_into_tensor(output, shard, group=axis.group, async_op=True)
        return self._issued(work, None, (output, shard), async_op)

    def reduce_scatter(
        self,
        into: torch.Tensor,
        full: torch.Tensor,
        axis: Axis,
        lane: Lane,
        *,
        scale: float,
        accumulate: bool,
        async_op: bool,
    ) -> Ticket:
        """See `Communicator.reduce_scatter`.

        Gloo's reduce-scatter is several times slower than an all-to-all of the same bytes. The
        sum is made here, in rank order and in `into`'s dtype, whatever the dtype on the wire.
        """
        del lane
        if axis.size == 1:
            store_scaled(into, full, scale, accumulate)
            return DONE
        received = torch.empty_like(full)
        work = dist.all_to_all_single(received, full, group=axis.group, async_op=True)

        def finish() -> None:
            pieces = received.view(axis.size, -1)
            total = pieces[0].to(into.dtype, copy=True) if accumulate else into.copy_(pieces[0])
            for piece in pieces[1:]:
                total.add_(piece)
            if accumulate:
                into.add_(total, alpha=scale)
            elif scale != 1.0:
                into.mul_(scale)

        return self._issued(work, finish, (full, received), async_op)

    def all_reduce(
        self,
        into: torch.Tensor,
        full: torch.Tensor,
        axis: Axis,
        lane: Lane,
        *,
        scale: float,
        accumulate: bool,
        async_op: bool,
    ) -> Ticket:
        """See `Communicator.all_reduce`."""
        del lane
        if axis.size == 1:
            _store_in_place(into, full, scale, accumulate)
            return DONE
        work = dist.all_reduce(full, group=axis.group, async_op=True)
        return self._issued(
            work, lambda: _store_in_place(into, full, scale, accumulate), (full, into), async_op
        )

    def flush(self) -> None:
        """Nothing is queued anywhere but in tickets."""

    @staticmethod
    def _issued(
        work: Any, finish: Callable[[], None] | None, keep: tuple[Any, ...], async_op: bool
    ) -> Ticket:
        ticket = _WorkTicket(work, finish, keep)
        if not async_op:
            ticket.wait()
        return ticket


def _store_in_place(into: torch.Tensor, full: torch.Tensor, scale: float, accumulate: bool) -> None:
    """`store_scaled`, where `into` may be `full` itself."""
    if into.data_ptr() == full.data_ptr() and into.dtype == full.dtype:
        if scale != 1.0:
            into.mul_(scale)
    else:
        store_scaled(into, full, scale, accumulate)


class _EventTicket:
    """Work on a side stream; the waiting stream waits for an event, the host for nothing."""

    def __init__(self, event: torch.cuda.Event, keep: tuple[Any, ...]) -> None:
        self._event: torch.cuda.Event | None = event
        self._keep = keep

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._event = None
        self._keep = ()


class CudaCommunicator:
    """Collectives of NCCL, each lane on a side stream.

    Every buffer is allocated on the compute stream. A lane first waits for the compute stream,
    so that memory reused from earlier work is free and inputs are written; whoever waits for the
    ticket orders the compute stream after the lane, so that memory it frees may be reused.
    """

    def __init__(self) -> None:
        self._streams = {lane: _new_stream() for lane in Lane}

    def all_gather(
        self, output: torch.Tensor, shard: torch.Tensor, axis: Axis, lane: Lane, *, async_op: bool
    ) -> Ticket:
        """See `Communicator.all_gather`."""
        if axis.size == 1:
            if output.data_ptr() != shard.data_ptr():
                output.copy_(shard)
            return DONE
        with self._lane(lane, async_op):
            dist.all_gather_into_tensor(output, shard, group=axis.group)
            return self._ticket((output, shard), async_op)

    def reduce_scatter(
        self,
        into: torch.Tensor,
        full: torch.Tensor,
        axis: Axis,
        lane: Lane,
        *,
        scale: float,
        accumulate: bool,
        async_op: bool,
    ) -> Ticket:
        """See `Communicator.reduce_scatter`."""
        if axis.size == 1:
            store_scaled(into, full, scale, accumulate)
            return DONE
        direct = into.dtype == full.dtype and not accumulate
        shard = into if direct else torch.empty_like(full[: into.numel()])
        with self._lane(lane, async_op):
            op, left = _scaled_sum(full, scale)
            dist.reduce_scatter_tensor(shard, full, op=op, group=axis.group)
            if not direct:
                store_scaled(into, shard, left, accumulate)
            elif left != 1.0:
                into.mul_(left)
            return self._ticket((into, full, shard), async_op)

    def all_reduce(
        self,
        into: torch.Tensor,
        full: torch.Tensor,
        axis: Axis,
        lane: Lane,
        *,
        scale: float,
        accumulate: bool,
        async_op: bool,
    ) -> Ticket:
        """See `Communicator.all_reduce`."""
        if axis.size == 1:
            _store_in_place(into, full, scale, accumulate)
            return DONE
        with self._lane(lane, async_op):
            op, left = _scaled_sum(full, scale)
            dist.all_reduce(full, op=op, group=axis.group)
            _store_in_place(into, full, left, accumulate)
            return self._ticket((into, full), async_op)

    def flush(self) -> None:
        """Make the current stream wait for every lane."""
        for stream in self._streams.values():
            torch.cuda.current_stream().wait_stream(stream)

    def _lane(self, lane: Lane, async_op: bool) -> contextlib.AbstractContextManager[Any]:
        if not async_op:
            return contextlib.nullcontext()
        stream = self._streams[lane]
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    @staticmethod
    def _ticket(keep: tuple[Any, ...], async_op: bool) -> Ticket:
        if not async_op:
            return DONE
        return _EventTicket(torch.cuda.current_stream().record_event(), keep)


def _new_stream() -> torch.cuda.Stream:
    # Communication goes before computation where both are ready: computation waits for it.
    return torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]


def _scaled_sum(full: torch.Tensor, scale: float) -> tuple[Any, float]:
    """The reduce op that applies `scale`, and the factor left to apply afterwards.

    NCCL multiplies fp32 and fp16 inputs before it sums. For bf16 the factor is applied to the
    input first, so that the sum stays in the range of its terms.
    """
    if scale == 1.0:
        return dist.ReduceOp.SUM, 1.0
    if full.dtype in (torch.float32, torch.float16, torch.float64):
        return dist._make_nccl_premul_sum(scale), 1.0  # type: ignore[attr-defined]
    full.mul_(scale)
    return dist.ReduceOp.SUM, 1.0


def communicator_for(device: torch.device) -> Communicator:
    """The communicator for a device type.

    Raises:
        ValueError: The device type is neither `cpu` nor `cuda`.
    """
    if device.type == "cpu":
        return CpuCommunicator()
    if device.type == "cuda":
        return CudaCommunicator()
    raise ValueError(f"fully_shard runs on 'cuda' and 'cpu' meshes, got {device.type!r}")
