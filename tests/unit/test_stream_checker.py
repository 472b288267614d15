"""The stream checker on schedules with faults, written by hand.

That correct schedules have no fault is shown by the recorded steps in
`tests/distributed/test_stream_safety.py`.
"""

from __future__ import annotations

import collections
import itertools

import pytest

from tests.stream_safety import Buffer, Fault, Region, Schedule, find_violations

Faults = list[tuple[Fault, int, int]]


def schedule_of(text: str) -> Schedule:
    """Parse a schedule such as `comm reads a writes b; compute waits for comm; comm frees b`.

    `comm notes it` records an event `it`, and `compute awaits it` waits for this event.
    """
    schedule, events = Schedule(), dict[str, int]()
    buffers = collections.defaultdict[str, Buffer](lambda: Buffer("buffer"))
    for step in text.split("; "):
        stream, does, *words = step.split()
        if does == "waits":
            schedule.wait_stream(stream, words[-1])
        elif does == "notes":
            events[words[0]] = schedule.record_event(stream)
        elif does == "awaits":
            schedule.wait_event(stream, events[words[0]])
        elif does == "allocates":
            schedule.allocate(stream, buffers[words[0]])
        elif does == "frees":
            schedule.free(stream, buffers[words[0]])
        else:
            used = list(itertools.batched([does, *words], 2))
            reads = [buffers[name] for kind, name in used if kind == "reads"]
            writes = [buffers[name] for kind, name in used if kind == "writes"]
            schedule.operation(stream, " ".join([does, *words]), reads=reads, writes=writes)
    return schedule


def faults(schedule: Schedule) -> Faults:
    return [(v.fault, v.first, v.second) for v in find_violations(schedule)]


_NEEDED = "compute writes shard; "
_GATHER = "comm reads shard writes full; "
_REDUCE = "compute allocates b; reduce waits for compute; reduce reads b; "
SCHEDULES: dict[str, tuple[str, Faults]] = {
    "a use by the host without a wait is found": (
        "comm writes b; comm notes it; compute awaits it; host reads b",
        [(Fault.UNORDERED, 0, 3)],
    ),
    "a stream that does not wait for its input is found": (
        f"{_NEEDED}{_GATHER}comm notes it; compute awaits it; compute reads full",
        [(Fault.UNORDERED, 0, 1)],
    ),
    "an event orders nothing queued after it": (
        "comm notes it; comm writes b; compute awaits it; compute reads b",
        [(Fault.UNORDERED, 1, 3)],
    ),
    "a write after an unordered read is found": (
        "comm reads b; compute writes b",
        [(Fault.UNORDERED, 0, 1)],
    ),
    "every unordered pair is reported once": (
        "comm writes b; comm reads b writes b; compute reads b writes b",
        [(Fault.UNORDERED, 1, 2), (Fault.UNORDERED, 0, 2)],
    ),
    "a free before the last use is done is found": (
        f"{_REDUCE}reduce notes it; compute frees b; compute awaits it",
        [(Fault.PREMATURE_FREE, 2, 4)],
    ),
    "a stream that does not wait for the allocation is found": (
        "compute allocates b; comm writes b",
        [(Fault.UNORDERED_MEMORY, 0, 1)],
    ),
    "memory reused during a read is found": (
        "comm reads b; compute allocates b",
        [(Fault.UNORDERED_MEMORY, 0, 1)],
    ),
    "a use without memory is found": (
        "compute frees b; compute reads b",
        [(Fault.USE_AFTER_FREE, 0, 1)],
    ),
}


@pytest.mark.parametrize(("text", "expected"), SCHEDULES.values(), ids=SCHEDULES)
def test_checker_finds_the_faults_of_a_schedule(text: str, expected: Faults) -> None:
    assert faults(schedule_of(text)) == expected


@pytest.mark.parametrize(("start", "expected"), [(8, 0), (7, 1)])
def test_only_overlapping_bytes_conflict(start: int, expected: int) -> None:
    schedule, buffer = Schedule(), Buffer("buffer")
    schedule.operation("comm", "write", writes=[Region(buffer, 0, 8)])
    schedule.operation("compute", "write", writes=[Region(buffer, start, 16)])
    assert len(faults(schedule)) == expected


@pytest.mark.parametrize(("waits", "expected"), [(True, []), (False, [(1, 2), (0, 2)])])
def test_lazily_freed_memory_must_be_unused_at_the_next_allocation_of_its_stream(
    waits: bool, expected: list[tuple[int, int]]
) -> None:
    schedule, activation = Schedule(), Buffer("activation")
    schedule.operation("side", "gelu", writes=[activation])
    schedule.operation("side", "add", reads=[activation])
    schedule.free("compute", activation, when_reused=True)
    if waits:
        schedule.wait_stream("compute", "side")
    # An allocation of another stream does not reuse memory that was freed on this stream.
    schedule.allocate("side", Buffer("other"))
    schedule.allocate("compute", Buffer("next"))
    assert faults(schedule) == [(Fault.PREMATURE_FREE, *pair) for pair in expected]
