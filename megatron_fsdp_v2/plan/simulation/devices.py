"""Virtual time, and the simulated devices: a CPU whose host computes, and a GPU with streams."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from megatron_fsdp_v2.comm.interface import Work
from megatron_fsdp_v2.comm.streams import NcclCollectives, StreamCommunicator, new_comm_streams
from megatron_fsdp_v2.runtime.module import named_units

COMPUTE = "compute"
"""Name of the compute stream."""


@dataclass(slots=True, eq=False)
class Queue:
    """A queue that runs its work in order: a stream, a communicator or a link.

    Attributes:
        ready: Moment at which all work queued so far is done, in seconds.
        busy: Seconds of work; the queue is idle or waits in the rest of the time.
    """

    ready: float = 0.0
    busy: float = 0.0


class Timeline:
    """The virtual time of the host, and all queues.

    The beginning and the end of work are computed when it is queued. Nothing sleeps, and every run
    has the same times.

    Attributes:
        queues: Queues by name, created at their first use.
        listener: Called with the queues, the beginning and the end of work; None: nobody listens.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self.queues: defaultdict[str, Queue] = defaultdict(Queue)
        self.listener: Callable[[Sequence[Queue], float, float], None] | None = None

    @property
    def now(self) -> float:
        """The host's time in seconds."""
        return self._now

    def run(self, seconds: float, *queues: Queue) -> float:
        """Queue work that occupies all of these queues; return the moment of its end.

        It begins at the host's time, or when the last of the queues is free.
        """
        begin = max(self.now, *(queue.ready for queue in queues))
        for queue in queues:
            queue.ready = begin + seconds
            queue.busy += seconds
        if self.listener is not None:
            self.listener(queues, begin, begin + seconds)
        return begin + seconds

    def wait(self, until: float) -> None:
        """Make the host wait for a moment."""
        self._now = max(self._now, until)


class Device(Protocol):
    """A device on which a simulated process group and operations take time."""

    timeline: Timeline

    @property
    def now(self) -> float:
        """Time at which all computation queued so far is done, in seconds."""
        ...

    def compute(self, seconds: float) -> None:
        """Run an operation of `seconds`."""
        ...

    def communicate(self, communicator: str, link: str, seconds: float) -> Work:
        """Queue a collective.

        Args:
            communicator: Name of its communicator, which runs one collective at a time.
            link: Name of its link, on which communicators take turns.
            seconds: Time of the collective alone.
        """
        ...


class _AtMoment:
    """Work that ends at a known time."""

    def __init__(self, done_at: float, wait_until: Any) -> None:
        self._done_at = done_at
        self._wait_until = wait_until

    def wait(self) -> None:
        self._wait_until(self._done_at)


class HostDevice:
    """A CPU: the host computes while a thread of the process group communicates.

    Args:
        timeline: The timeline; None creates one.

    Attributes:
        timeline: The timeline.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline or Timeline()
        self._compute = self.timeline.queues[COMPUTE]

    @property
    def now(self) -> float:
        """See `Device.now`."""
        return self.timeline.now

    def compute(self, seconds: float) -> None:
        """See `Device.compute`."""
        self.timeline.wait(self.timeline.run(seconds, self._compute))

    def communicate(self, communicator: str, link: str, seconds: float) -> Work:
        """See `Device.communicate`."""
        queues = self.timeline.queues[f"communicator {communicator}"], self.timeline.queues[link]
        return _AtMoment(self.timeline.run(seconds, *queues), self.timeline.wait)


class VirtualEvent:
    """An event of a virtual stream.

    Attributes:
        at: Time of the event, in seconds.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs
        self.at = 0.0


class VirtualStream:
    """A stream in virtual time. See `comm.streams.Stream`.

    Args:
        streams: The device.
        name: Name for reports.
    """

    def __init__(self, streams: VirtualStreams, name: str) -> None:
        self.queue: Queue = streams.timeline.queues[name]
        self._streams = streams

    def wait_stream(self, stream: VirtualStream, /) -> None:
        """Order later work after all work queued on `stream` so far."""
        self.wait_until(stream.queue.ready)

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        """Record an event after all work queued on this stream so far."""
        event = event or VirtualEvent()
        event.at = max(self.queue.ready, self._streams.timeline.now)
        return event

    def wait_event(self, event: VirtualEvent, /) -> None:
        """Order later work after an event."""
        self.wait_until(event.at)

    def wait_until(self, moment: float) -> None:
        """Order later work after a moment."""
        self.queue.ready = max(self.queue.ready, moment)

    def synchronize(self) -> None:
        """Make the host wait for all work queued on this stream so far."""
        self._streams.timeline.wait(self.queue.ready)


class VirtualStreams:
    """A GPU in virtual time: the host queues work on streams. See `comm.streams.StreamDevice`.

    Attributes:
        timeline: Virtual time.
    """

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._num_made = 0
        self._stack = [VirtualStream(self, COMPUTE)]

    def new_stream(self, name: str) -> VirtualStream:
        """Make another stream."""
        self._num_made += 1
        return VirtualStream(self, f"stream {self._num_made} {name}")

    def current_stream(self) -> VirtualStream:
        """The current stream."""
        return self._stack[-1]

    def is_current(self, stream: Any) -> bool:
        """Whether a stream is the current one."""
        return stream is self._stack[-1]

    @contextlib.contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        """Context manager that queues operations on a stream."""
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    @property
    def now(self) -> float:
        """See `Device.now`."""
        return self._stack[0].queue.ready

    def compute(self, seconds: float) -> None:
        """See `Device.compute`."""
        self.timeline.run(seconds, self._stack[-1].queue)

    def communicate(self, communicator: str, link: str, seconds: float) -> Work:
        """See `Device.communicate`. As with NCCL, it starts after the current stream's work."""
        queue = self.timeline.queues[f"communicator {communicator}"]
        queue.ready = max(queue.ready, self._stack[-1].queue.ready)
        done_at = self.timeline.run(seconds, queue, self.timeline.queues[link])
        return _AtMoment(done_at, lambda moment: self._stack[-1].wait_until(moment))


def run_on_streams(module: nn.Module, streams: VirtualStreams) -> None:
    """Make a sharded module on a CPU mesh communicate with the code for CUDA, permanently.

    Args:
        module: The root, while no unit is in use.
        streams: The streams of the simulated GPU.

    Raises:
        ValueError: The module contains no unit.
    """
    units = named_units(module)
    if not units:
        raise ValueError(
            f"{type(module).__name__} holds no unit; call fully_shard on it and its layers first"
        )
    communicator = StreamCommunicator(streams, NcclCollectives(), new_comm_streams(streams))
    for _, unit in units:
        unit.context.communicator = communicator
        for group in unit.groups:
            group.replace_communicator(communicator)
