"""Rules of the schedule in cases made by hand: prefetching, and the queue of reductions."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_fsdp_v2.comm.interface import DONE, Work
from megatron_fsdp_v2.memory.observer import Observer
from megatron_fsdp_v2.plan import (
    MeshDescription,
    Strategy,
    TrainingDescription,
    describe_module,
    plan_one,
)
from megatron_fsdp_v2.runtime.options import RuntimeOptions
from megatron_fsdp_v2.runtime.schedule import (
    GatherSchedule,
    OrderedReductions,
    PrefetchLimit,
    ReductionQueue,
    RootPass,
)
from tests.reference.models import Stack

# -- a whole step -----------------------------------------------------------------------------


def _step(num_blocks: int, **options: int | bool) -> list[str]:
    """Return the collectives that a step of a hybrid-sharded stack of blocks issues, in words."""
    with torch.device("meta"):
        model: nn.Module = Stack(num_blocks)
    units, _ = describe_module(model)
    runtime = RuntimeOptions(**options)  # type: ignore[arg-type]
    training = TrainingDescription(units, {"dp": MeshDescription(4)}, options=runtime)
    events = plan_one(training, Strategy(outer_size=2)).step.events
    words = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "outer"}
    issued = [each for each in events if each.kind in words]
    return [f"{words[each.kind]} {each.unit[7:] or 'root'}" for each in issued]


def test_a_step_gathers_one_unit_ahead_and_waits_for_the_oldest_of_two_reductions() -> None:
    assert _step(3) == [
        # Forward.
        *("gather root", "gather 0", "gather 1", "gather 2"),
        # Backward; the root is still gathered.
        *("gather 2", "gather 1", "reduce 2", "gather 0", "reduce 1"),
        # A third gradient buffer: wait for the first reduction, then reduce along the outer axis.
        *("outer 2", "reduce 0", "outer 1", "reduce root"),
        *("outer 0", "outer root"),
    ]


def test_byte_limit_prefetches_all_units_that_fit_or_the_next_one() -> None:
    unlimited = _step(3, unshard_prefetch_bytes=1 << 30)
    assert unlimited[:8] == [
        *("gather root", "gather 0", "gather 1", "gather 2"),
        *("gather 2", "gather 1", "gather 0", "reduce 2"),
    ]
    # Fewer bytes than one unit: only the next unit.
    assert _step(3, unshard_prefetch_bytes=1) == _step(3)
    assert _step(3, unshard_prefetch_bytes=1 << 30, unshard_prefetch_depth=1) == _step(3)


# -- prefetching ------------------------------------------------------------------------------


@dataclass(eq=False)
class FakeUnit:
    """A unit that logs its calls."""

    name: str
    log: list[str]
    gathered_nbytes: int
    is_unsharded: bool = False
    single_payload: bool = True

    def prefetch(self) -> None:
        self.log.append(f"+{self.name}")
        self.is_unsharded = True

    def reshard(self) -> None:
        self.log.append(f"-{self.name}")
        self.is_unsharded = False


def _last_pass(
    passes: str,
    limit: PrefetchLimit | None = None,
    sizes: Sequence[int] = (1, 1, 1, 1),
    *,
    chosen: str = "",
    is_backward: bool = False,
) -> str:
    """Return the log of the last pass: units in use, prefetched (+) and dropped (-)."""
    log: list[str] = []
    units = {name: FakeUnit(name, log, size) for name, size in zip("abcd", sizes, strict=True)}
    schedule: Any = GatherSchedule(limit or PrefetchLimit())
    for unit in units.values():
        schedule.expect_backward(unit)
    for number, names in enumerate(passes.split(), start=1):
        log.clear()
        if is_backward:
            schedule.begin_backward()
        else:
            schedule.begin_forward(units["a"])
        is_chosen = number == len(passes.split())
        for name in names:
            unit = units[name]
            schedule.before_use(unit)
            log.append(name)
            unit.is_unsharded = True
            if is_backward:
                schedule.in_backward(unit)
            else:
                refs = chosen if is_chosen and name == names[0] else ""
                schedule.in_forward(unit, [weakref.ref(units[other]) for other in refs])
            unit.is_unsharded = False
        schedule.drop_prefetched()
    return " ".join(log)


SOME_BYTES = PrefetchLimit(None, 100)
FORWARDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no prefetch in the first pass": ("abcd", {}, "a b c d"),
    "the next unit in the second pass": ("abcd abcd", {}, "a +b b +c c +d d"),
    "two units": ("abcd abcd", {"limit": PrefetchLimit(2)}, "a +b +c b +d c d"),
    "no unit, although a user selects one": (
        "abcd abcd",
        {"limit": PrefetchLimit(0), "chosen": "c"},
        "a b c d",
    ),
    # b and c fit together; d does not fit, but the next unit is always gathered.
    "units that fit in some bytes": (
        "abcd abcd",
        {"limit": SOME_BYTES, "sizes": (1, 40, 60, 101)},
        "a +b +c b c +d d",
    ),
    "an expected unit that is skipped is dropped": ("abcd acd", {}, "a +b -b c +d d"),
    "an expected unit is dropped at the end": ("ab a", {}, "a +b -b"),
    "units that gather nothing are skipped": (
        "abcd abcd",
        {"sizes": (0, 5, 0, 5)},
        "a +b b +d c d",
    ),
    "units that gather nothing drop nothing": (
        "abcd abcd acd",
        {"sizes": (0, 5, 0, 5)},
        "a +b c -b d",
    ),
    "a unit that a user selects stays until it runs": (
        "abcd abcd",
        {"chosen": "d"},
        "a +d b +c c d",
    ),
}
BACKWARDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "forwards in reverse": (
        "dcba dcba",
        {"limit": PrefetchLimit(2)},
        "d +c +b c +a b a",
    ),
    "units that fit in some bytes, backward": (
        "dcba",
        {"limit": SOME_BYTES, "sizes": (60, 50, 50, 1)},
        "d +c +b c b +a a",
    ),
}


@pytest.mark.parametrize(("passes", "options", "expected"), FORWARDS.values(), ids=FORWARDS)
def test_forward_prefetches(passes: str, options: dict[str, Any], expected: str) -> None:
    assert _last_pass(passes, **options) == expected


@pytest.mark.parametrize(("passes", "options", "expected"), BACKWARDS.values(), ids=BACKWARDS)
def test_backward_prefetches(passes: str, options: dict[str, Any], expected: str) -> None:
    assert _last_pass(passes, is_backward=True, **options) == expected


def test_both_prefetch_limits_apply_and_the_default_is_one_unit() -> None:
    assert PrefetchLimit(1, 100).fitting((40, 60), int) == [40]
    assert PrefetchLimit(0, 100).fitting((40, 60), int) == []
    assert RuntimeOptions().prefetch_limit == PrefetchLimit(1, None)


# -- reductions -------------------------------------------------------------------------------


class FakeGrads:
    """Gradients of a named group: `x` has one axis, `X` two; `u` accumulates unreduced."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.has_partial = False
        self.accumulates_unreduced = name == "u"
        self.has_outer_axis = name.isupper()

    def reduce(self, queue: Any, *, async_op: bool) -> Work:
        self.log.append(f"inner {self.name}")
        self.has_partial = self.has_outer_axis
        return DONE

    def end_inner(self) -> None:
        self.log.append(f"free {self.name}")

    def reduce_outer(self, *, async_op: bool) -> Work:
        self.log.append(f"outer {self.name}")
        self.has_partial = False
        return DONE

    def end_outer(self) -> None:
        self.log.append(f"done {self.name}")


