"""What torch's own allocator hands out, seen by the profiler."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_nbytes(call: Callable[[], None]) -> int:
    """Most bytes that are allocated at a time during a call, above what was there before."""
    level = peak = 0
    for nbytes in changes(call):
        level += nbytes
        peak = max(peak, level)
    return peak


def changes(call: Callable[[], None]) -> list[int]:
    """Bytes that are allocated during a call, and with a minus freed, in order."""
    # Garbage of earlier models, freed in the middle, would be taken for memory of this call.
    gc.collect()
    gc.disable()
    try:
        options: dict[str, Any] = {"activities": [ProfilerActivity.CPU], "profile_memory": True}
        with profile(acc_events=True, **options) as record:
            call()
    finally:
        gc.enable()
    results = record.profiler.kineto_results  # type: ignore[union-attr]
    events = [e for e in results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]
