"""The simulated devices: a CPU whose host computes, and a GPU with streams, in virtual time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from megatron_fsdp_v2.diagnostics.simulation.timeline import Queue, Timeline

__all__ = ["COMPUTE", "Device", "HostDevice", "VirtualEvent", "VirtualStream", "VirtualStreams"]

COMPUTE = "compute"
"""Name of the stream that a model computes on."""


class Done(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Order what comes next on the current stream, or the host, after it."""
        ...


class Device(Protocol):
    """What a simulated process group and operations need of a device."""

    timeline: Timeline

    def compute(self, seconds: float) -> None:
        """Have an operation done that takes so long."""
        ...

    def communicate(self, communicator: str, link: str, seconds: float) -> Done:
        """Queue a collective.

        Args:
            communicator: Its name; it runs one collective at a time.
            link: What it shares with other communicators, and takes turns on.
            seconds: Time of it alone.
        """
        ...


class _AtMoment:
    """Done at a moment that is known; `wait` has a host or a stream wait for it."""

    def __init__(self, done_at: float, wait_until: Any) -> None:
        self._done_at = done_at
        self._wait_until = wait_until

    def wait(self) -> None:
        self._wait_until(self._done_at)


class HostDevice:
    """A CPU: the host computes, a process group's thread communicates meanwhile.

    Args:
        timeline: Its time; a new one when None.

    Attributes:
        timeline: Likewise.
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
    """A moment in the work of a stream."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.at = 0.0
        self._timeline: Timeline | None = None

    def set(self, at: float, timeline: Timeline) -> None:
        """Have it stand for a moment."""
        self.at, self._timeline = at, timeline

    def synchronize(self) -> None:
        """Have the host wait for it."""
        if self._timeline is not None:
            self._timeline.wait(self.at)

    def query(self) -> bool:
        """Whether it has come for the host."""
        return self._timeline is None or self._timeline.now >= self.at


class VirtualStream:
    """A stream in virtual time. See `comm.streams.Stream`.

    Args:
        streams: Of which device.
        name: For reports.
    """

    def __init__(self, streams: VirtualStreams, name: str) -> None:
        self.queue: Queue = streams.timeline.queue(name)
        self._streams = streams

    def wait_stream(self, stream: VirtualStream, /) -> None:
        """Go on after all that is queued there by now."""
        self.wait_until(stream.queue.ready)

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        """An event that stands for all that is queued here by now."""
        event = event or VirtualEvent()
        timeline = self._streams.timeline
        event.set(max(self.queue.ready, timeline.now), timeline)
        return event

    def wait_event(self, event: VirtualEvent, /) -> None:
        """Go on after an event."""
        self.wait_until(event.at)

    def wait_until(self, moment: float) -> None:
        """Go on after a moment."""
        self.queue.ready = max(self.queue.ready, moment)

    def synchronize(self) -> None:
        """Have the host wait for all that is queued here by now."""
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
        """The stream that operations are queued on now."""
        return self._stack[-1]

    def is_current(self, stream: Any) -> bool:
        """Whether that is a given stream."""
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
        """See `Device.communicate`. As with NCCL it begins after what the current stream has."""
        queue = self.timeline.queue(f"communicator {communicator}")
        queue.ready = max(queue.ready, self._stack[-1].queue.ready)
        done_at = self.timeline.run(seconds, queue, self.timeline.queue(link))
        return _AtMoment(done_at, lambda moment: self._stack[-1].wait_until(moment))
