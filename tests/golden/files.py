"""Reading, writing and comparing records."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.golden.cases import CASES

FOLDER = Path(__file__).parent
FILES = ("parity", "meshes", "features")
EVERY = "every rank"
"""The key of a value that is the same on all ranks."""

Record = dict[str, Any]


def _path(file: str) -> Path:
    return FOLDER / f"{file}.json"


def read() -> dict[str, Record]:
    """Return the records by name, with references to events resolved."""
    found: dict[str, Record] = {}
    for path in filter(Path.exists, map(_path, FILES)):
        packed = json.loads(path.read_text())
        places = {place: events for place, _, _, events in _places(packed)}
        for _, lists, index, events in _places(packed):
            if isinstance(events, int):
                lists[index] = lists[events]
            elif isinstance(events, str):
                lists[index] = places[events]
        for record in packed.values():
            if isinstance(record["bits"], str):
                record["bits"] = packed[record["bits"]]["bits"]
        found |= packed
    return found


def write(records: Mapping[str, Record]) -> None:
    """Write the records of all cases; equal values are stored once."""
    for file in FILES:
        packed = copy.deepcopy({n: r for n, r in records.items() if CASES[n].file == file})
        known: dict[str, str] = {}
        for place, lists, index, events in _places(packed):
            first = known.setdefault(json.dumps(events), place)
            if events in lists[:index]:
                lists[index] = lists.index(events)
            elif first != place:
                lists[index] = first
        for name, record in packed.items():
            first = known.setdefault(json.dumps(record["bits"]), name)
            if first != name:
                record["bits"] = first
        _path(file).write_text(json.dumps(packed, indent=0) + "\n")


def _places(records: Mapping[str, Record]) -> Iterator[tuple[str, list[Any], int, Any]]:
    """Yield the name, the containing list, the index and the events of each micro-batch."""
    for name, record in records.items():
        for rank, lists in record["events"].items():
            for index, events in enumerate(lists):
                yield f"{name} / {rank} / {index}", lists, index, events


def has_same_kernels(expected: Record, found: Record) -> bool:
    """Return whether the training without sharding has the same bits in both records."""
    return bool(expected["bits"]["plain"] == found["bits"]["plain"])


def difference(expected: Record, found: Record, close: float) -> str:
    """Describe the first difference: of events, else of bytes, else of bits. Empty if none.

    Args:
        expected: The golden record.
        found: The record of a run.
        close: Relative tolerance of losses, for machines with other kernels.
    """
    return (
        _of_events(expected["events"], found["events"])
        or _of_values("bytes", expected["bytes"], found["bytes"])
        or _of_bits(expected, found, close)
    )


def _of_events(expected: Record, found: Record) -> str:
    for rank, lists, others in _by_rank(expected, found):
        for number, (before, now) in enumerate(zip(lists, others, strict=True)):
            # Detects a difference also if one list is a prefix of the other.
            ended = zip([*before, "the end"], [*now, "the end"], strict=False)
            for index, (recorded, event) in enumerate(ended):
                if recorded != event:
                    after = before[index - 1] if index else "the beginning"
                    return (
                        f"events of {rank}, micro-batch {number}, event {index}, after {after!r}: "
                        f"recorded {recorded!r}, found {event!r}"
                    )
    return ""


def _of_values(what: str, expected: Record, found: Record) -> str:
    for key, before, now in _by_rank(expected, found):
        if before != now:
            return f"{what}, {key}: recorded {before}, found {now}"
    return ""


def _by_rank(expected: Record, found: Record) -> Iterator[tuple[str, Any, Any]]:
    """Yield the values of both; by rank, unless both hold one value for all ranks."""
    for key in sorted({*expected, *found} - {EVERY}) or [EVERY]:
        yield key, expected.get(key, expected.get(EVERY)), found.get(key, found.get(EVERY))


def _of_bits(expected: Record, found: Record, close: float) -> str:
    bits, ours = expected["bits"], found["bits"]
    if has_same_kernels(expected, found):
        return _of_values("bits", bits, ours)
    before, now = ([float.fromhex(text) for text in b["losses"].split()] for b in (bits, ours))
    if any(abs(a - b) > close * abs(a) for a, b in zip(before, now, strict=True)):
        return f"losses: recorded {before}, found {now}"
    return ""
