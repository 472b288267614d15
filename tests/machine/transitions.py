"""Transitions: events of the machine with the situation in which each was reported.

    python -m tests.machine.transitions

writes those that random walks meet to `transitions.txt`, in a minute; run it after a change of the
machine or of its worlds. What random programs of torch meet besides (`tests.random.campaign`)
escapes the rules of all worlds, or is a state that the machine should not reach. A *situation* is
read from the machine's state only, as words. Each event gives two rows: the words of its unit, and
those of the root's passes, each with a few words of the root. All of them in one row, or more words
such as what is in flight, would be too many to explore.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_fsdp_v2.runtime import machine
from megatron_fsdp_v2.runtime.machine import events, reductions, weights
from megatron_fsdp_v2.runtime.machine.state import Forward, Phase, RootState, UnitState
from tests.machine.executors import Broken
from tests.machine.walks import Walk

FILE = Path(__file__).with_suffix(".txt")
NUM_WALKS = 16000
"""Number of random walks of the file."""

type Row = tuple[str, str, str]
"""An event with its arguments; words of its unit, `of a root` or `passes`; words of the root."""

_OUTSIDE = {
    reductions: ("defer", "end", "make_room", "repair", "synchronize"),
    weights: ("free", "free_if_outdated", "gather", "wait"),
}
"""What others than `events` call from outside of the machine."""
_UNWATCHED = {"adopt", "graph_replayed", "is_in_backward", "recomputes"}
"""Questions, and what happens in every state."""


def _words(*words: str, **flags: bool) -> str:
    return " ".join([*filter(None, words), *(name for name, holds in flags.items() if holds)])


def _of_unit(unit: UnitState) -> str:
    flags = {"gathered": unit.is_gathered, "recomputing": unit.is_recomputing}
    return _words(unit.phase.value, root=unit.is_root, **flags)


def _of_root(root: RootState, unit: UnitState | None) -> tuple[str, str]:
    """Return a few words of a root; and with those of its passes."""
    passing = root.pass_unit
    few = _words(root.engine.value, nested=root.nested is not None)
    by = "" if passing is None else "of-unit" if passing is unit else "of-other"
    return few, _words(few, by, over=root.current.is_over)


def _of_forward(forward: Forward) -> str:
    """Return the words of a forward whose backward is reported."""
    unit, root = forward.unit, forward.unit.root
    order = ""
    if unit.phase is Phase.BACKWARD and forward.number != unit.backward_number:
        order = "later" if forward.number > unit.backward_number else "earlier"
    is_now = forward.passed is root.current
    return _words(
        "" if forward.passed is root.passed else "current-pass" if is_now else "other-pass",
        order,
        repeated=forward.is_recomputed,
        inside=forward.is_nested,
        endless=not forward.has_end_hook,
    )


def rows(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Row, Row]:
    """Return the rows of a call of one of the machine's functions."""
    subject, words = args[0], [name, *(key for key, value in kwargs.items() if value is True)]
    unit = None if isinstance(subject, RootState) else subject
    if isinstance(subject, Forward):
        unit = subject.unit
        # Whether the backward makes a graph decides an error alone.
        words = [name, _of_forward(subject)]
    elif name in ("enter_module", "leave_module") and args[1] in subject.pending_modules:
        words.append("pending")
    few, passes = _of_root(subject if unit is None else unit.root, unit)
    event = _words(*words)
    of_unit = "of a root" if unit is None else _of_unit(unit)
    return (event, of_unit, few), (event, "passes", passes)


@contextlib.contextmanager
def recording(met: set[Row]) -> Iterator[None]:
    """Add the rows of all events that are reported inside the context to a set."""

    def watched(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # The machine calls some of these functions itself.
            if not sys._getframe(1).f_globals["__name__"].startswith(machine.__name__):
                met.update(rows(name, args, kwargs))
            return function(*args, **kwargs)

        return call

    own = [name for name, _ in inspect.getmembers(events, _is_event)]
    with contextlib.ExitStack() as stack:
        for module, names in {events: own, **_OUTSIDE}.items():
            for name in names:
                new = watched(name, getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, new))
        yield


def _is_event(value: object) -> bool:
    if not inspect.isfunction(value) or value.__module__ != events.__name__:
        return False
    return not value.__name__.startswith("_") and value.__name__ not in _UNWATCHED


def walked(seeds: Iterable[int]) -> tuple[set[Row], int]:
    """Return the rows of random walks, and how many broke a rule, which are left out."""
    found: set[Row] = set()
    num_broken = 0
    for seed in seeds:
        met: set[Row] = set()
        try:
            with recording(met):
                Walk(random.Random(seed)).walk()
        except (Broken, RuntimeError):
            num_broken += 1
        else:
            found |= met
    return found, num_broken


def shown(found: Iterable[Row]) -> str:
    """Return rows as sorted lines."""
    return "".join(f"{' | '.join(row)}\n" for row in sorted(found))


@functools.cache
def known() -> set[Row]:
    """Return the rows of the file."""
    lines = FILE.read_text().splitlines()
    return {(event, unit, root) for event, unit, root in (line.split(" | ") for line in lines)}


if __name__ == "__main__":
    rows_of_walks, broken = walked(range(NUM_WALKS))
    FILE.write_text(shown(rows_of_walks))
    sys.stdout.write(f"{len(rows_of_walks)} rows; {broken} of {NUM_WALKS} walks broke a rule\n")
