"""Collectives on communication streams, and the order between streams.

Streams and collectives are arguments: CUDA and NCCL for training (`comm/backends.py`), recorders
for the check of stream safety (`tests/stream_safety`). Both run this code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, override

import torch

from megatron_fsdp_v2.comm.interface import (
    DONE,
    SUMS,
    Axis,
    Collective,
    CollectiveKind,
    CommStream,
    Communicator,
    Work,
    run_alone,
    store,
)

__all__ = ["Collectives", "Stream", "StreamCommunicator", "StreamDevice"]


class Stream(Protocol):
    """A queue of device work that runs in order. `torch.cuda.Stream` is one."""

    def wait_stream(self, stream: Any, /) -> None:
        """Make later work of this stream wait for all work queued on another stream."""
        ...

    def record_event(self) -> Any:
        """Return an event that completes after all work queued so far."""
        ...

    def wait_event(self, event: Any, /) -> None:
        """Make later work of this stream wait for an event."""
        ...

    def synchronize(self) -> None:
        """Make the host wait for all work queued so far."""
        ...


class StreamDevice(Protocol):
    """Makes and selects streams of a device."""

    def new_stream(self, name: str) -> Stream:
        """Make a stream.

        Args:
            name: Name for reports.
        """
        ...

    def current_stream(self) -> Stream:
        """Return the current stream."""
        ...

    def is_current(self, stream: Stream) -> bool:
        """Return whether a stream is the current one; called for every gradient."""
        ...

    def use(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which operations are queued on a stream."""
        ...


class Collectives(Protocol):
    """Collectives among the ranks of an axis, queued on the current stream.

    Calls return before the collectives are done, like all operations on a device.
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

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_numels: Sequence[int],
        sent_numels: Sequence[int],
        axis: Axis,
    ) -> None:
        """Send every rank its part of `sent`, and receive this rank's part from every rank."""
        ...


class _ComputeStream:
    """The compute stream of a model, as opposed to side streams.

    Attributes:
        stream: The stream; None before the first use.
    """

    def __init__(self, device: StreamDevice) -> None:
        self._device = device
        self.stream: Stream | None = None

    def begin_pass(self) -> None:
        if self.stream is None or not self._device.is_current(self.stream):
            self.stream = self._device.current_stream()

    def other(self) -> Stream | None:
        """Return the current stream if it is a side stream."""
        if self.stream is None:
            self.begin_pass()
        assert self.stream is not None
        return None if self._device.is_current(self.stream) else self._device.current_stream()


class _EventWork:
    """Work handle on a communication stream; `wait` waits on the device by an event."""

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
            # The compute stream uses the output too, and a handle is waited for only once.
            if self._compute.other() is not None and self._compute.stream is not None:
                self._compute.stream.wait_event(self._event)
        self._event = None
        # Released only after the wait: the waiting stream may reuse the freed memory.
        self._keep = ()


class StreamCommunicator(Communicator):
    """Communicator that runs collectives on communication streams.

    Every buffer is allocated on the compute stream. A communication stream first waits for the
    issuing stream, so that inputs are written and earlier uses of reused memory are done. Waiting
    for a work handle makes the compute stream wait for the communication stream, so that memory
    freed afterwards may be reused.

    A model may also compute on side streams, and autograd runs a node on the stream of its forward.
    The compute stream is the stream on which the latest pass through the model began. A side stream
    waits for the compute stream before it uses memory of a buffer (`memory`, `wait_for`); the
    compute stream waits for side streams before that memory is communicated (`wait_for`) or freed
    (`settle`).

    Args:
        device: Makes and selects streams.
        collectives: Collectives to run on the streams.
    """

    has_streams = True

    def __init__(self, device: StreamDevice, collectives: Collectives) -> None:
        super().__init__()
        self._device = device
        self._collectives = collectives
        self._streams = {
            comm_stream: device.new_stream(comm_stream.value) for comm_stream in CommStream
        }
        self._compute = _ComputeStream(device)

    @override
    def issue(self, collective: Collective, *, async_op: bool) -> Work:
        """See `Communicator.issue`."""
        if collective.axis.size == 1:
            run_alone(collective)
            return DONE
        axis, kind = collective.axis, collective.kind
        with self._on_stream(collective.comm_stream, async_op):
            if collective.before is not None:
                collective.before()
            try:
                result = self._run(collective)
            except RuntimeError as error:
                raise self.label.failure(kind.title, axis.group, error) from error
            if kind in SUMS:
                store(collective.output, result, collective.scale, collective.accumulate)
            if collective.after is not None:
                collective.after()
            if not async_op:
                return DONE
            # Keeps the tensors allocated until the collective is done.
            keep = (collective.output, collective.input, result)
            event = self._device.current_stream().record_event()
            return _EventWork(self._device, self._compute, event, keep)

    def _run(self, c: Collective) -> torch.Tensor:
        """Queue a collective, and return the tensor that holds its result."""
        collectives, axis = self._collectives, c.axis
        match c.kind:
            case CollectiveKind.ALL_GATHER:
                collectives.all_gather(c.output, c.input, axis)
            case CollectiveKind.REDUCE_SCATTER if c.sums_in_fp32:
                # Allocated and freed on this stream only; the work handle keeps the sum.
                received = torch.empty_like(c.input)
                slices = [c.input.numel() // axis.size] * axis.size
                collectives.all_to_all(received, c.input, slices, slices, axis)
                return received.view(axis.size, -1).sum(0, dtype=torch.float32)
            case CollectiveKind.REDUCE_SCATTER:
                direct = c.output.dtype == c.input.dtype and not c.accumulate
                # Otherwise in place: NCCL accepts this rank's slice of the input as the output.
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

    @override
    def begin_pass(self) -> None:
        """See `Communicator.begin_pass`."""
        self._compute.begin_pass()

    @override
    def side_stream(self) -> Any | None:
        """See `Communicator.side_stream`."""
        return self._compute.other()

    @override
    def wait_for(self, streams: Iterable[Any], *, and_compute: bool) -> None:
        """See `Communicator.wait_for`."""
        current = self._device.current_stream()
        for stream in streams:
            if stream != current:
                current.wait_stream(stream)
        if and_compute and self._compute.other() is not None:
            current.wait_stream(self._compute.stream)

    @override
    def synchronize(self) -> None:
        """See `Communicator.synchronize`."""
        self._device.current_stream().synchronize()

    @override
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

    @override
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
