"""Memory that torch's allocator allocates, from the profiler; and buffers that outlive a model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from megatron_fsdp_v2.params.group import ParameterGroup, WeightSource
from megatron_fsdp_v2.runtime.module import named_units


def steady_nbytes(group: ParameterGroup) -> int:
    """Bytes of a group's main and model weights; a shared storage is counted once."""
    kept = group.payloads if group.source is WeightSource.MODEL else ()
    return group.main_weight.nbytes + sum(payload.model.nbytes for payload in kept)


def peak_nbytes(call: Callable[[], None]) -> int:
    """Peak of the bytes allocated during a call, relative to its start."""
    level = peak = 0
    for nbytes in allocation_sizes(call):
        level += nbytes
        peak = max(peak, level)
    return peak


def allocation_sizes(call: Callable[[], None]) -> list[int]:
    """Bytes of each allocation during a call, in order; frees are negative."""
    # A garbage collection during the call would free memory of earlier models.
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


def count_live_buffers(train: Callable[[], list[Any]]) -> tuple[int, Any]:
    """Count the flat buffers that outlive a sharded model without a garbage collection.

    Args:
        train: Returns the model, an object that may keep it alive, and objects to drop with it.

    Returns:
        The count, and the object that may keep the model alive.
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
