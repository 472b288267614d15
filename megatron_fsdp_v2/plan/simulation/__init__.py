"""A simulated cluster in one process: one rank of many, in virtual time, without memory."""

from megatron_fsdp_v2.plan.simulation.devices import (
    Device,
    HostDevice,
    Queue,
    Timeline,
    VirtualStreams,
    run_on_streams,
)
from megatron_fsdp_v2.plan.simulation.process_group import (
    Network,
    simulated_groups,
    simulated_ranks,
)

__all__ = [
    "Device",
    "HostDevice",
    "Network",
    "Queue",
    "Timeline",
    "VirtualStreams",
    "run_on_streams",
    "simulated_groups",
    "simulated_ranks",
]
