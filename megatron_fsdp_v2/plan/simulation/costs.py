"""Times of collectives: latency and bandwidth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_fsdp_v2.plan.machine import Machine

__all__ = ["MachineNetwork", "Network"]


class Network(Protocol):
    """The network between ranks."""

    def seconds(self, kind: str, nbytes: int, ranks: Sequence[int]) -> float:
        """Seconds of a collective on an otherwise idle network.

        Args:
            kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast` or
                `barrier`.
            nbytes: Bytes of the full buffer; of an all-to-all, bytes that the rank sends.
            ranks: Global ranks that take part.
        """
        ...

    def link(self, ranks: Sequence[int]) -> str:
        """Name of the link of collectives among these ranks, which take turns on it."""
        ...


@dataclass(frozen=True, slots=True)
class MachineNetwork:
    """The network of a `Machine`: a fast link in a node, an adapter of each GPU between nodes.

    Attributes:
        machine: Has the times of collectives.
    """

    machine: Machine

    def seconds(self, kind: str, nbytes: int, ranks: Sequence[int]) -> float:
        """See `Network.seconds`."""
        size, stride = _size_and_stride(ranks)
        known = kind if kind in ("all_gather", "reduce_scatter", "all_reduce") else "all_to_all"
        return self.machine.collective_seconds(known, nbytes, size, stride)

    def link(self, ranks: Sequence[int]) -> str:
        """See `Network.link`."""
        return self.link_of(*_size_and_stride(ranks))

    def link_of(self, size: int, stride: int) -> str:
        """Name of the link of `size` ranks, neighbors of which are `stride` apart."""
        return "network" if self.machine.crosses_nodes(size, stride) else "node"


def _size_and_stride(ranks: Sequence[int]) -> tuple[int, int]:
    size = len(ranks)
    return size, (math.ceil((ranks[-1] - ranks[0]) / (size - 1)) if size > 1 else 1)