class LoggedQueue:
    """A reduction queue, and a log of the calls to groups."""

    def __init__(self, bound: int = 2, *, is_async: bool = True) -> None:
        options = RuntimeOptions(max_live_grad_buffers=bound, enable_async_reduce_grad=is_async)
        self.queue: Any = ReductionQueue(options, Observer())
        self.log: list[str] = []
        self._known: dict[str, FakeGrads] = {}

    def named(self, names: str) -> list[FakeGrads]:
        """Return the gradients of the groups with these names."""
        return [self._known.setdefault(name, FakeGrads(name, self.log)) for name in names]

    def reduce(self, names: str, *, synchronize: bool) -> None:
        """Reduce the gradients that are due."""
        self.queue.reduce(self.queue.due(self.named(names), synchronize=synchronize))


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_in_flight_reductions_are_bounded_by_gradient_buffers(bound: int) -> None:
    logged = LoggedQueue(bound)
    for name in "abcdef":
        logged.queue.reserve(*logged.named(name))
        assert len(logged.queue) < bound
        logged.reduce(name, synchronize=True)
        assert len(logged.queue) <= bound
    assert [entry[-1] for entry in logged.log if entry.startswith("free")] == list(
        "abcdef"[: 6 - bound]
    )


def test_reserve_waits_for_a_reduction_of_the_same_group() -> None:
    logged = LoggedQueue(3)
    for name in "ab":
        logged.reduce(name, synchronize=True)
    logged.queue.reserve(*logged.named("a"))
    assert logged.log[2:] == ["free a"]


