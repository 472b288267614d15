"""The simulated devices: a CPU whose host computes, and a GPU with streams, in virtual time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from megatron_fsdp_v2.diagnostics.simulation.timeline import Queue, Timeline

__all__ = ["COMPUTE", "Device", "HostDevice", "VirtualEvent", "VirtualStream", "VirtualStreams"]

COMPUTE = "compute"
"""Name of the compute stream."""


class Done(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Order later work of the current stream, or of the host, after it."""
        ...


class Device(Protocol):
    """A device on which a simulated process group and operations take time."""

    timeline: Timeline

    def compute(self, seconds: float) -> None:
        """Run an operation of `seconds`."""
        ...

    def communicate(self, communicator: str, link: str, seconds: float) -> Done:
        """Queue a collective.

        Args:
            communicator: Name of its communicator, which runs one collective at a time.
            link: Name of its link, on which communicators take turns.
            seconds: Time of the collective alone.
        """
        ...


class _AtMoment:
    """Work that ends at a known moment."""

    def __init__(self, done_at: float, wait_until: Any) -> None:
        self._done_at = done_at
        self._wait_until = wait_until

    def wait(self) -> None:
        self._wait_until(self._done_at)


class HostDevice:
    """A CPU: the host computes while a thread of the process group communicates.

    Args:
        timeline: Its time; a new one when None.

    Attributes:
        timeline: See above.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline or Timeline()
        self._compute = self.timeline.queue(COMPUTE)

    def compute(self, seconds: float) -> None:
        """See `Device.compute`."""
        self.timeline.wait(self.timeline.run(seconds, self._compute))

    def communicate(self, communicator: str, link: str, seconds: float) -> Done:
        """See `Device.communicate`."""
        queues = self.timeline.queue(f"communicator {communicator}"), self.timeline.queue(link)
        return _AtMoment(self.timeline.run(seconds, *queues), self.timeline.wait)


class VirtualEvent:
    """An event of a virtual stream."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.at = 0.0
        self._timeline: Timeline | None = None

    def set(self, at: float, timeline: Timeline) -> None:
        """Set the moment of the event."""
        self.at, self._timeline = at, timeline

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        if self._timeline is not None:
            self._timeline.wait(self.at)

    def query(self) -> bool:
        """Whether the event is in the host's past."""
        return self._timeline is None or self._timeline.now >= self.at


class VirtualStream:
    """A stream in virtual time. See `comm.streams.Stream`.

    Args:
        streams: The device.
        name: Name for reports.
    """

    def __init__(self, streams: VirtualStreams, name: str) -> None:
        self.queue: Queue = streams.timeline.queue(name)
        self._streams = streams

    def wait_stream(self, stream: VirtualStream, /) -> None:
        """Order later work after all work queued on `stream` so far."""
        self.wait_until(stream.queue.ready)

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        """Record an event after all work queued on this stream so far."""
        event = event or VirtualEvent()
        timeline = self._streams.timeline
        event.set(max(self.queue.ready, timeline.now), timeline)
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
    """A GPU in virtual time: the host queues, streams work. See `comm.streams.StreamDevice`.

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
        """Whether `stream` is the current stream."""
        return self._stack[-1] is stream

    @contextlib.contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        """Queue operations on a stream while the context lasts."""
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    def compute(self, seconds: float) -> None:
        """See `Device.compute`."""
        self.timeline.run(seconds, self._stack[-1].queue)

    def communicate(self, communicator: str, link: str, seconds: float) -> Done:
        """See `Device.communicate`. As with NCCL it starts after the current stream's work."""
        queue = self.timeline.queue(f"communicator {communicator}")
        queue.ready = max(queue.ready, self._stack[-1].queue.ready)
        done_at = self.timeline.run(seconds, queue, self.timeline.queue(link))
        return _AtMoment(done_at, lambda moment: self._stack[-1].wait_until(moment))
