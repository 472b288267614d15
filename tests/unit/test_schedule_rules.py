"""Rules of the schedule in cases made by hand: prefetching, and reductions in flight."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.plan import (
    MeshDescription,
    Strategy,
    TrainingDescription,
    describe_module,
    plan_one,
)
from megatron_fsdp_v2.runtime.machine import weights
from megatron_fsdp_v2.runtime.machine.orders import Pass, PrefetchLimit
from megatron_fsdp_v2.runtime.machine.state import (
    Control,
    ProcessState,
    RootState,
    Settings,
    UnitState,
)
from megatron_fsdp_v2.runtime.options import RuntimeOptions
from tests.reference.models import Stack

ZERO_3 = "optim_grads_params"
NONE: Mapping[str, Any] = {}

# -- a whole step -----------------------------------------------------------------------------


WORDS = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "outer"}


def _step(strategy: str = ZERO_3, training: Mapping[str, Any] = NONE, **options: Any) -> list[str]:
    """Return the events of a step of a hybrid-sharded stack of three blocks, in words.

    Args:
        strategy: Sharding strategy along the inner axis.
        training: Fields of the description of the training.
        options: Options of the root.
    """
    with torch.device("meta"):
        units, _ = describe_module(Stack(3))
    described = TrainingDescription(
        units, {"dp": MeshDescription(4)}, options=RuntimeOptions(**options), **training
    )
    events = plan_one(described, Strategy(strategy, outer_size=2)).step.events
    return [
        f"{WORDS.get(each.kind, f'{each.kind} {each.axis}'.strip())} {each.unit[7:] or 'root'}"
        for each in events
    ]


def _issued(**options: int) -> list[str]:
    """Return the collectives of a step."""
    return [event for event in _step(**options) if event.split()[0] in WORDS.values()]


def test_a_step_gathers_one_unit_ahead_and_waits_for_the_oldest_of_two_reductions() -> None:
    assert _issued() == [
        # Forward.
        *("gather root", "gather 0", "gather 1", "gather 2"),
        # Backward; the root is still gathered.
        # A reduction along the outer axis is queued behind the one along the inner axis.
        *("gather 2", "gather 1", "reduce 2", "outer 2", "gather 0", "reduce 1", "outer 1"),
        *("reduce 0", "outer 0", "reduce root", "outer root"),
        # Which groups had gradients, along both axes.
        *("outer root", "outer root"),
    ]


def test_byte_limit_prefetches_all_units_that_fit_or_the_next_one() -> None:
    unlimited = _issued(unshard_prefetch_bytes=1 << 30)
    assert unlimited[:8] == [
        *("gather root", "gather 0", "gather 1", "gather 2"),
        *("gather 2", "gather 1", "gather 0", "reduce 2"),
    ]
    # Fewer bytes than one unit: only the next unit.
    assert _issued(unshard_prefetch_bytes=1) == _issued()
    assert _issued(unshard_prefetch_bytes=1 << 30, unshard_prefetch_depth=1) == _issued()


# -- prefetching ------------------------------------------------------------------------------


class FakeUnit:
    """Executes commands by logging them."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def gather(self, uses: WeightUse, *, adds: bool, async_op: bool) -> None:
        del uses, adds
        if async_op:
            self.log.append(f"+{self.name}")

    def is_changed(self) -> bool:
        return False

    def free(self, *, after_error: bool) -> None:
        del after_error
        self.log.append(f"-{self.name}")


def _units(names: Iterable[str], log: list[str], limit: PrefetchLimit) -> list[UnitState]:
    do: Any = None
    root = RootState(ProcessState(), do, Control(limit), do)
    root.is_checked = True
    made: list[Any] = [FakeUnit(name, log) for name in names]
    return [UnitState(unit, [], Settings(reshard_after_forward=True), root) for unit in made]


def _last_pass(
    passes: str,
    limit: PrefetchLimit | None = None,
    sizes: Sequence[int] = (1, 1, 1, 1),
    *,
    chosen: str = "",
) -> str:
    """Return the log of the last pass: units in use, prefetched (+) and dropped (-)."""
    log: list[str] = []
    units = dict(zip("abcd", _units("abcd", log, limit or PrefetchLimit()), strict=True))
    for unit, size in zip(units.values(), sizes, strict=True):
        unit.nbytes = size
    root = units["a"].root
    for number, names in enumerate(passes.split(), start=1):
        log.clear()
        root.gathers.begin_forward(units["a"])
        is_chosen = number == len(passes.split())
        for name in names:
            unit = units[name]
            weights.before_use(unit)
            log.append(name)
            unit.is_gathered = True
            refs = chosen if is_chosen and name == names[0] else ""
            root.gathers.forward.note(unit)
            weights.look_ahead(unit, root.gathers.forward, [units[other] for other in refs])
            unit.is_gathered = False
        weights.drop_prefetched(root)
    return " ".join(log)


FORWARDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no prefetch in the first pass": ("abcd", {}, "a b c d"),
    "the next unit in the second pass": ("abcd abcd", {}, "a +b b +c c +d d"),
    "two units": ("abcd abcd", {"limit": PrefetchLimit(2)}, "a +b +c b +d c d"),
    "no unit, although a user selects one": (
        "abcd abcd",
        {"limit": PrefetchLimit(0), "chosen": "c"},
        "a b c d",
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


@pytest.mark.parametrize(("passes", "options", "expected"), FORWARDS.values(), ids=FORWARDS)
def test_forward_prefetches(passes: str, options: dict[str, Any], expected: str) -> None:
    assert _last_pass(passes, **options) == expected


# -- reductions -------------------------------------------------------------------------------

# At the end, ranks sum along both axes which groups had gradients.
_FLAGS = "outer root, wait inner root, outer root, wait outer root"
_INNER = (
    "collect root, collect 2, reduce 2, collect 1, reduce 1, wait inner 2, collect 0, reduce 0, "
    "wait inner 1, reduce root, wait inner 0, wait inner root"
)
_OUTER_WAITS = "wait outer 2, wait outer 1, wait outer 0, wait outer root"
# Each reduction along the outer axis is queued behind the inner one. A third gradient buffer waits
# for the first inner reduction.
_TWO_BUFFERS = (
    "collect root, collect 2, reduce 2, outer 2, collect 1, reduce 1, outer 1, wait inner 2, "
    "collect 0, reduce 0, outer 0, wait inner 1, reduce root, outer root, wait inner 0, "
    f"wait inner root, {_OUTER_WAITS}, {_FLAGS}"
)
REDUCTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "two buffers": ({}, _TWO_BUFFERS),
    # Along the outer axis, at most two units per gradient buffer are in flight.
    "one buffer": (
        {"max_live_grad_buffers": 1},
        "collect root, collect 2, reduce 2, outer 2, wait inner 2, "
        "collect 1, reduce 1, outer 1, wait inner 1, "
        "collect 0, reduce 0, wait outer 2, outer 0, wait inner 0, "
        "reduce root, wait outer 1, outer root, wait inner root, wait outer 0, wait outer root, "
        f"{_FLAGS}",
    ),
    # Partial shards are reduced along the outer axis once, after both backwards.
    "two micro-batches, synchronized afterwards": (
        {"training": {"num_microbatches": 2, "syncs_afterwards": True}},
        f"{_INNER}, {_INNER}, outer 2, outer 1, wait outer 2, outer 0, wait outer 1, outer root, "
        f"wait outer 0, wait outer root, {_FLAGS}",
    ),
}


@pytest.mark.parametrize(("options", "expected"), REDUCTIONS.values(), ids=REDUCTIONS)
def test_reductions_of_a_step_and_their_waits(options: dict[str, Any], expected: str) -> None:
    kinds = ("collect", "reduce", "outer", "wait")
    assert [e for e in _step(**options) if e.split()[0] in kinds] == expected.split(", ")


def _forward(
    units: Sequence[UnitState], ran: Sequence[int], *, in_order: bool = True
) -> Pass[UnitState]:
    passed = Pass(units[0].root.process.numbers, list(units) if in_order else None)
    for name in ran:
        passed.begin_forward([units[name]])
        passed.add_use([units[name]])
    return passed


def _backward(
    units: Sequence[UnitState], passed: Pass[UnitState], ended: Sequence[int]
) -> list[list[int]]:
    """Return the units reduced after each use, and last those at the end of the backward."""
    passed.begin_backward()
    reduced = []
    for name in ended:
        ready = passed.count_backward([units[name]])
        reduced.append([units.index(unit) for unit in ready + passed.due(is_left=False)])
    return [*reduced, [units.index(unit) for unit in passed.due(is_left=True)]]


def _made(number: int) -> list[UnitState]:
    return _units(map(str, range(number)), [], PrefetchLimit())


@given(st.data())
def test_every_unit_is_reduced_once_in_the_same_order_for_any_execution(
    data: st.DataObject,
) -> None:
    units = _made(6)
    for _ in range(2):
        ran = data.draw(st.lists(st.integers(0, 5), max_size=12))
        passed = _forward(units, ran)
        # The backward of a graph may run several times and in part.
        for _ in range(2):
            ended = data.draw(st.permutations(ran))[: data.draw(st.integers(0, len(ran)))]
            reduced = _backward(units, passed, ended)
            assert list(itertools.chain.from_iterable(reduced)) == list(range(6))


def test_deleted_unit_is_not_reduced() -> None:
    units = _made(3)
    passed = _forward(units, [0])
    units[1].forget()
    assert _backward(units, passed, []) == [[0, 2]]


@pytest.mark.parametrize("ended", [[4, 1, 3, 1, 0], [4, 1, 3, 0], [4, 3, 1, 0]])
def test_without_an_order_a_repeated_unit_is_reduced_with_the_next_unit_that_runs_once(
    ended: Sequence[int],
) -> None:
    units = _made(5)
    reduced = _backward(units, _forward(units, [0, 1, 3, 1, 4], in_order=False), ended)
    assert [one for one in reduced if one] == [[4], [3], [1, 0]]