def test_outer_reductions_follow_inner_ones_with_a_separate_bound() -> None:
    logged = LoggedQueue(1)
    for names in ("AB", "C", "d"):
        logged.reduce(names, synchronize=True)
    assert logged.log == [
        *("inner A", "inner B", "free A", "free B", "outer A", "outer B"),
        *("inner C", "free C", "done A", "done B", "outer C", "inner d"),
    ]
    logged.queue.drain()
    assert logged.log[-2:] == ["free d", "done C"]


def test_partial_shards_are_reduced_when_no_inner_reduction_is_in_flight() -> None:
    logged = LoggedQueue()
    logged.reduce("A", synchronize=False)
    logged.queue.drain()
    assert logged.log == ["inner A", "free A"]
    logged.reduce("B", synchronize=True)
    logged.queue.reduce_partials(logged.named("AB"))
    assert logged.log[2:] == ["inner B", "outer A"]
    logged.queue.drain()
    assert logged.log[4:] == ["free B", "outer B", "done A", "done B"]


def test_unreduced_gradients_are_due_at_synchronization() -> None:
    logged = LoggedQueue()
    a, u = logged.named("au")
    assert logged.queue.due([a, u], synchronize=False) == {a: False}
    assert logged.queue.due([a, u], synchronize=True) == {a: False, u: False}


def test_synchronous_reductions_are_waited_for_at_once() -> None:
    logged = LoggedQueue(is_async=False)
    logged.reduce("A", synchronize=True)
    assert logged.log == ["inner A", "free A", "outer A", "done A"]
    assert not len(logged.queue)


class NamedUnit:
    """A unit with a name."""

    def __init__(self, name: int) -> None:
        self.name = name


def _ordered_reductions(count: int) -> tuple[list[Any], OrderedReductions]:
    units: list[Any] = [NamedUnit(name) for name in range(count)]
    # The last unit is reduced first.
    return units, OrderedReductions(units[::-1])


def _forward(units: Sequence[Any], ran: Sequence[int]) -> RootPass:
    passed: RootPass = RootPass()
    for name in ran:
        passed.add_use(units[name])
    return passed


def _backward(
    units: Sequence[Any],
    ordered: OrderedReductions,
    passed: RootPass,
    ended: Sequence[int],
) -> list[list[int]]:
    """Return the units reduced after each use, and last those at the end of the backward."""
    ordered.begin(passed)
    reduced = [[unit.name for unit in ordered.count_backward(units[name])] for name in ended]
    return [*reduced, [unit.name for unit in ordered.remaining()]]


@given(st.data())
def test_every_unit_is_reduced_once_in_the_same_order_for_any_execution(
    data: st.DataObject,
) -> None:
    units, ordered = _ordered_reductions(6)
    for _ in range(2):
        ran = data.draw(st.lists(st.integers(0, 5), max_size=12))
        passed = _forward(units, ran)
        # The backward of a graph may run several times and in part.
        for _ in range(2):
            ended = data.draw(st.permutations(ran))[: data.draw(st.integers(0, len(ran)))]
            reduced = _backward(units, ordered, passed, ended)
            assert list(itertools.chain.from_iterable(reduced)) == list(range(6))


@pytest.mark.parametrize(
    ("ran", "ended", "reduced"),
    [
        ([2, 1, 0], [0, 1, 2], [[0], [1], [2], []]),
        ([2, 1, 1, 0], [0, 1, 1, 2], [[0], [], [1], [2], []]),
        ([2, 1, 1, 0], [0, 1, 2], [[0], [], [], [1, 2]]),
    ],
    ids=["usual order", "after the second backward", "a use without a backward"],
)
def test_unit_is_reduced_after_its_last_use_and_after_its_predecessors(
    ran: list[int], ended: list[int], reduced: list[list[int]]
) -> None:
    units, ordered = _ordered_reductions(3)
    assert _backward(units, ordered, _forward(units, ran), ended) == reduced


def test_deleted_unit_is_not_reduced() -> None:
    units, ordered = _ordered_reductions(3)
    del units[1]
    ordered.begin(RootPass())
    assert [unit.name for unit in ordered.remaining()] == [0, 2]


def test_without_an_order_each_unit_is_reduced_after_its_last_use() -> None:
    units: list[Any] = [NamedUnit(name) for name in range(3)]
    ordered = OrderedReductions(units[::-1], in_order=False)
    passed = _forward(units, [0, 1, 1, 2])
    assert _backward(units, ordered, passed, [1, 2, 1]) == [[], [2], [1], []]
