"""A simulated cluster in one process: one rank of many, in virtual time, without memory."""

from megatron_fsdp_v2.diagnostics.simulation.costs import OperationCosts, RooflineCosts
from megatron_fsdp_v2.diagnostics.simulation.devices import HostDevice, VirtualStreams
from megatron_fsdp_v2.diagnostics.simulation.network import MachineNetwork, Network
from megatron_fsdp_v2.diagnostics.simulation.operations import LiveBytes, Operations
from megatron_fsdp_v2.diagnostics.simulation.process_group import (
    simulated_groups,
    simulated_ranks,
)
from megatron_fsdp_v2.diagnostics.simulation.streams import run_on_streams
from megatron_fsdp_v2.diagnostics.simulation.timeline import Queue, Timeline

__all__ = [
    "HostDevice",
    "LiveBytes",
    "MachineNetwork",
    "Network",
    "OperationCosts",
    "Operations",
    "Queue",
    "RooflineCosts",
    "Timeline",
    "VirtualStreams",
    "run_on_streams",
    "simulated_groups",
    "simulated_ranks",
]
