"""Exposed communication of a planned step as text and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_fsdp_v2._text import compact, table
from megatron_fsdp_v2.plan.exposure import Exposure, OverlapReport


def overlap_lines(report: OverlapReport, most: int = 12) -> Iterator[str]:
    """Format exposed communication as text: seconds by reason, and the longest waits.

    Args:
        report: The exposed communication.
        most: Number of waits to show.
    """
    total = sum(each.times for each in report.exposures)
    part = f" of {_milliseconds(report.seconds)}" if report.seconds else ""
    exposed = [each for each in report.exposures if each.reason is not None]
    waited = sum(each.times for each in exposed)
    yield (
        f"{_milliseconds(report.exposed_seconds)}{part} exposed: {waited} of {total} collectives "
        "were waited for"
    )
    if not exposed:
        return
    yield ""
    rows = [("reason", "collectives", "exposed", "part")]
    for reason, seconds in report.by_reason.items():
        count = sum(each.times for each in exposed if each.reason is reason)
        share = f"{seconds / report.exposed_seconds:.0%}"
        rows.append((reason.value, str(count), _milliseconds(seconds), share))
    yield from table(rows)
    yield ""
    yield from (f"{reason.value}: {reason.meaning}" for reason in report.by_reason)
    yield ""
    yield from _longest(exposed, most)


def _longest(exposed: Sequence[Exposure], most: int) -> Iterator[str]:
    head = ("unit", "collective", "for", "axis", "bytes", "issued at", "waited at")
    rows = [(*head, "exposed", "times", "reason")]
    longest = sorted(exposed, key=lambda each: -each.seconds * each.times)[:most]
    for each in sorted(longest, key=lambda each: each.issued_at):
        rows.append(
            (
                each.unit or "(root)",
                each.kind,
                each.purpose,
                each.axis,
                compact(each.nbytes, 1024),
                _milliseconds(each.issued_at),
                _milliseconds(each.waited_at),
                _milliseconds(each.seconds),
                str(each.times),
                each.reason.value if each.reason else "",
            )
        )
    if len(exposed) > most:
        yield f"The {most} that were exposed longest, of {len(exposed)}:"
    yield from table(rows, left=(0, 1, 2, 3, 9))


def overlap_as_dict(report: OverlapReport) -> dict[str, Any]:
    """Return exposed communication as plain data, for JSON: bytes and seconds."""
    return {
        "seconds": report.seconds,
        "exposed": report.exposed_seconds,
        "by_reason": {reason.value: seconds for reason, seconds in report.by_reason.items()},
        "collectives": [
            dataclasses.asdict(each) | {"reason": each.reason and each.reason.value}
            for each in report.exposures
        ],
    }


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
