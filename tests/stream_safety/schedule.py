"""The schedule of operations on streams that the checker reads."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

HOST = "host"
"""Stream name of the host's own work and waits. Work on any other stream runs after all earlier
records of the host."""


@dataclass(slots=True, eq=False)
class Buffer:
    """A separately allocated block of memory, compared by identity.

    Attributes:
        name: Name for reports; it may be changed later.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of a buffer.

    Attributes:
        buffer: The buffer.
        start: First byte.
        stop: One past the last byte.
    """

    buffer: Buffer
    start: int = 0
    stop: int = sys.maxsize

    def overlaps(self, other: Region) -> bool:
        """Return whether two regions of one buffer have bytes in common."""
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class Operation:
    """Work on a stream that reads and writes regions.

    Attributes:
        stream: Name of the stream.
        name: Name of the operation, such as `aten.mm` or `all_gather`.
        reads: Regions that the operation reads and does not write.
        writes: Regions that the operation writes.
    """

    stream: str
    name: str
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """The allocation of a buffer from memory that earlier work on `stream` may have used."""

    stream: str
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Free:
    """The free of a buffer, whose memory later work on `stream` may use.

    Attributes:
        stream: Name of the stream.
        buffer: The buffer.
        when_reused: Whether accesses on other streams must be ordered before the next allocation on
            the stream, instead of before this free.
    """

    stream: str
    buffer: Buffer
    when_reused: bool = False


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event that completes after all earlier work on a stream."""

    stream: str
    event: int


@dataclass(frozen=True, slots=True)
class EventWait:
    """Later work on a stream runs after an event."""

    stream: str
    event: int


@dataclass(frozen=True, slots=True)
class StreamWait:
    """Later work on a stream runs after earlier work on another stream."""

    stream: str
    awaited: str


Record = Operation | Allocation | Free | EventRecord | EventWait | StreamWait


class Schedule:
    """Records in the order in which the host queued them.

    Attributes:
        records: All records; reports number a record by its position.
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
        """Queue an operation; a buffer stands for its whole region."""
        read, written = tuple(map(_region, reads)), tuple(map(_region, writes))
        self.records.append(Operation(stream, name, read, written))

    def allocate(self, stream: str, buffer: Buffer) -> None:
        """Allocate a buffer from the free memory of a stream."""
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
        """Make a stream wait for an event."""
        self.records.append(EventWait(stream, event))

    def wait_stream(self, stream: str, awaited: str) -> None:
        """Make a stream wait for all earlier work on another stream."""
        self.records.append(StreamWait(stream, awaited))

    def operations(self, stream: str | None = None) -> list[Operation]:
        """Return the operations of one stream, or of all streams, in order."""
        return [
            record
            for record in self.records
            if isinstance(record, Operation) and stream in (None, record.stream)
        ]


def _region(what: Region | Buffer) -> Region:
    return Region(what) if isinstance(what, Buffer) else what
