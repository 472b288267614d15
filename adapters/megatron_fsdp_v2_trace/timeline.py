"""Read computation, communication and memory of a step from a trace of torch's profiler."""

from __future__ import annotations

import bisect
import gzip
import json
import math
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

COMPUTE, GATHER, REDUCE, OTHER, EXPOSED = "compute", "gather", "reduce", "other", "exposed"
TRACKS = (COMPUTE, GATHER, REDUCE, OTHER, EXPOSED)
"""Kinds of spans, in the order in which they are drawn."""

NO_UNIT = "(outside units)"
_RANGE = "fsdp::"
_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "ucc:")
_BEGINS = {"pre_forward": "forward", "pre_backward": "backward"}
_ENDS = {"post_forward": "forward", "post_backward": "backward"}


class TimeSpan(NamedTuple):
    """Something that took time.

    Attributes:
        track: One of `TRACKS`.
        unit: The unit it belongs to.
        name: Name of the operation, or "" for exposed communication.
        start: Seconds since the trace began.
        end: Likewise.
    """

    track: str
    unit: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """A trace of one rank.

    Attributes:
        name: Name of the file.
        spans: What ran. Exposed communication is communication while nothing computed.
        memory: Seconds and live bytes, if the profiler recorded memory.
    """

    name: str
    spans: Sequence[TimeSpan]
    memory: Sequence[tuple[float, int]]

    def by_unit(self) -> dict[str, list[TimeSpan]]:
        """Return the spans of each unit, units in the order in which they first ran."""
        found: dict[str, list[TimeSpan]] = {}
        for span in sorted(self.spans, key=lambda span: span.start):
            found.setdefault(span.unit, []).append(span)
        return found

    @property
    def end(self) -> float:
        """Seconds from the beginning to the last span."""
        return max((span.end for span in self.spans), default=0.0)


def read(path: str | Path) -> StepTimeline:
    """Read a trace that `torch.profiler` exported (`export_chrome_trace`), of a CPU or a GPU.

    Or the step that `megatron-fsdp-v2 plan --timeline` wrote. In traces of the profiler, units are
    known if `diagnostics.profile_ranges` was on.

    Raises:
        ValueError: It is no such trace, or has nothing to show.
    """
    path = Path(path)
    events = _events(path)
    try:
        timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
        timed.sort(key=lambda event: event["ts"])
        spans = list(_spans(timed))
        first = min((span.start for span in spans), default=0.0)
        spans += _exposed(spans)
        moved = [s._replace(start=s.start - first, end=s.end - first) for s in spans]
        memory = [(at - first, nbytes) for at, nbytes in _memory(events)]
        if not all(math.isfinite(time) for span in moved for time in (span.start, span.end)):
            raise ValueError(f"{path} {_OTHER}: a time is not finite")
    except KeyError as error:
        raise ValueError(f"{path} {_OTHER}: an event has no {error}") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path} {_OTHER}: an event has a value of another type") from error
    if not moved:
        raise ValueError(f"{path} has neither operators nor kernels; profile at least one step")
    return StepTimeline(path.name, moved, memory)


_OTHER = "is no trace of torch's profiler"


def _events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace's file.

    Raises:
        ValueError: The file has no events.
    """
    raw = path.read_bytes()
    if not raw.strip():
        raise ValueError(f"{path} {_OTHER}: it is empty")
    try:
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
        content = json.loads(raw)
    except (OSError, EOFError, zlib.error):
        raise ValueError(f"{path} {_OTHER}: gzip cannot decompress it") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} {_OTHER}: it is not JSON ({error})") from None
    except UnicodeDecodeError:
        # The message of this error has the whole content.
        raise ValueError(f"{path} {_OTHER}: it is not text") from None
    except RecursionError:
        raise ValueError(f"{path} {_OTHER}: it is nested too deeply") from None
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{path} {_OTHER}: it has no list of events (traceEvents)")
    return events


def busy_seconds(spans: Iterable[TimeSpan], track: str) -> float:
    """Return the time in which a track was busy with any of these spans."""
    busy = merged((span.start, span.end) for span in spans if span.track == track)
    return sum(end - start for start, end in busy)


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals, sorted and disjoint."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def without(
    intervals: Iterable[tuple[float, float]], taken: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Yield the parts of intervals outside of others, which are sorted and disjoint."""
    for start, end in intervals:
        left = start
        for index in range(bisect.bisect_right(taken, start, key=itemgetter(1)), len(taken)):
            other_start, other_end = taken[index]
            if other_start >= end:
                break
            if other_start > left:
                yield left, other_start
            left = other_end
        if left < end:
            yield left, end


# -- spans ----------------------------------------------------------------------------------------


