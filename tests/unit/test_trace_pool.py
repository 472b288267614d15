"""The traced pool: addresses of temporary buffers, merges of pools, and memory plans."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp_v2 import TracePoolAllocator
from megatron_fsdp_v2.memory.address_plan import ALIGNMENT, MemoryPlan, Trace, plan_memory
from megatron_fsdp_v2.memory.allocator import Allocator, BufferUse, TemporaryBuffer

CPU = torch.device("cpu")


def _buffer(pool: Allocator, name: str, numel: int = 256) -> TemporaryBuffer:
    return pool.buffer(name, BufferUse.GATHERED, numel, torch.float32, CPU)


def _pass(pool: TracePoolAllocator, *buffers: TemporaryBuffer) -> list[int]:
    """Run a pass that uses the buffers one after the other; return their addresses."""
    pool.begin_pass("pass", no_pending_backward=True)
    places = []
    for buffer in buffers:
        places.append(buffer.acquire().data_ptr())
        buffer.release()
    pool.end_pass("", no_pending_backward=True)
    return places


def _planned(pool: TracePoolAllocator, *buffers: TemporaryBuffer) -> list[int]:
    """Run a pass three times; return the addresses of the last pass, which is planned."""
    return [_pass(pool, *buffers) for _ in range(3)][-1]


def test_buffer_keeps_its_memory_while_autograd_holds_a_view() -> None:
    pool = TracePoolAllocator()
    buffer = _buffer(pool, "weights", 4)
    param = torch.nn.Parameter(buffer.alias(0, (2, 2)))
    buffer.track_alias(param)
    x = torch.ones(1, 2, requires_grad=True)
    buffer.acquire().fill_(2.0)
    output = torch.nn.functional.linear(x, param).sum()
    buffer.release()
    places = _planned(pool, buffer)
    assert buffer.backing.block is None
    assert pool.reports()[0].outside_pool == ("weights",)
    buffer.acquire().fill_(5.0)
    output.backward()
    buffer.release()
    assert x.grad is not None and x.grad.tolist() == [[10.0, 10.0]]
    assert _pass(pool, buffer) != places
    assert buffer.backing.block is not None


def test_buffer_whose_address_is_in_use_gets_other_memory() -> None:
    pool = TracePoolAllocator()
    first, second = _buffer(pool, "first"), _buffer(pool, "second")
    _planned(pool, first, second)
    first.acquire().fill_(1.0)
    second.acquire().fill_(2.0)
    assert first.tensor.eq(1.0).all() and second.tensor.eq(2.0).all()
    assert second.backing.block is None
    first.release()
    second.release()
    # The overlap was traced: the next plan has an address for both buffers.
    _planned(pool, first, second)
    first.acquire()
    assert second.acquire().data_ptr() != first.tensor.data_ptr()
    assert second.backing.block is first.backing.block is not None


def test_a_live_buffer_cannot_be_merged() -> None:
    root, unit = TracePoolAllocator(), TracePoolAllocator()
    buffer = _buffer(unit, "weights")
    buffer.acquire()
    with pytest.raises(RuntimeError, match=r"weights is in use, or watched"):
        root.check_joins([buffer])
    buffer.release()
    root.check_joins([buffer])
    root.merge(unit)
    root.merge(unit)
    late = _buffer(root, "late")
    assert root.reports()[0].names == ("weights", "late")
    assert _planned(root, buffer, late)[0] == late.tensor.data_ptr()


def test_trace_of_units_without_their_root_is_bounded() -> None:
    pool = TracePoolAllocator()
    buffer = _buffer(pool, "weights", 1)
    for _ in range(40_000):
        buffer.acquire()
        buffer.release()
    (report,) = pool.reports()
    assert [len(program.trace.events) for program in report.programs] == [1 << 16]


traces = st.builds(
    Trace,
    live_before=st.integers(0, 63),
    events=st.lists(st.integers(-6, 5), max_size=30).map(tuple),
)
sizes_of_six = st.lists(st.integers(0, 5000), min_size=6, max_size=6)


def _plan_of(sizes: list[int], many: list[Trace]) -> MemoryPlan:
    """Return one plan for several traces, combined as in the pool."""
    conflicts, used, peak = [0] * len(sizes), 0, 0
    for trace in many:
        of_trace, highest = trace.measure(sizes, conflicts)
        used, peak = used | of_trace, max(peak, highest)
    return plan_memory(sizes, conflicts, used, peak)


def _live_sets(trace: Trace) -> list[set[int]]:
    """Return the live buffers at every moment, by brute force."""
    live = {key for key in range(16) if trace.live_before >> key & 1}
    moments = [set(live)]
    for event in trace.events:
        if event >= 0:
            live.add(event)
        else:
            live.discard(~event)
        moments.append(set(live))
    return moments


def _bytes_of(plan: MemoryPlan, key: int) -> range:
    offset = plan.offsets[key]
    assert offset is not None
    return range(offset, offset + plan.sizes[key])


def _share(first: range, second: range) -> bool:
    return max(first.start, second.start) < min(first.stop, second.stop)


@settings(max_examples=150)
@given(sizes=sizes_of_six, many=st.lists(traces, max_size=4))
def test_buffers_that_live_together_never_overlap(sizes: list[int], many: list[Trace]) -> None:
    plan = _plan_of(sizes, many)
    moments = [moment for trace in many for moment in _live_sets(trace)]
    for moment in moments:
        for first, second in itertools.combinations(moment, 2):
            assert not _share(_bytes_of(plan, first), _bytes_of(plan, second))
    for key, offset in enumerate(plan.offsets):
        assert (offset is None) == (not any(key in moment for moment in moments))
        assert offset is None or offset % ALIGNMENT == 0
    bound = max((sum(sizes[key] for key in moment) for moment in moments), default=0)
    assert plan.lower_bound == bound <= plan.nbytes
