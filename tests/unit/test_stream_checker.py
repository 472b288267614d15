"""The checker on schedules written by hand."""

from __future__ import annotations

import pytest

from megatron_fsdp_v2.diagnostics.stream_safety import (
    Buffer,
    Fault,
    Region,
    Schedule,
    find_violations,
)


def faults(schedule: Schedule) -> list[tuple[Fault, int, int]]:
    return [(v.fault, v.first, v.second) for v in find_violations(schedule)]


def gather(schedule: Schedule, buffer: Buffer, *, waits: bool = True, event: bool = True) -> None:
    """Compute writes, a communication stream gathers, compute uses; with or without each wait."""
    shard = Buffer("shard")
    schedule.operation("compute", "cast", writes=[shard])
    if waits:
        schedule.wait_stream("comm_stream", "compute")
    schedule.operation("comm_stream", "all_gather", reads=[shard], writes=[buffer])
    if event:
        schedule.wait_event("compute", schedule.record_event("comm_stream"))
    schedule.operation("compute", "mm", reads=[buffer])


def test_a_gather_between_its_waits_is_in_order() -> None:
    schedule = Schedule()
    gather(schedule, Buffer("weights"))
    assert faults(schedule) == []


def test_a_lane_that_does_not_wait_for_its_input_is_found() -> None:
    schedule = Schedule()
    gather(schedule, Buffer("weights"), waits=False)
    assert faults(schedule) == [(Fault.UNORDERED, 0, 1)]


def test_a_use_that_does_not_wait_for_the_gather_is_found_and_explained() -> None:
    schedule = Schedule()
    gather(schedule, Buffer("weights"), event=False)
    (violation,) = find_violations(schedule)
    assert str(violation) == (
        "weights: not ordered: #2 all_gather on 'comm_stream' (writes it), then #3 mm on 'compute' "
        "(reads it); 'compute' has to wait for 'comm_stream': an event recorded after #2 and "
        "waited for before #3"
    )


def test_an_event_orders_nothing_queued_after_it() -> None:
    schedule, buffer = Schedule(), Buffer("buffer")
    event = schedule.record_event("comm_stream")
    schedule.operation("comm_stream", "late", writes=[buffer])
    schedule.wait_event("compute", event)
    schedule.operation("compute", "read", reads=[buffer])
    assert faults(schedule) == [(Fault.UNORDERED, 1, 3)]


def test_a_stream_wait_orders_only_what_comes_after_it() -> None:
    schedule, buffer = Schedule(), Buffer("buffer")
    schedule.wait_stream("compute", "comm_stream")
    schedule.operation("comm_stream", "late", writes=[buffer])
    schedule.operation("compute", "read", reads=[buffer])
    assert faults(schedule) == [(Fault.UNORDERED, 1, 2)]


def test_order_passes_through_a_third_stream() -> None:
    schedule, buffer = Schedule(), Buffer("buffer")
    schedule.operation("reduce", "reduce_scatter", writes=[buffer])
    schedule.wait_stream("compute", "reduce")
    schedule.wait_stream("outer", "compute")
    schedule.operation("outer", "all_reduce", writes=[buffer])
    assert faults(schedule) == []


def test_a_wait_in_the_wrong_direction_orders_nothing() -> None:
    schedule, buffer = Schedule(), Buffer("buffer")
    schedule.operation("comm_stream", "write", writes=[buffer])
    schedule.wait_stream("comm_stream", "compute")
    schedule.operation("compute", "read", reads=[buffer])
    assert faults(schedule) == [(Fault.UNORDERED, 0, 2)]


def test_reads_on_two_streams_need_no_order() -> None:
    schedule, buffer = Schedule(), Buffer("buffer")
    schedule.operation("comm_stream", "read", reads=[buffer])
    schedule.operation("compute", "read", reads=[buffer])
    assert faults(schedule) == []


def test_a_write_after_an_unordered_read_is_found() -> None:
    schedule, buffer = Schedule(), Buffer("buffer")
    schedule.operation("comm_stream", "read", reads=[buffer])
    schedule.operation("compute", "write", writes=[buffer])
    assert faults(schedule) == [(Fault.UNORDERED, 0, 1)]


def test_every_unordered_pair_is_reported_once() -> None:
    schedule, buffer = Schedule(), Buffer("buffer")
    schedule.operation("comm_stream", "first", writes=[buffer])
    schedule.operation("comm_stream", "second", reads=[buffer], writes=[buffer])
    schedule.operation("compute", "third", reads=[buffer], writes=[buffer])
    assert faults(schedule) == [(Fault.UNORDERED, 1, 2), (Fault.UNORDERED, 0, 2)]


