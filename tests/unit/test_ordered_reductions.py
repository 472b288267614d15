"""Ordered reductions: whatever a rank runs, and how often, they go out in one order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_v2.runtime.reduction_rules import OrderedReductions, RootPass


class FakeUnit:
    """A unit with a name."""

    def __init__(self, name: int) -> None:
        self.name = name


def _turns(count: int) -> tuple[list[FakeUnit], OrderedReductions[FakeUnit]]:
    units = [FakeUnit(name) for name in range(count)]
    # The last one has the first turn.
    return units, OrderedReductions(units[::-1])


def _forward(units: Sequence[FakeUnit], ran: Sequence[int]) -> RootPass[FakeUnit]:
    passed: RootPass[FakeUnit] = RootPass()
    for name in ran:
        passed.add_use(units[name])
    return passed


def _backward(
    units: Sequence[FakeUnit],
    turns: OrderedReductions[FakeUnit],
    passed: RootPass[FakeUnit],
    ended: Sequence[int],
) -> list[list[int]]:
    """What is reduced at the end of every use, and last at the end of the backward."""
    turns.begin(passed)
    reduced = [[unit.name for unit in turns.done(units[name])] for name in ended]
    return [*reduced, [unit.name for unit in turns.remaining()]]


@given(st.data())
def test_every_unit_has_one_turn_in_the_same_order_whatever_ran(data: st.DataObject) -> None:
    units, turns = _turns(6)
    for _ in range(2):
        ran = data.draw(st.lists(st.integers(0, 5), max_size=12))
        passed = _forward(units, ran)
        # The same graph may go backward several times, and not all of it every time.
        for _ in range(2):
            ended = data.draw(st.permutations(ran))[: data.draw(st.integers(0, len(ran)))]
            reduced = _backward(units, turns, passed, ended)
            assert list(itertools.chain.from_iterable(reduced)) == list(range(6))


@pytest.mark.parametrize(
    ("ran", "ended", "reduced"),
    [
        ([2, 1, 0], [0, 1, 2], [[0], [1], [2], []]),
        ([2, 1, 1, 0], [0, 1, 1, 2], [[0], [], [1], [2], []]),
        ([2, 1, 1, 0], [0, 1, 2], [[0], [], [], [1, 2]]),
    ],
    ids=["the usual order", "after the second backward", "at the end after one without gradient"],
)
def test_a_unit_is_reduced_when_all_its_uses_are_over_and_those_before_it_are(
    ran: list[int], ended: list[int], reduced: list[list[int]]
) -> None:
    units, turns = _turns(3)
    assert _backward(units, turns, _forward(units, ran), ended) == reduced


def test_a_deleted_unit_has_no_turn() -> None:
    units, turns = _turns(3)
    del units[1]
    turns.begin(RootPass())
    assert [unit.name for unit in turns.remaining()] == [0, 2]


def test_without_an_order_each_unit_is_reduced_after_its_last_use_and_no_other() -> None:
    units = [FakeUnit(name) for name in range(3)]
    turns = OrderedReductions(units[::-1], in_order=False)
    passed = _forward(units, [0, 1, 1, 2])
    assert _backward(units, turns, passed, [1, 2, 1]) == [[], [2], [1], []]
