"""Explores every sequence of events of a world, by depth-first search over hashed states."""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.machine.executors import Broken, Setup
from tests.machine.world import World

# Attributes whose values are numbers of forwards: only their order matters.
_NUMBERS = {"_number", "backward_number", "begins", "ends", "first", "last", "number", "position"}
# Executors are frozen by the world itself; logs and programs are compared, not state.
_LEFT_OUT = {"do", "report", "process", "world", "log", "program", "_numbers", "runs", "setup"}
_LEFT_OUT |= {"commands"}


def freeze(world: World) -> int:
    """Return the hash of a world's state: equal for states with the same future."""
    flat: list[Any] = []
    numbers: list[int] = []
    known: dict[int, int] = {}

    def number(value: int) -> None:
        numbers.append(len(flat))
        flat.append(value)

    def visit(value: Any) -> None:
        kind = type(value)
        if value is None or kind in (int, bool, str):
            flat.append(value)
        elif isinstance(value, enum.Enum):
            flat.append(value.name)
        elif kind in (list, tuple, deque):
            flat.append(len(value))
            for item in value:
                visit(item)
        elif kind in (set, frozenset):
            # Members were visited before, or are plain values.
            flat.append(tuple(sorted(known.get(id(member), member) for member in value)))
        elif isinstance(value, dict):
            flat.append(len(value))
            for key, item in value.items():
                visit(key)
                visit(item)
        elif id(value) in known:
            flat.append(("seen", known[id(value)]))
        else:
            known[id(value)] = len(known)
            visit_attributes(value)

    def visit_attributes(value: Any) -> None:
        kind = type(value)
        flat.append(kind.__name__)
        for name in _attributes(kind, value):
            item = getattr(value, name)
            if name in _NUMBERS and type(item) is int:
                number(item)
            elif name == "_begun":
                for key, begun in item.items():
                    visit(key)
                    number(begun)
            elif name == "deferred":
                for begun, forward in item.items():
                    number(begun)
                    visit(forward)
            elif name in ("version", "weight_version", "model_version"):
                # Only whether weights are current matters.
                flat.append(-1 if item < 0 else world.version - item)
            else:
                visit(item)

    for unit in world.units:
        known[id(unit.state)] = len(known)
    for unit in world.units:
        visit_attributes(unit.state)
    visit([root.state for root in world.roots])
    visit(world)
    places = {value: place for place, value in enumerate(sorted({flat[i] for i in numbers}))}
    for index in numbers:
        flat[index] = places[flat[index]]
    return hash(tuple(flat))


_NAMES: dict[type, tuple[str, ...]] = {}


def _attributes(kind: type, value: Any) -> Iterable[str]:
    names = _NAMES.get(kind)
    if names is None:
        slots = getattr(kind, "__slots__", None)
        own = slots if slots is not None else tuple(vars(value))
        names = _NAMES[kind] = tuple(name for name in own if name not in _LEFT_OUT)
    return names


@dataclass
class Explored:
    """Result of an exploration.

    Attributes:
        states: Number of distinct states.
        broken: What did not hold, with the shortest sequence of actions found.
        logs: Of each program that ranks run together, the collectives of every rank's way.
    """

    states: int = 0
    broken: tuple[str, list[tuple[Any, ...]]] | None = None
    logs: dict[tuple[str, ...], set[tuple[Any, ...]]] = field(default_factory=dict)


