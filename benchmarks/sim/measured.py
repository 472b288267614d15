"""Parts of a simulated cluster that are measured: a network, and a host that runs in real time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import override

from megatron_fsdp_v2.diagnostics.simulation import Timeline

__all__ = ["AlphaBeta", "MeasuredNetwork", "RunningTimeline"]


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """A collective's time as `seconds + nbytes * seconds_per_byte`.

    Attributes:
        seconds: Of an empty one.
        seconds_per_byte: Of its full buffer.
    """

    seconds: float
    seconds_per_byte: float

    @classmethod
    def fitted(cls, measured: Mapping[int, float]) -> AlphaBeta:
        """The line through measured times, each weighted by its inverse: relative errors count.

        Args:
            measured: Seconds by bytes, of two sizes at least.

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
        kinds: By kind of collective; of one that is not there, the slowest of all is taken.
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
    """A timeline whose host takes the time that this process takes.

    Args:
        sleeps: Whether it sleeps where it waits, so that others of the machine work meanwhile.
            Otherwise waiting takes no time in fact.
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
