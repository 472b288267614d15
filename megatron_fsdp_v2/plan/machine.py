"""Machines for which a step is estimated: links, arithmetic and memory of one GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

GB = 1e9
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Machine:
    """Properties of a cluster that determine the time of a step.

    Bandwidths are of one GPU in one direction.

    Attributes:
        name: Name for reports.
        gpus_per_node: GPUs connected by the fast link.
        node_bandwidth: Bytes per second between GPUs of a node.
        network_bandwidth: Bytes per second of a GPU's share of the network between nodes.
        node_latency: Minimum seconds of a step of a collective within a node.
        network_latency: Minimum seconds of a step of a collective between nodes.
        flops: Operations per second of dense 16-bit matrix products, as the vendor states them.
        efficiency: Fraction of `flops` that computation reaches, without communication.
        bandwidth_efficiency: Fraction of a link's bandwidth that a long collective reaches.
        memory_nbytes: Memory of a GPU.
        reserved_nbytes: Memory of a GPU that the driver, NCCL and fragmentation use.
    """

    name: str
    gpus_per_node: int
    node_bandwidth: float
    network_bandwidth: float
    node_latency: float
    network_latency: float
    flops: float
    efficiency: float = 0.5
    bandwidth_efficiency: float = 0.8
    memory_nbytes: int = 80 * GIB
    reserved_nbytes: int = 4 * GIB

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "name":
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            may_be = is_number and (value > 0 or (value == 0 and name in _MAY_BE_ZERO))
            if not may_be or not math.isfinite(value):
                raise ValueError(
                    f"{name} of machine {self.name!r} must be a positive number, got {value!r}"
                )
        for part in ("efficiency", "bandwidth_efficiency"):
            if getattr(self, part) > 1:
                raise ValueError(
                    f"{part} of machine {self.name!r} is a part of 1, got {getattr(self, part)}"
                )

    @property
    def usable_nbytes(self) -> int:
        """Memory that a training can use."""
        return int(self.memory_nbytes - self.reserved_nbytes)

    def link(self, ranks: Sequence[int]) -> str:
        """Name of the link of collectives among these global ranks."""
        return "network" if ranks[-1] - ranks[0] >= self.gpus_per_node else "node"

    def seconds(self, kind: str, nbytes: float, ranks: Sequence[int]) -> float:
        """Return the time of a collective on otherwise idle links.

        A ring moves `(size - 1) / size` of the full buffer over every link; an all-reduce does so
        twice. If several ranks of a node take part, the ring uses the network adapters of all of
        them. Latency grows with the logarithm of the number of ranks, as with trees.

        Args:
            kind: `all_gather`, `reduce_scatter` or `all_reduce`; every other kind takes the time
                of an all-to-all.
            nbytes: Bytes of the full buffer; for an all-to-all, bytes that this rank sends.
            ranks: Global ranks that take part.
        """
        size = len(ranks)
        if size == 1:
            return 0.0
        is_ring = kind in ("all_gather", "reduce_scatter", "all_reduce")
        moved = nbytes * (size - 1) / size if is_ring else nbytes
        rounds = 2 if kind == "all_reduce" else 1
        bandwidth, latency = self.node_bandwidth, self.node_latency
        if self.link(ranks) == "network":
            stride = math.ceil((ranks[-1] - ranks[0]) / (size - 1))
            of_node = min(size, max(1, self.gpus_per_node // stride))
            bandwidth = min(bandwidth, (of_node if is_ring else 1) * self.network_bandwidth)
            latency = self.network_latency
        latency *= math.ceil(math.log2(size))
        return rounds * (moved / (bandwidth * self.bandwidth_efficiency) + latency)

    def compute_seconds(self, flops: float) -> float:
        """Time of a number of operations."""
        return flops / (self.flops * self.efficiency)


_MAY_BE_ZERO = frozenset({"node_latency", "network_latency", "reserved_nbytes"})

# Vendors' data sheets: dense 16-bit tensor operations, NVLink in one direction (half of the stated
# sum of both), memory. H100 SXM5 and H200: 989 TFLOP/s, NVLink 4 with 900 GB/s, 80 GB and 141 GB.
# B200 (DGX B200): 2.25 PFLOP/s, NVLink 5 with 1.8 TB/s, 180 GB. Network of their DGX nodes: one
# ConnectX-7 per GPU, 400 Gb/s InfiniBand. Latencies are of the order that nccl-tests shows for
# the smallest messages, per step of a tree. Measure and override them for other clusters.
PRESETS: dict[str, Machine] = {
    "h100": Machine("h100", 8, 450 * GB, 50 * GB, 3e-6, 8e-6, 989e12, memory_nbytes=80 * GIB),
    "h200": Machine("h200", 8, 450 * GB, 50 * GB, 3e-6, 8e-6, 989e12, memory_nbytes=int(141e9)),
    "b200": Machine("b200", 8, 900 * GB, 50 * GB, 3e-6, 8e-6, 2250e12, memory_nbytes=int(180e9)),
}


def find_machine(text: str) -> Machine:
    """Return a preset by name, or a machine from a JSON file.

    A file has the attributes of `Machine`; with `"like": "<preset>"` it needs only those that
    differ.

    Args:
        text: Name or path.

    Raises:
        ValueError: `text` is neither, or the file does not describe a machine.
    """
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    path = Path(text)
    if path.suffix != ".json" or not path.is_file():
        raise ValueError(
            f"there is no machine {text!r}: choose {', '.join(PRESETS)}, or name a .json file"
        )
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object with the attributes of a machine")
    base: dict[str, Any] = {"name": path.stem}
    like = found.pop("like", None)
    if like is not None:
        if like not in PRESETS:
            raise ValueError(f"{path}: there is no preset {like!r}: choose {', '.join(PRESETS)}")
        base = asdict(PRESETS[like]) | base
    known = {field.name: field.default for field in fields(Machine)}
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ValueError(f"{path} has unknown attributes {', '.join(unknown)}")
    given = base | found
    missing = [name for name in known if name not in given and known[name] is MISSING]
    if missing:
        raise ValueError(
            f'{path} lacks attributes (of {", ".join(missing)}); add them, or "like": "h100"'
        )
    return Machine(**given)
