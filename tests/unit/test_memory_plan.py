"""Memory plans: what lives together never overlaps, and little is wasted."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp_v2.memory.address_plan import ALIGNMENT, MemoryPlan, Trace, plan_memory

traces = st.builds(
    Trace,
    live_before=st.integers(0, 63),
    events=st.lists(st.integers(-6, 5), max_size=30).map(tuple),
)
sizes_of_six = st.lists(st.integers(0, 5000), min_size=6, max_size=6)


def _plan_of(sizes: list[int], many: list[Trace]) -> MemoryPlan:
    """One plan for several traces, put together as the pool does it."""
    conflicts, used = [0] * len(sizes), 0
    for trace in many:
        trace.add_conflicts(conflicts)
        used |= trace.used()
    peak = max((trace.peak(sizes) for trace in many), default=0)
    return plan_memory(sizes, conflicts, used, peak)


def _live_sets(trace: Trace) -> list[set[int]]:
    """Slow and plain: the live buffers at every moment."""
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


@settings(max_examples=100)
@given(sizes=sizes_of_six, many=st.lists(traces, min_size=1, max_size=2))
def test_overlaps_and_slots_say_who_shares_what(sizes: list[int], many: list[Trace]) -> None:
    plan = _plan_of(sizes, many)
    placed = [key for key, offset in enumerate(plan.offsets) if offset is not None]
    for first, second in itertools.permutations(placed, 2):
        said = bool(plan.overlaps[first] >> second & 1)
        assert said or not _share(_bytes_of(plan, first), _bytes_of(plan, second))
    assert sorted(key for slot in plan.slots for key in slot.keys) == placed
    for slot in plan.slots:
        for key in slot.keys:
            where = _bytes_of(plan, key)
            assert slot.offset <= where.start and where.stop <= slot.offset + slot.nbytes
    for before, after in itertools.pairwise(plan.slots):
        assert before.offset + before.nbytes <= after.offset


def _smallest_block(sizes: list[int], conflicts: list[int]) -> int:
    """By trying every order: some order of lowest-address placement gives the optimum."""
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    least = sum(aligned)
    for order in itertools.permutations(range(len(sizes))):
        ends: dict[int, tuple[int, int]] = {}
        for key in order:
            taken = sorted(at for other, at in ends.items() if conflicts[key] >> other & 1)
            offset = 0
            for start, stop in taken:
                if offset + aligned[key] <= start:
                    break
                offset = max(offset, stop)
            ends[key] = (offset, offset + aligned[key])
        least = min(least, max(stop for _, stop in ends.values()))
    return least


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 8).map(lambda n: n * ALIGNMENT), min_size=5, max_size=5),
    pairs=st.sets(st.sampled_from(list(itertools.combinations(range(5), 2)))),
)
def test_a_plan_is_close_to_the_smallest_there_is(
    sizes: list[int], pairs: set[tuple[int, int]]
) -> None:
    conflicts = [0] * 5
    for first, second in pairs:
        conflicts[first] |= 1 << second
        conflicts[second] |= 1 << first
    plan = plan_memory(sizes, conflicts, 0b11111, 0)
    smallest = _smallest_block(sizes, conflicts)
    assert smallest <= plan.nbytes <= 1.25 * smallest


def test_a_plan_of_nothing_is_empty() -> None:
    plan = _plan_of([], [])
    assert (plan.nbytes, plan.lower_bound, plan.excess, plan.slots) == (0, 0, 0.0, ())


def test_a_request_larger_than_planned_is_rejected_with_both_sizes() -> None:
    plan = _plan_of([1000, 10], [Trace(0, (0, ~0))])
    assert plan.place(0, 1000) == 0
    assert plan.place(1, 10) is None
    with pytest.raises(ValueError, match="asks for 1001 bytes, and the plan has 1000"):
        plan.place(0, 1001)


def test_a_negative_size_is_rejected() -> None:
    with pytest.raises(ValueError, match="sizes must not be negative, got -1 for buffer 1"):
        _plan_of([4, -1], [])


def test_a_report_names_slots_bytes_and_who_shares() -> None:
    plan = _plan_of([1024, 1024, 512], [Trace(0, (0, ~0, 1, 2, ~1, ~2))])
    text = plan.text(["first", "second", "third"])
    assert "1,536 bytes in 2 slots; lower bound 1,536 bytes, +0.0%" in text
    assert "without sharing 2,560 bytes" in text
    assert "first, second" in text
