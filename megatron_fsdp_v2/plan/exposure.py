"""Exposed communication of a planned step: the wait for each collective, and its reason."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from megatron_fsdp_v2._text import compact, table


class Reason(enum.Enum):
    """Reason for which a step waits for a collective. Reports show the value.

    Attributes:
        meaning: Explanation of the reason, and the option that changes it, as a sentence.
    """

    FIRST = (
        "first of a pass",
        "a forward or a backward begins with it, so no computation can hide it",
    )
    COMPUTE = (
        "longer than computation",
        "it takes longer than the computation it overlaps, or its link was busy",
    )
    LIMIT = (
        "limit of what is ahead",
        "the link was idle before it was issued: unshard_prefetch_depth or unshard_prefetch_bytes "
        "did not allow it to start earlier",
    )
    ORDER = "not expected", "the unit was not expected: the previous pass ran other units"
    AT_ONCE = "waited for at once", "overlap is off, or the next operation reads its result"
    BUFFERS = (
        "gradient buffers",
        "another unit needed a full gradient buffer: see max_live_grad_buffers",
    )
    LAST = "end of the backward", "the backward is over, and no computation is left to hide it"

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        """Make a member of its value and its meaning."""
        member = object.__new__(cls)
        member._value_, member.meaning = value, meaning
        return member


@dataclass(frozen=True, slots=True)
class Exposure:
    """The wait of a step for a collective.

    Attributes:
        unit: Name of the unit whose weights or gradients it moves; empty for the root.
        kind: `all_gather`, `reduce_scatter` or `all_reduce`.
        purpose: `unshard`, `refresh` or `reduce`.
        axis: `inner` or `outer`.
        nbytes: Bytes of the full buffer.
        issued_at: Time of the issue, in seconds since the beginning of the step.
        waited_at: Time at which the wait began, in seconds since the beginning of the step.
        seconds: Length of the wait: the exposed time of the collective.
        reason: Reason of the wait; None if the collective was fully overlapped.
        times: Number of micro-batches that the event represents.
    """

    unit: str
    kind: str
    purpose: str
    axis: str
    nbytes: int
    issued_at: float
    waited_at: float
    seconds: float
    reason: Reason | None
    times: int = 1


@dataclass(frozen=True)
class OverlapReport:
    """Exposed communication of a step.

    Attributes:
        exposures: Every collective that the step waited for, in the order of issue.
        seconds: Time of the step; 0 if unknown.
    """

    exposures: Sequence[Exposure]
    seconds: float = 0.0

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which computation waits for communication."""
        return sum(each.seconds * each.times for each in self.exposures)

    @property
    def by_reason(self) -> dict[Reason, float]:
        """Exposed seconds by reason, largest first; without reasons that did not occur."""
        found: dict[Reason, float] = {}
        for each in self.exposures:
            if each.reason is not None:
                found[each.reason] = found.get(each.reason, 0.0) + each.seconds * each.times
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def lines(self, most: int = 12) -> Iterator[str]:
        """The report as text: seconds by reason, and the longest waits.

        Args:
            most: Number of waits to show.
        """
        total = sum(each.times for each in self.exposures)
        part = f" of {_milliseconds(self.seconds)}" if self.seconds else ""
        exposed = [each for each in self.exposures if each.reason is not None]
        waited = sum(each.times for each in exposed)
        yield (
            f"{_milliseconds(self.exposed_seconds)}{part} exposed: {waited} of {total} collectives "
            "were waited for"
        )
        if not exposed:
            return
        yield ""
        rows = [("reason", "collectives", "exposed", "part")]
        for reason, seconds in self.by_reason.items():
            count = sum(each.times for each in exposed if each.reason is reason)
            share = f"{seconds / self.exposed_seconds:.0%}"
            rows.append((reason.value, str(count), _milliseconds(seconds), share))
        yield from table(rows)
        yield ""
        yield from (f"{reason.value}: {reason.meaning}" for reason in self.by_reason)
        yield ""
        yield from self._longest(exposed, most)

    def _longest(self, exposed: Sequence[Exposure], most: int) -> Iterator[str]:
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

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON: bytes and seconds."""
        return {
            "seconds": self.seconds,
            "exposed": self.exposed_seconds,
            "by_reason": {reason.value: seconds for reason, seconds in self.by_reason.items()},
            "collectives": [
                dataclasses.asdict(each) | {"reason": each.reason and each.reason.value}
                for each in self.exposures
            ],
        }


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
