"""Measured parts of a simulated cluster: a network, and a host that runs in real time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import override

from megatron_fsdp_v2.plan.simulation import Timeline

__all__ = ["AlphaBeta", "MeasuredNetwork", "RunningTimeline"]


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """A collective's time as `seconds + nbytes * seconds_per_byte`.

    Attributes:
        seconds: Time of an empty collective.
        seconds_per_byte: Additional time per byte of its full buffer.
    """

    seconds: float
    seconds_per_byte: float

    @classmethod
    def fitted(cls, measured: Mapping[int, float]) -> AlphaBeta:
        """Fit a line to measured times with minimal relative errors.

        Args:
            measured: Seconds by bytes, for at least two sizes.

        Raises:
            ValueError: There are fewer than two sizes.
        """
        if len(measured) < 2:
            raise ValueError(f"a line needs two sizes at least, got {sorted(measured)}")
        weights = {nbytes: 1 / seconds**2 for nbytes, seconds in measured.items()}
        total = sum(weights.values())
        mean_x = sum(weights[x] * x for x in measured) / total
        mean_y = sum(weights[x] * y for x, y in measured.items()) / total
        covariance = sum(weights[x] * (x - mean_x) * (y - mean_y) for x, y in measured.items())
        variance = sum(weights[x] * (x - mean_x) ** 2 for x in measured)
        slope = max(covariance / variance, 0.0)
        return cls(max(mean_y - slope * mean_x, 0.0), slope)


@dataclass(frozen=True)
class MeasuredNetwork:
    """A network whose collectives were measured.

    Attributes:
        kinds: Times by kind of collective; an unmeasured kind uses the slowest one.
    """

    kinds: Mapping[str, AlphaBeta]

    def seconds(self, kind: str, nbytes: int, ranks: Sequence[int]) -> float:
        """See `Network.seconds`."""
        if len(ranks) == 1:
            return 0.0
        chosen = [self.kinds[kind]] if kind in self.kinds else self.kinds.values()
        return max(line.seconds + nbytes * line.seconds_per_byte for line in chosen)

    def link(self, ranks: Sequence[int]) -> str:
        """See `Network.link`."""
        del ranks
        return "link"


class RunningTimeline(Timeline):
    """A timeline whose host runs in the real time of this process.

    Args:
        sleeps: Whether waits sleep in real time, so that other processes can run. Otherwise waits
            take no real time.
    """

    def __init__(self, *, sleeps: bool = False) -> None:
        super().__init__()
        self._sleeps = sleeps
        self._began = time.perf_counter()

    @property
    @override
    def now(self) -> float:
        return time.perf_counter() - self._began + self._now

    @override
    def wait(self, until: float) -> None:
        left = max(until - self.now, 0.0)
        if self._sleeps:
            time.sleep(left)
        else:
            self._now += left
