"""What torch's own allocator hands out, seen by the profiler; and what outlives a model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from megatron_fsdp_v2.params.group import ParameterGroup
from megatron_fsdp_v2.runtime.module import named_units


def steady_nbytes(group: ParameterGroup) -> int:
    """Bytes of a group's main and model weights; where these are one storage, counted once."""
    return group.main_weight.nbytes + (
        0 if group.shares_main else sum(payload.model.nbytes for payload in group.payloads)
    )


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


def left_of(train: Callable[[], list[Any]]) -> tuple[int, Any]:
    """How many flat buffers outlive a sharded model, without a garbage collection.

    Args:
        train: Returns the model and something that may keep it alive, and what is dropped as well.

    Returns:
        The number, and what may keep the model alive.
    """
    gc.collect()
    gc.disable()
    try:
        model, keeps, *rest = train()
        alive = []
        for _, unit in named_units(model):
            for group in unit.groups:
                for buffer in (group.main_weight, group.main_grad, group.gathered_weight):
                    if buffer is not None:
                        alive.append(weakref.ref(buffer.tensor))
        del _, unit, group, buffer, rest, model
        return sum(ref() is not None for ref in alive), keeps
    finally:
        gc.enable()
