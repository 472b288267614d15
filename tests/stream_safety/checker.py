"""Detection of unordered pairs of operations with vector clocks."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import override

from tests.stream_safety.schedule import (
    HOST,
    Allocation,
    Buffer,
    EventRecord,
    EventWait,
    Free,
    Operation,
    Record,
    Region,
    Schedule,
    StreamWait,
)


class Fault(enum.Enum):
    """A kind of error in a pair of operations on one buffer."""

    UNORDERED = "not ordered"
    """No wait orders two accesses on different streams, at least one of which is a write."""
    PREMATURE_FREE = "freed too early"
    """Memory is freed while an access on another stream may still be running."""
    UNORDERED_MEMORY = "memory not its own yet"
    """An access does not wait for the allocation, or an allocation for earlier accesses."""
    USE_AFTER_FREE = "used after it was freed"
    """The host queued an access to a buffer without memory."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Two records on the same memory that no chain of waits orders.

    Attributes:
        fault: The kind of error.
        buffer: The memory.
        first: Position of the earlier record in the schedule.
        second: Position of the later record.
        schedule: The schedule that contains both records.
    """

    fault: Fault
    buffer: Buffer
    first: int
    second: int
    schedule: Schedule = field(repr=False)

    @override
    def __str__(self) -> str:
        """Describe the buffer, both operations, and the missing wait."""
        earlier, later = (self.schedule.records[i] for i in (self.first, self.second))
        pair = (
            f"{self.buffer.name}: {self.fault.value}: #{self.first} {_text(earlier, self.buffer)}, "
            f"then #{self.second} {_text(later, self.buffer)}"
        )
        if self.fault is Fault.USE_AFTER_FREE:
            return f"{pair}; give it memory in between, or free it after the last use"
        return (
            f"{pair}; {later.stream!r} has to wait for {earlier.stream!r}: an event recorded "
            f"after #{self.first} and waited for before #{self.second}"
        )


def _text(record: Record, buffer: Buffer) -> str:
    if isinstance(record, Allocation):
        return f"allocation on {record.stream!r}"
    if isinstance(record, Free):
        return f"free on {record.stream!r}"
    assert isinstance(record, Operation)
    writes = any(region.buffer is buffer for region in record.writes)
    return f"{record.name} on {record.stream!r} ({'writes' if writes else 'reads'} it)"


@dataclass(slots=True)
class _Access:
    index: int
    region: Region
    is_write: bool
    is_allocation: bool = False


@dataclass(slots=True)
class _History:
    """Accesses of a buffer since its allocation, by stream."""

    accesses: defaultdict[str, list[_Access]] = field(default_factory=lambda: defaultdict(list))
    freed_at: int | None = None


class _Checker:
    """Processes a schedule in one pass.

    The clock of a stream holds, for every other stream, the position of the last record that is
    ordered before the next operation on this stream.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._clocks: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._events: dict[int, dict[str, int]] = {}
        self._histories: defaultdict[Buffer, _History] = defaultdict(_History)
        self._found: dict[tuple[Buffer, int, int], Violation] = {}
        # By stream: accesses of freed memory that are not ordered before the free: buffer, position
        # of the access, its stream, position of the free.
        self._reusable: defaultdict[str, list[tuple[Buffer, int, str, int]]] = defaultdict(list)

    def run(self) -> list[Violation]:
        for index, record in enumerate(self._schedule.records):
            if record.stream != HOST and self._clocks[HOST]:
                self._merge(record.stream, self._clocks[HOST])
            self._clocks[record.stream][record.stream] = index
            if isinstance(record, EventRecord):
                self._events[record.event] = dict(self._clocks[record.stream])
            elif isinstance(record, EventWait):
                self._merge(record.stream, self._events[record.event])
            elif isinstance(record, StreamWait):
                self._merge(record.stream, self._clocks[record.awaited])
            elif isinstance(record, Operation):
                self._operate(index, record)
            elif isinstance(record, Allocation):
                self._allocate(index, record)
            else:
                self._free(index, record)
        return list(self._found.values())

    def _merge(self, stream: str, other: dict[str, int]) -> None:
        clock = self._clocks[stream]
        for name, index in other.items():
            clock[name] = max(clock.get(name, -1), index)

    def _operate(self, index: int, operation: Operation) -> None:
        # Writes first: an operation that reads and writes a buffer is reported as writing it.
        for regions, is_write in ((operation.writes, True), (operation.reads, False)):
            for region in regions:
                history = self._histories[region.buffer]
                if history.freed_at is not None:
                    self._report(Fault.USE_AFTER_FREE, region.buffer, history.freed_at, index)
                    continue
                access = _Access(index, region, is_write)
                self._compare(operation.stream, access, history, Fault.UNORDERED)
                history.accesses[operation.stream].append(access)

    def _allocate(self, index: int, allocation: Allocation) -> None:
        clock = self._clocks[allocation.stream]
        for buffer, earlier, other, freed_at in self._reusable.pop(allocation.stream, ()):
            if earlier > clock.get(other, -1):
                self._report(Fault.PREMATURE_FREE, buffer, earlier, freed_at)
        access = _Access(index, Region(allocation.buffer), is_write=True, is_allocation=True)
        old = self._histories[allocation.buffer]
        # A free has already checked earlier accesses; without a free, check them here.
        self._compare(allocation.stream, access, old, Fault.UNORDERED_MEMORY)
        self._histories[allocation.buffer] = new = _History()
        new.accesses[allocation.stream].append(access)

    def _free(self, index: int, free: Free) -> None:
        history = self._histories[free.buffer]
        if history.freed_at is not None:
            self._report(Fault.USE_AFTER_FREE, free.buffer, history.freed_at, index)
        access = _Access(index, Region(free.buffer), is_write=True)
        if free.when_reused:
            self._reusable[free.stream] += [
                (free.buffer, earlier.index, other, index)
                for other, earlier in self._unordered(free.stream, access, history)
            ]
        else:
            self._compare(free.stream, access, history, Fault.PREMATURE_FREE)
        self._histories[free.buffer] = _History(freed_at=index)

    def _compare(self, stream: str, access: _Access, history: _History, fault: Fault) -> None:
        """Report all earlier conflicting accesses that are not ordered before this access."""
        for _, earlier in self._unordered(stream, access, history):
            found = Fault.UNORDERED_MEMORY if earlier.is_allocation else fault
            self._report(found, access.region.buffer, earlier.index, access.index)

    def _unordered(
        self, stream: str, access: _Access, history: _History
    ) -> Iterator[tuple[str, _Access]]:
        """Yield the stream and access of all earlier conflicting accesses that are not ordered."""
        clock = self._clocks[stream]
        for other, accesses in history.accesses.items():
            if other == stream:
                continue
            done = clock.get(other, -1)
            for earlier in reversed(accesses):
                if earlier.index <= done:
                    break
                if not (access.is_write or earlier.is_write):
                    continue
                if access.region.overlaps(earlier.region):
                    yield other, earlier

    def _report(self, fault: Fault, buffer: Buffer, first: int, second: int) -> None:
        violation = Violation(fault, buffer, first, second, self._schedule)
        self._found.setdefault((buffer, first, second), violation)


def find_violations(schedule: Schedule) -> list[Violation]:
    """Return every pair of records on the same bytes that conflict and are not ordered.

    Two records conflict if at least one of them writes, allocates or frees. They are ordered if
    they are on one stream, or if a chain of events and waits leads from one to the other. A buffer
    without an allocation in the schedule is assumed to have memory and no pending work at the
    start.

    Args:
        schedule: A recorded or handwritten schedule.

    Returns:
        Violations in the order of their second record.
    """
    return _Checker(schedule).run()
