"""A unit that is abandoned at any moment is as a new one: also in the middle of an event."""

from __future__ import annotations

import random
from typing import Any, override

import pytest

from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.runtime.machine import reductions
from megatron_fsdp_v2.runtime.machine.state import UnitState
from tests.machine.executors import ABSENT, Broken, Setup
from tests.machine.explore import shown
from tests.machine.programs import described
from tests.machine.setups import CASES, PROGRAMS, setup_of
from tests.machine.world import World

_OF_PROGRAM = {"do", "groups", "settings", "root", "reduced_with", "ancestors", "modules"}
_NUMBERS = {"backward_number", "first_number"}
FACTS = [name for name in UnitState.__dataclass_fields__ if name not in _OF_PROGRAM | _NUMBERS]
"""What a unit knows of passes."""


class Gone(Exception):
    """A rank is lost: a collective fails."""


class Losing(World):
    """A world in which a collective fails, after some number of them."""

    def __init__(self, setup: Setup) -> None:
        self.num_left = 10**9
        super().__init__(setup)

    @override
    def communicate(self, kind: str, number: int) -> None:
        if not self.num_left:
            raise Gone
        self.num_left -= 1
        super().communicate(kind, number)


def _walk(setup: Setup, chance: random.Random, most: int) -> tuple[Losing, list[Any]]:
    """Return a world after up to `most` events, or when a collective failed."""
    world, path = Losing(setup), []
    if chance.random() < 0.7:
        world.num_left = chance.randrange(40)
    for _ in range(most):
        actions = world.actions()
        if not actions:
            break
        path.append(chance.choice(actions))
        try:
            world.apply(path[-1])
        except (Gone, Broken):
            # Walks are longer than the sequences that the rules are meant for.
            break
    return world, path


def _left_over(world: World) -> list[str]:
    """Abandon all units; return in what they differ from new ones."""
    new, found = World(world.setup), []
    for root in world.roots:
        reductions.abandon(root.state)
    for unit, fresh in zip(world.units, new.units, strict=True):
        if not unit.state.is_gone:
            pairs = [(n, getattr(unit.state, n), getattr(fresh.state, n)) for n in FACTS]
            found += [f"{unit.name}: {name} is {own}" for name, own, other in pairs if own != other]
    alive = {unit.number for unit in world.units if not unit.state.is_gone}
    for group in world.groups:
        if group.number not in alive:
            continue
        held = (group.full, group.partial, group.references, group.live, group.arrived)
        if held != (ABSENT, ABSENT, 0, WeightUse(0), 0):
            found.append(f"{group.name} holds {held}")
    return found + ["a backward is under way"] * bool(world.process.under_way)


def abandoned(program: str) -> str:
    """Abandon units of a kind of programs at random moments; return what is wrong after one."""
    chance = random.Random(program)
    for case in CASES[::7]:
        setup = setup_of(case, program)
        for _ in range(6):
            world, path = _walk(setup, chance, chance.randrange(60))
            if found := _left_over(world):
                return f"{found} after {shown(path)}, in {described(setup, path)}"
    return ""


@pytest.mark.parametrize("program", PROGRAMS)
def test_units_that_are_abandoned_are_as_new_ones(program: str) -> None:
    assert abandoned(program) == ""


def test_a_forward_from_before_raises() -> None:
    world = World(Setup())
    for action in (("forward", 0), ("call", 1, False), ("return",), ("return",), ("backward", 0)):
        world.apply(action)
    reductions.abandon(world.roots[0].state)
    with pytest.raises(RuntimeError, match=r"a forward of unit \d from before abort"):
        while world.engine_run != -1:
            world.apply(("engine",))
