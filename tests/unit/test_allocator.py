"""Temporary buffers: memory only between acquire and release."""

from __future__ import annotations

import torch

from megatron_fsdp_v2.memory.allocator import BufferUse, PlainAllocator, alias_of


def test_a_view_of_a_released_buffer_gives_it_no_memory() -> None:
    buffer = PlainAllocator().buffer(
        "weights", BufferUse.GATHERED, 12, torch.float32, torch.device("cpu")
    )
    view = alias_of(buffer.tensor, 4, (2, 3))
    assert buffer.tensor.untyped_storage().nbytes() == 0
    buffer.acquire().copy_(torch.arange(12.0))
    assert view.tolist() == [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
    buffer.release()
    assert view.untyped_storage().nbytes() == 0
