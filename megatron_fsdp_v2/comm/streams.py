"""Collectives on communication streams, and the order between streams.

Streams and collectives are arguments: CUDA's streams (`comm/backends.py`) and NCCL for training,
recorders for the check of stream safety (`tests/stream_safety`). Both run this code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, override

import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm.calls import all_gather_single, reduce_scatter_single
from megatron_fsdp_v2.comm.interface import (
    DONE,
    SUMS,
    Axis,
    Collective,
    CollectiveKind,
    CommStream,
    Communicator,
    Work,
)
from megatron_fsdp_v2.comm.record import RECORD


class Stream(Protocol):
    """A queue of device work that runs in order. `torch.cuda.Stream` is one."""

    def wait_stream(self, stream: Any, /) -> None:
        """Make later work of this stream wait for all work queued on another stream."""

    def record_event(self) -> Any:
        """Return an event that completes after all work queued so far."""

    def wait_event(self, event: Any, /) -> None:
        """Make later work of this stream wait for an event."""

    def synchronize(self) -> None:
        """Make the host wait for all work queued so far."""


class StreamDevice(Protocol):
    """Makes and selects streams of a device."""

    def new_stream(self, name: str) -> Stream:
        """Make a stream.

        Args:
            name: Name for reports.
        """

    def current_stream(self) -> Stream:
        """Return the current stream."""

    def is_current(self, stream: Any) -> bool:
        """Return whether a stream is the current one; cheaper than `current_stream`."""

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context in which operations are queued on a stream."""


type CommStreams = Mapping[CommStream, Stream]
"""Communication streams of a device."""


def new_comm_streams(device: StreamDevice) -> CommStreams:
    """Make the communication streams of a device, which all its communicators share."""
    return {each: device.new_stream(each.value) for each in CommStream}


type Numels = tuple[Sequence[int], Sequence[int]]
"""Numbers of elements by rank: received ones, and sent ones."""


class NcclCollectives:
    """Collectives of NCCL among the ranks of an axis, queued on the current stream.

    Calls return before the collectives are done, like all operations on a device. Reductions are
    plain sums, since switches (NVLink SHARP) can add but not multiply or divide.
    """

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, axis: Axis) -> None:
        """Fill `output` with the shards of all ranks."""
        all_gather_single(output, shard, group=axis.group)

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, axis: Axis) -> None:
        """Fill `output` with the sum over ranks of this rank's slice of `full`."""
        reduce_scatter_single(output, full, op=dist.ReduceOp.SUM, group=axis.group)

    def all_reduce(self, full: torch.Tensor, axis: Axis) -> None:
        """Replace `full` by its sum over ranks."""
        dist.all_reduce(full, op=dist.ReduceOp.SUM, group=axis.group)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, numels: Numels, axis: Axis
    ) -> None:
        """Send every rank its part of `sent`, and receive this rank's part from every rank.

        Args:
            received: Parts received, in rank order.
            sent: Parts to send, in rank order.
            numels: Elements received from each rank, and elements sent to each rank.
            axis: Participating ranks.
        """
        received_numels, sent_numels = map(list, numels)
        dist.all_to_all_single(received, sent, received_numels, sent_numels, group=axis.group)


@dataclass(slots=True, eq=False)
class _EventWork:
    """Work handle on a communication stream; `wait` waits on the device by an event.

    Attributes:
        communicator: The communicator.
        event: Completes after the collective; None once it was waited for.
        keep: Tensors that stay allocated until then.
    """

    communicator: StreamCommunicator
    event: Any
    keep: tuple[torch.Tensor, ...]

    def wait(self) -> None:
        """See `Work.wait`."""
        if self.event is not None:
            self.communicator.wait_event(self.event)
        self.event = None
        # Released only after the wait: the waiting stream may reuse the freed memory.
        self.keep = ()


