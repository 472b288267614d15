"""Turns: whatever a rank runs and in whatever order, reductions go out in one order."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_v2.reduction_queue import Turns


class FakeUnit:
    """A unit that is expected back from its forward until its backward is done."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.is_expected_back = False


def _backward(units: Sequence[FakeUnit], turns: Turns[FakeUnit], ran: Sequence[int]) -> list[int]:
    """Order of reductions of a backward in which these units ran, in this order of ends."""
    turns.begin()
    for name in ran:
        units[name].is_expected_back = True
    reduced = []
    for name in ran:
        units[name].is_expected_back = False
        reduced += [unit.name for unit in turns.done(units[name])]
    return reduced + [unit.name for unit in turns.rest()]


@given(st.data())
def test_every_unit_has_one_turn_in_the_same_order_whatever_ran(data: st.DataObject) -> None:
    units = [FakeUnit(name) for name in range(6)]
    turns = Turns(units)
    for _ in range(2):
        ran = data.draw(st.permutations(range(6)))[: data.draw(st.integers(1, 6))]
        assert _backward(units, turns, ran) == list(range(6))


def test_in_the_usual_order_nothing_waits() -> None:
    units = [FakeUnit(name) for name in range(3)]
    turns = Turns(units)
    turns.begin()
    for unit in units:
        unit.is_expected_back = True
    for unit in units:
        unit.is_expected_back = False
        assert turns.done(unit) == [unit]
    assert turns.rest() == []


def test_what_comes_after_a_units_turn_goes_out_at_once() -> None:
    units = [FakeUnit(name) for name in range(2)]
    turns = Turns(units)
    turns.begin()
    assert turns.done(units[0]) == [units[0], units[1]]
    assert turns.done(units[0]) == [units[0]]
    assert turns.rest() == []


def test_a_deleted_unit_has_no_turn() -> None:
    units = [FakeUnit(name) for name in range(3)]
    turns = Turns(units)
    del units[1]
    turns.begin()
    assert [unit.name for unit in turns.rest()] == [0, 2]
