"""How long collectives take: a latency and a bandwidth for the ranks that take part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_fsdp_v2.plan.machine import Machine

__all__ = ["MachineNetwork", "Network"]


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


def _size_and_stride(ranks: Sequence[int]) -> tuple[int, int]:
    size = len(ranks)
    return size, (math.ceil((ranks[-1] - ranks[0]) / (size - 1)) if size > 1 else 1)