def explore(
    setup: Setup, most: int = 1_000_000, on_state: Callable[[World], None] | None = None
) -> Explored:
    """Explore all sequences of events.

    A path is run again from the beginning after each branch; states that were reached before are
    not continued.

    Args:
        setup: What the world consists of.
        most: Number of states at which the exploration ends.
        on_state: Called with the world in each new state.
    """
    result = Explored()
    seen: set[int] = set()
    chance = random.Random(0)
    left: list[list[tuple[Any, ...]]] = [[]]
    while left and len(seen) < most:
        path = left.pop()
        world = World(setup)
        try:
            for action in path:
                world.apply(action)
            while True:
                state = freeze(world)
                key = hash((state, tuple(world.program), tuple(world.log)))
                if key in seen:
                    break
                seen.add(key)
                if on_state is not None:
                    on_state(world)
                _compare(world, result)
                actions = world.actions()
                if not actions:
                    break
                # At random, so that an exploration that ends early has seen all kinds of events.
                chance.shuffle(actions)
                left.extend([*path, other] for other in actions[1:])
                path = [*path, actions[0]]
                world.apply(actions[0])
        except (Broken, RuntimeError) as error:
            result.broken = (f"{type(error).__name__}: {error}", path)
            break
    result.states = len(seen)
    return result


def sample(setup: Setup, num: int) -> Explored:
    """Run sequences of events that are drawn at random, each up to its end.

    Where few of many sequences run, these differ more than those of `explore`, and take less time.
    Where ranks may differ, a second rank runs the program of each one in its own way.

    Args:
        setup: What the world consists of.
        num: Number of sequences.
    """
    result = Explored()
    chance = random.Random(0)
    for index in range(num):
        wanted: list[str] | None = None
        for _ in range(2 if setup.zero < 3 or setup.direct or setup.misses else 1):
            path: list[tuple[Any, ...]] = []
            try:
                wanted = _draw(setup, chance, path, result, wanted, by_kind=bool(index % 2))
            except (Broken, RuntimeError) as error:
                result.broken = (f"{type(error).__name__}: {error}", path)
                return result
            result.states += len(path)
    return result


def _draw(
    setup: Setup,
    chance: random.Random,
    path: list[tuple[Any, ...]],
    result: Explored,
    wanted: list[str] | None,
    *,
    by_kind: bool,
) -> list[str]:
    """Run a sequence of events, and return its program.

    Args:
        setup: What the world consists of.
        chance: Draws the events.
        path: Receives the events.
        result: Receives the collectives.
        wanted: The program, if it is given.
        by_kind: Whether kinds of events, not events, are equally likely.
    """
    world = World(setup)
    while True:
        actions = world.actions()
        chance.shuffle(actions)
        if by_kind:
            ranks = {kind: chance.random() for kind in sorted({action[0] for action in actions})}
            actions.sort(key=lambda action: ranks[action[0]])
        for action in actions:
            path.append(action)
            world.apply(action)
            if wanted is None or wanted[: len(world.program)] == world.program:
                break
            path.pop()
            world = World(setup)
            for earlier in path:
                world.apply(earlier)
        else:
            return world.program
        _compare(world, result)


def _compare(world: World, result: Explored) -> None:
    """Compare collectives of ranks that run the same program, where all of them have arrived."""
    if world.open or world.engine_run != -1 or world.is_ahead or world.must_reset:
        return
    if any(root.state.needs_repair for root in world.roots):
        return
    logs = result.logs.setdefault(tuple(world.program), set())
    logs.add(tuple(world.log))
    if len(logs) > 1:
        one, other = sorted(logs)[:2]
        differ = (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
        same = next(differ, min(len(one), len(other)))
        raise Broken(
            f"ranks issue different collectives after {same} equal ones, in the program "
            f"{', '.join(world.program)}: {one[same : same + 4]} and {other[same : same + 4]}"
        )


def run(setup: Setup, actions: str) -> World:
    """Return a world after a sequence of actions; `*` lets the engine run to its end.

    Raises:
        ValueError: The program is not one that the exploration of the setup may run.
    """
    world = World(setup)
    for text in actions.split(", "):
        name, *numbers = text.split()
        if name == "*":
            while world.engine_run != -1:
                world.apply(("engine",))
        else:
            action = (name, *map(int, numbers))
            if action not in world.actions():
                raise ValueError(f"{text} cannot happen here: {shown(world.actions())}")
            world.apply(action)
    return world


def shown(path: list[tuple[Any, ...]]) -> str:
    """Return a sequence of actions in words."""
    return ", ".join(" ".join(map(str, action)) for action in path)