def _spans(events: Sequence[Mapping[str, Any]]) -> Iterator[TimeSpan]:
    """Yield computation and communication: of a plan, of the GPU if it has any, or of the CPU."""
    planned = [event for event in events if event.get("cat") == "fsdp"]
    if planned:
        for event in planned:
            yield _span(event, event["args"]["track"], event["args"]["unit"])
        return
    running, issued = _running_units(events), _phases(events, ("unshard", "reduce_grad"))
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        launched = {
            e["args"]["correlation"]: e["ts"]
            for e in events
            if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e["args"]
        }
        for event in kernels:
            at = launched.get(event.get("args", {}).get("correlation"), event["ts"])
            is_collective = "nccl" in event["name"].lower()
            units = issued if is_collective else running
            yield _span(event, _kind(event["name"]) if is_collective else COMPUTE, units.at(at))
        return
    collectives = [
        e
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(_COLLECTIVES)
    ]
    calls: dict[str, deque[float]] = defaultdict(deque)
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"].startswith("c10d::"):
            calls[_kind(event["name"])].append(event["ts"])
    gathered = _phases(events, ("unshard",))
    for event in collectives:
        kind = _kind(event["name"])
        # A worker thread runs collectives in the order in which the host issued them.
        at = calls[kind].popleft() if calls[kind] else event["ts"]
        # With gloo, a large gather is a broadcast of every rank.
        is_gather = event["name"].endswith(":broadcast") and gathered.at(at) != NO_UNIT
        yield _span(event, GATHER if is_gather else kind, issued.at(at))
    ends: dict[Any, float] = defaultdict(float)
    for event in events:
        if event.get("cat") != "cpu_op" or event["name"].startswith("c10d::"):
            continue
        # Operators inside others are part of them.
        if event["ts"] >= ends[event["tid"]]:
            ends[event["tid"]] = event["ts"] + event["dur"]
            yield _span(event, COMPUTE, running.at(event["ts"]))


def _span(event: Mapping[str, Any], track: str, unit: str) -> TimeSpan:
    start = event["ts"] / 1e6
    return TimeSpan(track, unit, event["name"], start, start + event["dur"] / 1e6)


def _kind(name: str) -> str:
    """Return the track of a collective by its name in the trace."""
    plain = name.lower().replace("_", "").removeprefix("c10d::")
    if "allgather" in plain:
        return GATHER
    # With gloo, a reduce-scatter is an all-to-all and a sum.
    if any(part in plain for part in ("reducescatter", "allreduce", "alltoall")):
        return REDUCE
    return OTHER


def _exposed(spans: Sequence[TimeSpan]) -> list[TimeSpan]:
    busy = merged((span.start, span.end) for span in spans if span.track == COMPUTE)
    return [
        TimeSpan(EXPOSED, span.unit, "", start, end)
        for span in spans
        if span.track in (GATHER, REDUCE, OTHER)
        for start, end in without([(span.start, span.end)], busy)
    ]


class _Units:
    """Which unit was current on the host, from one time to the next."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._names: list[str] = []

    def note(self, time: float, name: str) -> None:
        self._times.append(time)
        self._names.append(name)

    def at(self, time: float) -> str:
        index = bisect.bisect_right(self._times, time) - 1
        return self._names[index] if index >= 0 else NO_UNIT


def _ranges(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str, float, float]]:
    """Yield phase, unit, beginning and end of the ranges of `profile_ranges`, in order."""
    for event in events:
        if event["name"].startswith(_RANGE) and event.get("cat") == "user_annotation":
            phase, _, unit = event["name"].removeprefix(_RANGE).partition(" ")
            yield phase, unit, event["ts"], event["ts"] + event["dur"]


def _running_units(events: Iterable[Mapping[str, Any]]) -> _Units:
    """Return the units whose forwards and backwards ran, the innermost ones."""
    changes = []
    for phase, unit, start, end in _ranges(events):
        if phase in _BEGINS:
            changes.append((end, True, (unit, _BEGINS[phase])))
        elif phase in _ENDS:
            changes.append((start, False, (unit, _ENDS[phase])))
    units, current = _Units(), list[tuple[str, str]]()
    for time, begins, use in sorted(changes):
        if begins:
            current.append(use)
        elif use in current:
            current.remove(use)
        units.note(time, current[-1][0] if current else NO_UNIT)
    return units


def _phases(events: Iterable[Mapping[str, Any]], phases: Sequence[str]) -> _Units:
    """Return the units of these phases."""
    changes: list[tuple[float, int, str]] = []
    for phase, unit, start, end in _ranges(events):
        if phase in phases:
            changes += [(start, 1, unit), (end, 0, NO_UNIT)]
    units = _Units()
    for time, _, unit in sorted(changes):
        units.note(time, unit)
    return units


def _memory(events: Iterable[Mapping[str, Any]]) -> list[tuple[float, int]]:
    """Return seconds and live bytes of the GPU, or of the CPU if there is none."""
    by_device: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for event in events:
        if event.get("name") == "[memory]" and "Total Allocated" in event.get("args", {}):
            args = event["args"]
            point = event["ts"] / 1e6, int(args["Total Allocated"])
            by_device[int(args.get("Device Type", 0))].append(point)
    return sorted(by_device[max(by_device)]) if by_device else []
