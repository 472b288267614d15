"""Collectives on communication streams: which stream waits for which, on any device with streams.

The streams and the collectives are handed in: those of CUDA and NCCL for training
(`comm/backends.py`), recorded ones for the check of stream safety (`tests/stream_safety`).
Both run this code.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from megatron_fsdp_v2.comm.errors import Label
from megatron_fsdp_v2.comm.interface import (
    DONE,
    SUMS,
    Axis,
    Collective,
    CollectiveKind,
    CommStream,
    Work,
    run_alone,
    store,
)
from megatron_fsdp_v2.comm.together import Labeled, Together

__all__ = ["Collectives", "Stream", "StreamCommunicator", "StreamDevice"]

_ONE: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Stream(Protocol):
    """A queue of device work that runs in order. `torch.cuda.Stream` is one."""

    def wait_stream(self, stream: Any, /) -> None:
        """Run what is queued here from now on after what is queued on another stream by now."""
        ...

    def record_event(self) -> Any:
        """An event that stands for everything queued here so far."""
        ...

    def wait_event(self, event: Any, /) -> None:
        """Run what is queued here from now on after an event."""
        ...

    def synchronize(self) -> None:
        """Have the host wait for everything queued here by now."""
        ...


class StreamDevice(Protocol):
    """What the schedule of communication needs of a device."""

    def new_stream(self, name: str) -> Stream:
        """Make a stream.

        Args:
            name: What runs on it, for reports.
        """
        ...

    def current_stream(self) -> Stream:
        """The stream that operations are queued on now."""
        ...

    def is_current(self, stream: Stream) -> bool:
        """Whether that is a given stream; asked for every gradient that arrives."""
        ...

    def use(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Queue operations on a stream while the context lasts."""
        ...


class Collectives(Protocol):
    """Collectives among the ranks of an axis, queued on the current stream.

    The host returns before they are done, as it does from any operation on a device.
    """

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, axis: Axis) -> None:
        """Fill `output` with the shards of all ranks; `shard` may be a view of it."""
        ...

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, axis: Axis) -> None:
        """Fill `output` with the sum over ranks of this rank's slice of `full`."""
        ...

    def all_reduce(self, full: torch.Tensor, axis: Axis) -> None:
        """Replace `full` by its sum over ranks."""
        ...

    def in_one(self, axis: Axis) -> contextlib.AbstractContextManager[Any]:
        """Have the collectives of a context be one: they are alike, and read at its end."""
        ...

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_numels: Sequence[int],
        sent_numels: Sequence[int],
        axis: Axis,
    ) -> None:
        """Send every rank its part of `sent`, and receive what all have for this one."""
        ...


class _ComputeStream:
    """The stream that a model computes on, as against others beside it.

    Attributes:
        stream: That; None before the first use.
    """

    def __init__(self, device: StreamDevice) -> None:
        self._device = device
        self.stream: Stream | None = None

    def begin_pass(self) -> None:
        if self.stream is None or not self._device.is_current(self.stream):
            self.stream = self._device.current_stream()

    def other(self) -> Stream | None:
        """The current stream, where it is another one."""
        if self.stream is None:
            self.begin_pass()
        assert self.stream is not None
        return None if self._device.is_current(self.stream) else self._device.current_stream()


class _EventWork:
    """Work on a communication stream; who waits does so by an event, the host never does."""

    def __init__(
        self, device: StreamDevice, compute: _ComputeStream, event: Any, keep: tuple[Any, ...]
    ) -> None:
        self._device = device
        self._compute = compute
        self._event: Any | None = event
        self._keep = keep

    def wait(self) -> None:
        if self._event is not None:
            self._device.current_stream().wait_event(self._event)
            # Others than the waiting stream use what the work is for, and it is waited for once.
            if self._compute.other() is not None and self._compute.stream is not None:
                self._compute.stream.wait_event(self._event)
        self._event = None
        # Only now: memory freed here may be handed out again on the stream that waited.
        self._keep = ()