@pytest.mark.parametrize(("start", "expected"), [(8, 0), (7, 1)])
def test_only_bytes_in_common_conflict(start: int, expected: int) -> None:
    schedule, buffer = Schedule(), Buffer("buffer")
    schedule.operation("comm_stream", "write", writes=[Region(buffer, 0, 8)])
    schedule.operation("compute", "write", writes=[Region(buffer, start, 16)])
    assert len(faults(schedule)) == expected


def test_buffers_of_the_same_name_are_two() -> None:
    schedule = Schedule()
    schedule.operation("comm_stream", "write", writes=[Buffer("buffer")])
    schedule.operation("compute", "write", writes=[Buffer("buffer")])
    assert faults(schedule) == []


def test_a_free_before_the_last_use_is_done_is_found() -> None:
    schedule, buffer = Schedule(), Buffer("gradients")
    schedule.allocate("compute", buffer)
    schedule.wait_stream("reduce", "compute")
    schedule.operation("reduce", "reduce_scatter", reads=[buffer])
    event = schedule.record_event("reduce")
    schedule.free("compute", buffer)
    schedule.wait_event("compute", event)
    (violation,) = find_violations(schedule)
    assert (violation.fault, violation.first, violation.second) == (Fault.PREMATURE_FREE, 2, 4)
    assert "gradients: freed too early" in str(violation)
    assert "'compute' has to wait for 'reduce'" in str(violation)


def test_a_free_after_the_wait_is_in_order() -> None:
    schedule, buffer = Schedule(), Buffer("gradients")
    schedule.allocate("compute", buffer)
    schedule.wait_stream("reduce", "compute")
    schedule.operation("reduce", "reduce_scatter", reads=[buffer])
    schedule.wait_event("compute", schedule.record_event("reduce"))
    schedule.free("compute", buffer)
    assert faults(schedule) == []


def test_a_lane_that_does_not_wait_for_the_allocation_is_found() -> None:
    schedule, buffer = Schedule(), Buffer("gathered")
    schedule.allocate("compute", buffer)
    schedule.operation("comm_stream", "all_gather", writes=[buffer])
    assert faults(schedule) == [(Fault.UNORDERED_MEMORY, 0, 1)]


def test_memory_that_changes_hands_under_a_running_read_is_found() -> None:
    schedule, buffer = Schedule(), Buffer("slot")
    schedule.operation("comm_stream", "read", reads=[buffer])
    schedule.allocate("compute", buffer)
    assert faults(schedule) == [(Fault.UNORDERED_MEMORY, 0, 1)]


def test_a_use_without_memory_is_found_on_any_stream() -> None:
    schedule, buffer = Schedule(), Buffer("gathered")
    schedule.free("compute", buffer)
    schedule.operation("compute", "mm", reads=[buffer])
    (violation,) = find_violations(schedule)
    assert violation.fault is Fault.USE_AFTER_FREE
    assert "give it memory in between" in str(violation)


def test_memory_given_back_can_be_used_again() -> None:
    schedule, buffer = Schedule(), Buffer("gathered")
    for _ in range(2):
        schedule.allocate("compute", buffer)
        schedule.operation("compute", "mm", reads=[buffer])
        schedule.free("compute", buffer)
    assert faults(schedule) == []


def test_a_second_free_is_found() -> None:
    schedule, buffer = Schedule(), Buffer("gathered")
    schedule.free("compute", buffer)
    schedule.free("compute", buffer)
    assert faults(schedule) == [(Fault.USE_AFTER_FREE, 0, 1)]


def test_waiting_for_an_event_that_was_not_recorded_is_rejected() -> None:
    with pytest.raises(ValueError, match="event 3, which was not recorded"):
        Schedule().wait_event("compute", 3)


@pytest.mark.parametrize(("waits", "expected"), [(True, []), (False, [(1, 2), (0, 2)])])
def test_memory_freed_lazily_has_to_be_done_when_its_stream_is_given_memory(
    waits: bool, expected: list[tuple[int, int]]
) -> None:
    schedule, activation = Schedule(), Buffer("activation")
    schedule.operation("side", "gelu", writes=[activation])
    schedule.operation("side", "add", reads=[activation])
    schedule.free("compute", activation, when_reused=True)
    if waits:
        schedule.wait_stream("compute", "side")
    # Not before: another stream's allocation takes nothing of what was freed here.
    schedule.allocate("side", Buffer("other"))
    schedule.allocate("compute", Buffer("next"))
    assert faults(schedule) == [(Fault.PREMATURE_FREE, *pair) for pair in expected]
