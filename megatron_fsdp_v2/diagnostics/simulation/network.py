"""How long collectives take: a latency and a bandwidth for the ranks that take part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_fsdp_v2.plan.machine import Machine

__all__ = ["AlphaBeta", "MachineNetwork", "MeasuredNetwork", "Network"]


class Network(Protocol):
    """What joins ranks."""

    def seconds(self, kind: str, nbytes: int, ranks: Sequence[int]) -> float:
        """Time of a collective that has its links to itself.

        Args:
            kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast` or
                `barrier`.
            nbytes: Of the full buffer; of an all-to-all, what the rank sends.
            ranks: Global ranks that take part.
        """
        ...

    def link(self, ranks: Sequence[int]) -> str:
        """Name of what collectives among these ranks share; they take turns on it."""
        ...


@dataclass(frozen=True, slots=True)
class MachineNetwork:
    """Nodes of a machine of `plan`: a fast link within a node, an adapter of each GPU beyond it.

    Attributes:
        machine: See there for what a collective takes.
    """

    machine: Machine

    def seconds(self, kind: str, nbytes: int, ranks: Sequence[int]) -> float:
        """See `Network.seconds`."""
        size, stride = _size_and_stride(ranks)
        known = kind if kind in ("all_gather", "reduce_scatter", "all_reduce") else "all_to_all"
        return self.machine.collective_seconds(known, nbytes, size, stride)

    def link(self, ranks: Sequence[int]) -> str:
        """See `Network.link`."""
        return "network" if self.machine.crosses_nodes(*_size_and_stride(ranks)) else "node"


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


def _size_and_stride(ranks: Sequence[int]) -> tuple[int, int]:
    size = len(ranks)
    return size, (math.ceil((ranks[-1] - ranks[0]) / (size - 1)) if size > 1 else 1)