class StreamCommunicator:
    """Collectives on streams, each communication stream a stream of its own.

    Every buffer is allocated on the compute stream. A communication stream first waits for the
    stream that issues, so that memory reused from earlier work is free and inputs are written;
    whoever waits for the work orders the compute stream after the communication stream, so that
    memory it frees may be reused.

    A model may compute on side streams too, and autograd runs a node on the stream of its forward.
    The compute stream is the one that the latest pass through the model began on. A side stream
    waits for it before it uses memory of a buffer (`memory`, `wait_for`), and the other way round
    before that memory is communicated (`wait_for`) or taken away (`settle`).

    Args:
        device: Makes and orders streams.
        collectives: What is run on them.
    """

    has_streams = True

    def __init__(self, device: StreamDevice, collectives: Collectives) -> None:
        self._device = device
        self._collectives = collectives
        self._streams = {
            comm_stream: device.new_stream(comm_stream.value) for comm_stream in CommStream
        }
        self._compute = _ComputeStream(device)
        # Shared by the copies that have labels.
        self._together = Together(self._issue_alike)
        self.label = Label()

    def labeled(self, label: Label) -> StreamCommunicator:
        """See `Communicator.labeled`."""
        other = copy.copy(self)
        other.label = label
        return other

    def issue(self, collective: Collective, *, async_op: bool) -> Work:
        """See `Communicator.issue`."""
        if collective.axis.size == 1:
            run_alone(collective)
            return DONE
        if self._together.is_open:
            if async_op:
                return self._together.put_off(collective, self.label)
            # The order has to be the same on all ranks.
            self._together.issue()
        return self._issue([collective], self.label, async_op=async_op)[0]

    def together(self) -> contextlib.AbstractContextManager[None]:
        """See `Communicator.together`."""
        return self._together()

    def _issue_alike(self, labeled: Sequence[Labeled]) -> Sequence[Work]:
        label = Label.of_several([each.label for each in labeled])
        return self._issue([each.collective for each in labeled], label, async_op=True)

    def _issue(
        self, collectives: Sequence[Collective], label: Label, *, async_op: bool
    ) -> Sequence[Work]:
        """Queue a collective, or several alike in one."""
        axis = collectives[0].axis
        with self._on_stream(collectives[0].comm_stream, async_op):
            for collective in collectives:
                if collective.before is not None:
                    collective.before()
            try:
                first = collectives[0]
                # What is summed here is read at once, so it is issued one by one.
                sums_here = first.sums_in_fp32 and first.kind is CollectiveKind.REDUCE_SCATTER
                is_apart = len(collectives) == 1 or sums_here
                in_one = _ONE if is_apart else self._collectives.in_one(axis)
                with in_one:
                    results = [self._run(collective) for collective in collectives]
            except RuntimeError as error:
                raise label.failure(collectives[0].kind.title, axis.group, error) from error
            for collective, result in zip(collectives, results, strict=True):
                if collective.kind in SUMS:
                    store(collective.output, result, collective.scale, collective.accumulate)
                if collective.after is not None:
                    collective.after()
            if not async_op:
                return [DONE] * len(collectives)
            event = self._device.current_stream().record_event()
            # The tensors have to stay until it is done.
            return [
                _EventWork(self._device, self._compute, event, (c.output, c.input, result))
                for c, result in zip(collectives, results, strict=True)
            ]

    def _run(self, c: Collective) -> torch.Tensor:
        """Queue a collective; return where its result is, which sums are stored from."""
        collectives, axis = self._collectives, c.axis
        match c.kind:
            case CollectiveKind.ALL_GATHER:
                collectives.all_gather(c.output, c.input, axis)
            case CollectiveKind.REDUCE_SCATTER if c.sums_in_fp32:
                # Had and given back on this stream alone, but for the sum, which the work keeps.
                received = torch.empty_like(c.input)
                slices = [c.input.numel() // axis.size] * axis.size
                collectives.all_to_all(received, c.input, slices, slices, axis)
                return received.view(axis.size, -1).sum(0, dtype=torch.float32)
            case CollectiveKind.REDUCE_SCATTER:
                direct = c.output.dtype == c.input.dtype and not c.accumulate
                # In place otherwise: NCCL takes this rank's slice of the input for the output.
                shard = c.output if direct else c.input.view(axis.size, -1)[axis.rank]
                collectives.reduce_scatter(shard, c.input, axis)
                return shard
            case CollectiveKind.ALL_REDUCE:
                collectives.all_reduce(c.input, axis)
                return c.input
            case CollectiveKind.ALL_TO_ALL:
                numels = c.output_numels, c.input_numels
                collectives.all_to_all(c.output, c.input, *numels, axis)
        return c.output

    def begin_pass(self) -> None:
        """See `Communicator.begin_pass`."""
        self._compute.begin_pass()

    def side_stream(self) -> Any | None:
        """See `Communicator.side_stream`."""
        return self._compute.other()

    def wait_for(self, streams: Iterable[Any], *, and_compute: bool) -> None:
        """See `Communicator.wait_for`."""
        current = self._device.current_stream()
        for stream in streams:
            if stream != current:
                current.wait_stream(stream)
        if and_compute and self._compute.other() is not None:
            current.wait_stream(self._compute.stream)

    def synchronize(self) -> None:
        """See `Communicator.synchronize`."""
        self._device.current_stream().synchronize()

    def memory(self) -> contextlib.AbstractContextManager[Any]:
        """See `Communicator.memory`."""
        side = self._compute.other()
        return contextlib.nullcontext() if side is None else self._memory_for(side)

    @contextlib.contextmanager
    def _memory_for(self, side: Stream) -> Iterator[None]:
        assert self._compute.stream is not None
        with self._device.use(self._compute.stream):
            yield
        side.wait_stream(self._compute.stream)

    def settle(self) -> None:
        """See `Communicator.settle`."""
        side = self._compute.other()
        if side is not None and self._compute.stream is not None:
            self._compute.stream.wait_stream(side)

    def _on_stream(
        self, comm_stream: CommStream, async_op: bool
    ) -> contextlib.AbstractContextManager[Any]:
        if not async_op:
            return contextlib.nullcontext()
        stream = self._streams[comm_stream]
        stream.wait_stream(self._device.current_stream())
        return self._device.use(stream)
