"""Every sequence of events within bounds keeps the rules of `world.py`, on one rank and on two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import pytest

from megatron_fsdp_v2.runtime.machine import events, reductions
from megatron_fsdp_v2.runtime.machine.state import Phase
from tests.machine.executors import Setup
from tests.machine.explore import explore, run, sample
from tests.machine.programs import described
from tests.machine.setups import CASES, CROSSED, PROGRAMS, crossed, setup_of
from tests.machine.world import World


def _explore(program: str, most: int, cases: Sequence[dict[str, Any]] = CASES) -> int:
    """Explore a kind of program in some cases; return the number of states."""
    total = 0
    for case in cases:
        setup = setup_of(case, program)
        found = explore(setup, most)
        if found.broken is not None:
            what, path = found.broken
            pytest.fail(f"{setup}: {what}\nafter {described(setup, path)}")
        total += found.states
    return total


@pytest.mark.parametrize(("number", "program"), list(enumerate(PROGRAMS)))
def test_no_sequence_of_events_breaks_a_rule(number: int, program: str) -> None:
    # Every other case: all levels, axes and prefetches.
    cases = CASES[number % 2 :: 2]
    assert _explore(program, 20, cases) > 14 * len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_longer_sequence_of_events_breaks_a_rule(program: str) -> None:
    assert _explore(program, 2000) > 36 * 200


def _sample(setups: Iterable[Setup], num: int) -> None:
    """Run sequences of events of each world that are drawn at random."""
    for setup in setups:
        if (broken := sample(setup, num).broken) is not None:
            pytest.fail(f"{setup}: {broken[0]}\nafter {described(setup, broken[1])}")


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_sequence_drawn_at_random_breaks_a_rule(program: str) -> None:
    _sample((setup_of(case, program) for case in CASES[4::9]), 2)


def test_no_sequence_of_two_kinds_of_programs_breaks_a_rule() -> None:
    _sample((crossed(*each) for each in CROSSED), 20)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_more_sequences_drawn_at_random_break_a_rule(program: str) -> None:
    _sample((setup_of(case, program) for case in CASES), 20)


def _gathers(setup: Setup, actions: str) -> list[int]:
    return [number for kind, number in run(setup, actions).log if kind == "gather"]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_units_are_gathered_ahead_in_the_order_of_the_last_pass(prefetch: int) -> None:
    setup = Setup(prefetch=prefetch, parents=(-1, 0, 0, 0))
    step = "forward 0, call 3 0, return, call 2 0, return, call 1 0, return, return, backward 0"
    # After the first unit of the next forward, and after that of the first backward.
    in_forward = _gathers(setup, f"{step}, *, step, forward 0, call 3 0")
    in_backward = _gathers(setup, f"{step}, engine, engine")
    one_forward, one_step = [0, 3, 2, 1], [0, 3, 2, 1, 1, 2, 3]
    assert in_forward == [*one_step, 0, *[3, 2, 1][: 1 + prefetch]]
    assert in_backward == [*one_forward, *[1, 2, 3][: 1 + prefetch]]


# Looped models: once the order is known, a unit called in a row is gathered once in a pass.
def test_a_unit_that_runs_again_at_once_stays_gathered() -> None:
    calls = "call 1 0, return, call 1 0, return, call 1 0, return"
    step = f"forward 0, {calls}, call 2 0, return, return, backward 0, *"
    for prefetch, first, following in (
        (0, [0, 1, 1, 1, 2, 2, 1, 1, 1], [0, 1, 1, 1, 2, 2, 1, 1, 1]),
        (1, [0, 1, 1, 1, 2, 2, 1], [0, 1, 2, 2, 1]),
    ):
        setup = Setup(prefetch=prefetch, max_calls=3)
        assert _gathers(setup, f"{step}, step, {step}") == [*first, *following]


def test_rules_detect_a_gradient_that_is_not_reduced() -> None:
    setup = Setup()
    world = World(setup)
    for action in (("forward", 0), ("call", 1, False), ("return",), ("return",), ("backward", 0)):
        world.apply(action)
    # A unit that trains, and that the machine holds to be frozen.
    world.groups[1].is_trained = False
    world.units[1].state.groups.clear()
    with pytest.raises(AssertionError, match="group 1 was reduced 0 times instead of 1"):
        while world.engine_run != -1:
            world.apply(("engine",))


# It discarded its sums along the inner axis, and the others reduce theirs along the outer one.
@pytest.mark.parametrize("is_late", [0, 1])
def test_rank_whose_backward_failed_reduces_along_both_axes_in_a_call_of_reduce_grad(
    is_late: int,
) -> None:
    setup = Setup(zero=2, axes=2, accumulates=True, interrupts=True, max_forwards=2)
    step = "forward 0, call 1 0, return, return, backward 0"
    whole = run(setup, f"{step}, *, synchronize")
    failed = run(setup, f"{step}, engine, interrupt {is_late}, synchronize")
    assert failed.log == whole.log
    assert [kind for kind, _ in whole.log].count("outer") == 3


# Such as out of memory in the allocation of a gradient: the unit had its turn, and no reduction.
@pytest.mark.parametrize("setup", [Setup(zero=0), Setup(zero=2, axes=2), Setup(zero=1, waits=True)])
def test_reduction_that_failed_before_it_was_issued_is_issued_by_the_repair(setup: Setup) -> None:
    step = "forward 0, call 1 0, return, call 2 0, return, return, backward 0"
    whole = run(setup, f"{step}, *")
    for number in range(3):
        world = run(setup, step)
        group = world.groups[number]
        with mock.patch.object(group, "reduce", side_effect=RuntimeError("planned")):
            with pytest.raises(RuntimeError, match="planned"):
                while world.engine_run != -1:
                    world.apply(("engine",))
            world._interrupt(is_late=False)
        reductions.reset([world.roots[0].state])
        kinds = [[each for each in log if each[0] != "flags"] for log in (world.log, whole.log)]
        assert kinds[0] == kinds[1]


# As a failed loss: the machine does not know that a backward began.
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_reset_reduces_what_other_ranks_reduced_in_a_backward_that_reached_no_unit_here(
    zero: int, axes: int
) -> None:
    setup = Setup(zero=zero, axes=axes)
    forward = "forward 0, call 1 0, return, return"
    whole, failed = run(setup, f"{forward}, backward 0, *"), run(setup, forward)
    for world in (whole, failed):
        reductions.reset([world.roots[0].state])
        assert not world.roots[0].state.needs_repair
    assert failed.log == whole.log
    # Without a backward that is expected, nothing is reduced.
    reductions.reset([failed.roots[0].state])
    assert sum(kind == "reduce" for kind, _ in failed.log) == 3


# A unit that two roots share may be in flight for either of them when the backward ends.
def test_no_root_ends_its_reductions_before_all_roots_have_waited() -> None:
    setup = Setup(zero=2, axes=2, parents=(-1, -1, 0, 1), max_live=9)
    forwards = "forward 0, call 2 0, return, return, forward 1, call 3 0, return, return"
    kinds = [kind for kind, _ in run(setup, f"{forwards}, backward 0, *").log]
    assert kinds.count("flags") == 2
    assert kinds.index("flags") == len(kinds) - 2


# A tensor that both units return, and the base of that view, call the outer unit's hook again.
def test_further_gradients_of_an_outer_unit_do_not_end_the_backward_of_an_inner_one() -> None:
    world = World(Setup(zero=2))
    for action in (("forward", 0), ("call", 1, False), ("return",), ("return",)):
        world.apply(action)
    outer = world.graphs[0]
    inner = outer.children[0].forward
    assert outer.forward is not None
    assert inner is not None
    inner.has_end_hook = False
    for action in (("backward", 0), ("engine",), ("engine",)):
        world.apply(action)
    events.first_gradient(outer.forward, has_grad=False)
    assert world.units[1].state.phase is Phase.BACKWARD
    while world.engine_run != -1:
        world.apply(("engine",))


# Its inputs need no gradient, so no hook marks the end of the backward of its later forward.
def test_further_gradients_of_an_earlier_forward_do_not_end_the_backward_of_an_inner_unit() -> None:
    world = World(Setup(zero=2, parents=(-1, 0, 1), max_calls=2))
    twice = [("call", 1, False), ("call", 2, False), ("return",), ("return",)] * 2
    for action in (("forward", 0), *twice, ("return",)):
        world.apply(action)
    earlier, later = (child.forward for child in world.graphs[0].children)
    inner = world.graphs[0].children[0].children[0].forward
    assert earlier is not None
    assert later is not None
    assert inner is not None
    inner.has_end_hook = False
    world.engine_run = 1
    for forward in (later, earlier, inner):
        events.first_gradient(forward, has_grad=False)
    events.first_gradient(earlier, has_grad=False)
    assert world.units[2].state.phase is Phase.BACKWARD
