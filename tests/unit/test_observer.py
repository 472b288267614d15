"""Observers pass events to their subscribers, and make none without them."""

from __future__ import annotations

import pytest
import torch

from megatron_fsdp_v2.memory.allocator import BufferUse, ResizedBuffer
from megatron_fsdp_v2.memory.observer import (
    BufferAcquired,
    BufferReleasing,
    Event,
    Observer,
    PhaseBegan,
    PhaseEnded,
)

CPU = torch.device("cpu")


def test_a_buffer_tells_once_that_it_gains_and_loses_memory() -> None:
    observer, seen = Observer(), list[tuple[Event, int]]()
    buffer = ResizedBuffer("a/0/full", BufferUse.GRADIENT, 8, torch.float32, CPU)
    observer.acquire(buffer)
    observer.release(buffer)
    observer.subscribe(lambda event: seen.append((event, buffer.tensor.untyped_storage().nbytes())))
    for _ in range(2):
        assert observer.acquire(buffer) is buffer.tensor
    for _ in range(2):
        observer.release(buffer)
    # It has its memory in both: it was given it just now, and is about to lose it.
    assert seen == [(BufferAcquired(buffer), 32), (BufferReleasing(buffer), 32)]
    assert buffer.tensor.untyped_storage().nbytes() == 0


def test_a_phase_ends_for_every_subscriber_also_when_an_exception_ends_it() -> None:
    observer, first, second = Observer(), list[Event](), list[Event]()
    observer.subscribe(first.append)
    observer.subscribe(second.append)
    with pytest.raises(KeyError), observer.phase("layers.0", "reshard"):
        raise KeyError
    assert first == [PhaseBegan("layers.0", "reshard"), PhaseEnded("layers.0", "reshard")]
    assert second == first
    observer.unsubscribe(first.append)
    with observer.phase("", "pre_forward"):
        pass
    assert (len(first), len(second)) == (2, 4)


def test_without_subscribers_a_phase_costs_no_context_of_its_own() -> None:
    observer = Observer()
    assert observer.phase("a", "reshard") is observer.phase("b", "unshard")
    observer.subscribe(lambda event: None)
    assert observer.phase("a", "reshard") is not observer.phase("a", "reshard")
