"""Temporary buffers: memory only while they live; in the traced pool, where, and what stays."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fsdp_v2 import TracePoolAllocator
from megatron_fsdp_v2.memory.allocator import (
    Allocator,
    BufferUse,
    PlainAllocator,
    TemporaryBuffer,
    alias_of,
)
from tests.distributed.allocations import changes

CPU = torch.device("cpu")


def _buffer(pool: Allocator, name: str, numel: int = 256) -> TemporaryBuffer:
    return pool.buffer(name, BufferUse.GATHERED, numel, torch.float32, CPU)


@pytest.mark.parametrize("kind", [PlainAllocator, TracePoolAllocator])
def test_a_buffer_and_its_views_have_no_memory_before_the_first_use(kind: type) -> None:
    made = []

    def make() -> None:
        made.append(_buffer(kind(), "weights", 1 << 20))
        made.append(made[0].alias(1 << 10, (1 << 9, 1 << 10)))

    assert max(changes(make), default=0) < 1 << 10
    buffer, view = made
    assert changes(buffer.acquire) == [4 << 20]
    buffer.tensor.copy_(torch.arange(1 << 20))
    assert view[1, 2] == 2050


def test_buffers_of_fake_tensors_come_and_go() -> None:
    with FakeTensorMode():
        buffer = _buffer(PlainAllocator(), "weights", 12)
        view = buffer.alias(4, (2, 3))
        assert (view.storage_offset(), view.untyped_storage().nbytes()) == (4, 0)
        buffer.acquire()
        assert view.untyped_storage().nbytes() == 48


def test_a_view_of_a_released_buffer_gives_it_no_memory() -> None:
    buffer = _buffer(PlainAllocator(), "weights", 12)
    view = alias_of(buffer.tensor, 4, (2, 3))
    assert buffer.tensor.untyped_storage().nbytes() == 0
    buffer.acquire().copy_(torch.arange(12.0))
    assert view.tolist() == [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
    buffer.release()
    assert view.untyped_storage().nbytes() == 0


def _pass(pool: TracePoolAllocator, *buffers: TemporaryBuffer) -> list[int]:
    """One after the other is live; their addresses."""
    pool.begin_pass("pass", no_pending_backward=True)
    places = []
    for buffer in buffers:
        places.append(buffer.acquire().data_ptr())
        buffer.release()
    pool.end_pass("", no_pending_backward=True)
    return places


def _planned(pool: TracePoolAllocator, *buffers: TemporaryBuffer) -> list[int]:
    """Addresses after a pattern came twice."""
    return [_pass(pool, *buffers) for _ in range(3)][-1]


def test_buffers_that_never_live_together_get_the_same_address_every_time() -> None:
    pool = TracePoolAllocator()
    first, second = _buffer(pool, "first"), _buffer(pool, "second", 100)
    place = _planned(pool, first, second)
    allocations = pool.num_allocations
    assert place[0] == place[1]
    assert _pass(pool, second, first, first) == [place[0]] * 3
    assert pool.num_allocations == allocations == 5
    assert pool.peak_nbytes == 1024


def test_what_autograd_saved_is_found_where_the_buffer_moved_to() -> None:
    pool = TracePoolAllocator()
    buffer = _buffer(pool, "weights", 4)
    view = buffer.alias(0, (4,))
    param = torch.nn.Parameter(view)
    buffer.follow(param)
    x = torch.ones(4, requires_grad=True)
    buffer.acquire().fill_(2.0)
    # Autograd saves the parameter itself, which moves along.
    product = (param * x).sum()
    before = param.data_ptr()
    buffer.release()
    _planned(pool, buffer)
    buffer.acquire().fill_(3.0)
    assert param.data_ptr() == view.data_ptr() == buffer.tensor.data_ptr() != before
    product.backward()
    assert x.grad is not None and x.grad.tolist() == [3.0] * 4


def test_a_buffer_stays_where_autograd_holds_a_view() -> None:
    pool = TracePoolAllocator()
    buffer = _buffer(pool, "weights", 4)
    param = torch.nn.Parameter(buffer.alias(0, (2, 2)))
    buffer.follow(param)
    x = torch.ones(1, 2, requires_grad=True)
    buffer.acquire().fill_(2.0)
    output = torch.nn.functional.linear(x, param).sum()
    buffer.release()
    places = _planned(pool, buffer)
    assert buffer.pool_memory is None
    assert pool.reports()[0].beside == ("weights",)
    buffer.acquire().fill_(5.0)
    output.backward()
    buffer.release()
    assert x.grad is not None and x.grad.tolist() == [[10.0, 10.0]]
    assert _pass(pool, buffer) != places
    assert buffer.pool_memory is not None


def test_a_buffer_larger_than_the_pool_runs_beside_it_and_is_in_the_next_plan() -> None:
    pool = TracePoolAllocator()
    small = _buffer(pool, "small", 16)
    _planned(pool, small)
    large = _buffer(pool, "large", 4096)
    _pass(pool, small, large)
    assert small.pool_memory is not None and large.pool_memory is None
    _planned(pool, small, large)
    assert large.pool_memory is small.pool_memory is not None
    assert large.pool_memory.numel() == 4096 * 4


def test_a_buffer_whose_place_is_taken_gets_other_memory_and_keeps_its_content() -> None:
    pool = TracePoolAllocator()
    first, second = _buffer(pool, "first"), _buffer(pool, "second")
    _planned(pool, first, second)
    first.acquire().fill_(1.0)
    assert not second.has_room()
    second.acquire().fill_(2.0)
    assert first.tensor.eq(1.0).all() and second.tensor.eq(2.0).all()
    assert second.pool_memory is None
    first.release()
    second.release()
    # The collision was traced: from the next plan on both have a place.
    _planned(pool, first, second)
    first.acquire()
    assert second.has_room()
    assert second.acquire().data_ptr() != first.tensor.data_ptr()
    assert second.pool_memory is first.pool_memory is not None


def test_two_buffers_held_in_the_same_bytes_cannot_both_be_live() -> None:
    pool = TracePoolAllocator()
    buffers = [_buffer(pool, "first"), _buffer(pool, "second")]
    _planned(pool, *buffers)
    held = []
    for buffer in buffers:
        held.append(buffer.acquire()[:4])
        buffer.release()
    buffers[0].acquire()
    with pytest.raises(RuntimeError, match=r"second has to come back .* first is there now"):
        buffers[1].acquire()
    assert not buffers[1].is_live
    del held
    buffers[0].release()
    pool.end_pass("", no_pending_backward=True)
    # What failed is part of the plan that was made at once.
    assert buffers[0].acquire().data_ptr() != buffers[1].acquire().data_ptr()
    assert buffers[1].pool_memory is buffers[0].pool_memory is not None


def test_a_live_buffer_cannot_be_merged() -> None:
    root, unit = TracePoolAllocator(), TracePoolAllocator()
    buffer = _buffer(unit, "weights")
    buffer.acquire()
    with pytest.raises(RuntimeError, match=r"weights is gathered; call reshard\(\)"):
        root.merge(unit)
    buffer.release()
    root.merge(unit)
    root.merge(unit)
    late = _buffer(unit, "late")
    assert root.reports()[0].names == ("weights", "late")
    assert _planned(root, buffer, late)[0] == late.tensor.data_ptr()


def test_units_that_run_without_their_root_leave_no_endless_trace() -> None:
    pool = TracePoolAllocator()
    buffer = _buffer(pool, "weights", 1)
    for _ in range(40_000):
        buffer.acquire()
        buffer.release()
    (report,) = pool.reports()
    assert [len(program.trace.events) for program in report.programs] == [1 << 16]