class StreamCommunicator(Communicator):
    """Communicator of one root that runs collectives on communication streams.

    Several roots, such as a teacher and a student, may train or evaluate on different streams at
    the same time. They share the communication streams; each has its own compute stream.

    Every buffer is allocated on the compute stream. A communication stream first waits for the
    issuing stream, so that inputs are written and earlier uses of reused memory are done. Waiting
    for a work handle makes the compute stream wait for the communication stream, so that memory
    freed afterwards may be reused.

    A model may also compute on side streams, and autograd runs a node on the stream of its forward.
    The compute stream is the stream on which the latest pass through the root began, unless an
    earlier pass awaited its backward. A side stream waits for the compute stream before it uses
    memory of a buffer (`allocation_context`, `wait_for`); the compute stream waits for side streams
    before that memory is communicated (`wait_for`) or freed (`wait_before_free`).

    Args:
        device: Makes and selects streams.
        collectives: Collectives to run on the streams.
        streams: Communication streams.
    """

    has_streams = True

    def __init__(
        self, device: StreamDevice, collectives: NcclCollectives, streams: CommStreams
    ) -> None:
        self._device = device
        self._collectives = collectives
        self._streams = streams
        # The compute stream; None until the first pass begins.
        self._compute: Any = None
        # Whether the latest pass may reuse memory of earlier passes.
        self._reuses_memory = True

    @override
    def issue(self, collective: Collective, *, async_op: bool) -> Work:
        """See `Communicator.issue`."""
        if collective.axis.size == 1:
            collective.run_on_one_rank()
            side = self.side_stream()
            if side is None:
                return DONE
            # The handle may be waited for, and memory freed, on another stream.
            return _EventWork(self, side.record_event(), ())
        nbytes = max(collective.output.nbytes, collective.input.nbytes)
        RECORD.add(collective.name, collective.kind, nbytes, collective.axis.group)
        with self._on_stream(collective.comm_stream, async_op):
            if collective.before is not None:
                collective.before()
            try:
                result = self._run(collective)
            except RuntimeError as error:
                raise collective.failure(error) from error
            if collective.kind in SUMS:
                collective.store(result)
            if collective.after is not None:
                collective.after()
            if not async_op:
                return DONE
            # Keeps the tensors allocated until the collective is done.
            keep = (collective.output, collective.input, result)
            event = self._streams[collective.comm_stream].record_event()
            return _EventWork(self, event, keep)

    @override
    def run(self, function: Callable[[], object], stream: Any, *, async_op: bool) -> Work:
        """See `Communicator.run`."""
        chosen = self._streams[CommStream.OUTER] if stream is None else stream
        chosen.wait_stream(self._current())
        with self._device.use(chosen):
            function()
            # The function may have selected another stream.
            work = _EventWork(self, self._device.current_stream().record_event(), ())
        if not async_op:
            work.wait()
        return work

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
                collectives.all_to_all(received, c.input, (slices, slices), axis)
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
                collectives.all_to_all(c.output, c.input, (c.output_numels, c.input_numels), axis)
        return c.output

    @override
    def begin_pass(self, *, reuses_memory: bool = True) -> None:
        """See `Communicator.begin_pass`."""
        self._reuses_memory = reuses_memory
        side = self.side_stream()
        if side is not None:
            if reuses_memory:
                side.wait_stream(self._compute)
            self._compute = side

    @override
    def side_stream(self) -> Any | None:
        """See `Communicator.side_stream`. Called for every gradient."""
        # Users may select a stream at any time, so it is compared, not remembered.
        if self._compute is None:
            self._compute = self._device.current_stream()
            return None
        return None if self._device.is_current(self._compute) else self._device.current_stream()

    def _current(self) -> Stream:
        side = self.side_stream()
        current: Stream = self._compute if side is None else side
        return current

    @override
    def wait_event(self, event: Any) -> None:
        """See `Communicator.wait_event`."""
        side = self.side_stream()
        if side is not None:
            side.wait_event(event)
        # The compute stream uses outputs too, and a work handle is waited for only once.
        self._compute.wait_event(event)

    @override
    def wait_for(self, streams: Iterable[Any], *, and_compute: bool) -> None:
        """See `Communicator.wait_for`."""
        side = self.side_stream()
        current = self._compute if side is None else side
        for stream in streams:
            if stream != current:
                current.wait_stream(stream)
        if and_compute and side is not None:
            side.wait_stream(self._compute)

    @override
    def synchronize(self) -> None:
        """See `Communicator.synchronize`."""
        self._device.current_stream().synchronize()

    @override
    def allocation_context(self) -> AbstractContextManager[Any]:
        """See `Communicator.allocation_context`."""
        side = self.side_stream()
        return nullcontext(self._compute) if side is None else self._allocation_for(side)

    @contextmanager
    def _allocation_for(self, side: Stream) -> Iterator[Any]:
        with self._device.use(self._compute):
            yield self._compute
        side.wait_stream(self._compute)

    @override
    def wait_before_free(self, stream: Any) -> None:
        """See `Communicator.wait_before_free`."""
        # A captured pass uses no memory of earlier ones, and their stream would join the capture.
        if (self._reuses_memory or stream == self._compute) and not self._device.is_current(stream):
            stream.wait_stream(self._device.current_stream())

    def _on_stream(self, comm_stream: CommStream, async_op: bool) -> AbstractContextManager[Any]:
        if not async_op:
            return nullcontext()
        stream = self._streams[comm_stream]
        stream.wait_stream(self._current())
        if comm_stream is CommStream.OUTER:
            # Its input may be the result of a reduction that the compute stream does not wait for.
            stream.wait_stream(self._streams[CommStream.REDUCE])
        return self._device.use(stream)
