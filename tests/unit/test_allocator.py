"""Temporary buffers: memory only between acquire and release."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fsdp_v2.memory.allocator import (
    Allocator,
    BufferUse,
    PlainAllocator,
    TemporaryBuffer,
    alias_of,
)
from megatron_fsdp_v2.memory.trace_pool import TracePoolAllocator
from tests.distributed.allocations import changes


def _buffer(allocator: Allocator, numel: int) -> TemporaryBuffer:
    cpu = torch.device("cpu")
    return allocator.buffer("weights", BufferUse.GATHERED, numel, torch.float32, cpu)


@pytest.mark.parametrize("kind", [PlainAllocator, TracePoolAllocator])
def test_a_buffer_and_its_views_have_no_memory_before_the_first_use(kind: type) -> None:
    made = []

    def make() -> None:
        made.append(_buffer(kind(), 1 << 20))
        made.append(made[0].alias(1 << 10, (1 << 9, 1 << 10)))

    assert max(changes(make), default=0) < 1 << 10
    buffer, view = made
    assert changes(buffer.acquire) == [4 << 20]
    buffer.tensor.copy_(torch.arange(1 << 20))
    assert view[1, 2] == 2050


def test_buffers_of_fake_tensors_come_and_go() -> None:
    with FakeTensorMode():
        buffer = _buffer(PlainAllocator(), 12)
        view = buffer.alias(4, (2, 3))
        assert (view.storage_offset(), view.untyped_storage().nbytes()) == (4, 0)
        buffer.acquire()
        assert view.untyped_storage().nbytes() == 48


def test_a_view_of_a_released_buffer_gives_it_no_memory() -> None:
    buffer = _buffer(PlainAllocator(), 12)
    view = alias_of(buffer.tensor, 4, (2, 3))
    assert buffer.tensor.untyped_storage().nbytes() == 0
    buffer.acquire().copy_(torch.arange(12.0))
    assert view.tolist() == [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
    buffer.release()
    assert view.untyped_storage().nbytes() == 0
