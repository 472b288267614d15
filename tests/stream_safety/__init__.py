"""Checks the synchronization of streams without a GPU.

The scheduling code for CUDA runs on recorded streams: a step on the CPU records a schedule of
operations, events, waits, allocations and frees, and a checker finds pairs of operations on one
buffer that no wait orders.
"""

from tests.stream_safety.checker import Fault, Violation, find_violations
from tests.stream_safety.recording import Recording, record_streams
from tests.stream_safety.schedule import Buffer, Schedule

__all__ = [
    "Buffer",
    "Fault",
    "Recording",
    "Schedule",
    "Violation",
    "find_violations",
    "record_streams",
]
