"""Exposed communication of a planned step: the wait for each collective, and its reason."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


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
