"""Whether every use of a buffer is ordered after what it depends on, without a GPU.

The scheduling code that runs on CUDA runs here on recorded streams: a step on the CPU leaves a
schedule of operations, events, waits, allocations and frees, and a checker looks for pairs of
operations on one buffer that no wait orders.
"""

from megatron_fsdp_v2.diagnostics.stream_safety.checker import Fault, Violation, find_violations
from megatron_fsdp_v2.diagnostics.stream_safety.recording import Recording, record_streams
from megatron_fsdp_v2.diagnostics.stream_safety.schedule import Buffer, Region, Schedule

__all__ = [
    "Buffer",
    "Fault",
    "Recording",
    "Region",
    "Schedule",
    "Violation",
    "find_violations",
    "record_streams",
]
