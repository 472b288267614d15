"""What was queued where: the record that the checker reads."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "HOST",
    "Allocation",
    "Buffer",
    "EventRecord",
    "EventWait",
    "Free",
    "Operation",
    "Record",
    "Region",
    "Schedule",
    "StreamWait",
]

HOST = "host"
"""Name of what stands for the host: its own work, and its waits for events and streams. Whatever is
queued on a stream comes after all of that."""


@dataclass(slots=True, eq=False)
class Buffer:
    """A piece of memory with a life of its own; two of the same name are two.

    Attributes:
        name: For reports; may be changed when a better one is known.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of a buffer.

    Attributes:
        buffer: Which.
        start: First byte.
        stop: One past the last byte.
    """

    buffer: Buffer
    start: int = 0
    stop: int = sys.maxsize

    def overlaps(self, other: Region) -> bool:
        """Whether two regions of one buffer have bytes in common."""
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class Operation:
    """Work on a stream that reads and writes regions.

    Attributes:
        stream: Name of the stream.
        name: What it is, such as `aten.mm` or `all_gather`.
        reads: What it reads and does not write.
        writes: What it writes.
    """

    stream: str
    name: str
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """A buffer gets memory, which work on `stream` may have used before."""

    stream: str
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Free:
    """A buffer loses its memory, which work on `stream` may use from now on.

    Attributes:
        stream: Name of the stream.
        buffer: Which.
        when_reused: Whether what else uses it has to be done only when the stream is next given
            memory, and not at once: waits that come in between count.
    """

    stream: str
    buffer: Buffer
    when_reused: bool = False


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event that stands for all earlier work on a stream."""

    stream: str
    event: int


@dataclass(frozen=True, slots=True)
class EventWait:
    """Later work on a stream runs after an event."""

    stream: str
    event: int


@dataclass(frozen=True, slots=True)
class StreamWait:
    """Later work on a stream runs after earlier work on another one."""

    stream: str
    awaited: str


Record = Operation | Allocation | Free | EventRecord | EventWait | StreamWait


class Schedule:
    """Records in the order in which the host queued them.

    Attributes:
        records: All of them; a record's position is the number that reports give it.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._num_events = 0

    def operation(
        self,
        stream: str,
        name: str,
        reads: Iterable[Region | Buffer] = (),
        writes: Iterable[Region | Buffer] = (),
    ) -> None:
        """Queue work; a buffer stands for all of it."""
        read, written = tuple(map(_region, reads)), tuple(map(_region, writes))
        self.records.append(Operation(stream, name, read, written))

    def allocate(self, stream: str, buffer: Buffer) -> None:
        """Give a buffer memory from the free memory of a stream."""
        self.records.append(Allocation(stream, buffer))

    def free(self, stream: str, buffer: Buffer, *, when_reused: bool = False) -> None:
        """Return a buffer's memory to the free memory of a stream; see `Free`."""
        self.records.append(Free(stream, buffer, when_reused))

    def record_event(self, stream: str) -> int:
        """Record an event on a stream and return its number."""
        self._num_events += 1
        self.records.append(EventRecord(stream, self._num_events))
        return self._num_events

    def wait_event(self, stream: str, event: int) -> None:
        """Make a stream wait for an event.

        Raises:
            ValueError: No such event was recorded.
        """
        if not 1 <= event <= self._num_events:
            raise ValueError(f"stream {stream!r} waits for event {event}, which was not recorded")
        self.records.append(EventWait(stream, event))

    def wait_stream(self, stream: str, awaited: str) -> None:
        """Make a stream wait for all earlier work on another one."""
        self.records.append(StreamWait(stream, awaited))

    def operations(self, stream: str | None = None) -> list[Operation]:
        """Operations, of one stream or of all, in order."""
        return [
            record
            for record in self.records
            if isinstance(record, Operation) and stream in (None, record.stream)
        ]


def _region(what: Region | Buffer) -> Region:
    return Region(what) if isinstance(what, Buffer) else what
