"""A cluster in one process: one rank of many, in virtual time and without memory."""

from megatron_fsdp_v2.diagnostics.simulation.costs import Costs, RooflineCosts
from megatron_fsdp_v2.diagnostics.simulation.devices import (
    HostDevice,
    SleepingGpu,
    VirtualStreams,
)
from megatron_fsdp_v2.diagnostics.simulation.network import (
    AlphaBeta,
    MachineNetwork,
    MeasuredNetwork,
    Network,
)
from megatron_fsdp_v2.diagnostics.simulation.operations import LiveBytes, Operations
from megatron_fsdp_v2.diagnostics.simulation.process_group import (
    simulated_groups,
    simulated_ranks,
)
from megatron_fsdp_v2.diagnostics.simulation.streams import run_on_streams
from megatron_fsdp_v2.diagnostics.simulation.timeline import Queue, RunningTimeline, Timeline

__all__ = [
    "AlphaBeta",
    "Costs",
    "HostDevice",
    "LiveBytes",
    "MachineNetwork",
    "MeasuredNetwork",
    "Network",
    "Operations",
    "Queue",
    "RooflineCosts",
    "RunningTimeline",
    "SleepingGpu",
    "Timeline",
    "VirtualStreams",
    "run_on_streams",
    "simulated_groups",
    "simulated_ranks",
]
