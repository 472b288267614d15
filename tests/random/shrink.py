"""Shrinks a failing case while it fails in the same way."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import MISSING, replace
from typing import Any

from tests.random.cases import Case, Node
from tests.random.rules import broken_rule

Fails = Callable[[Case], bool]
"""Whether a case fails in the same way."""

SIMPLER = ("mlp", "spare", "odd", "embed", "normed", "act")
"""Kinds of nodes that a linear layer may replace."""


def shrink(case: Case, fails: Fails, most_tries: int = 400) -> Case:
    """Shrink a failing case by greedy steps.

    Args:
        case: A failing case.
        fails: Runs a case.
        most_tries: Maximum number of cases to run.
    """
    tried, changed = 0, True
    while changed:
        changed, position = False, 0
        while True:
            # Candidates that passed are tried again only in the next round.
            candidate = next(itertools.islice(smaller(case), position, None), None)
            if candidate is None:
                break
            if broken_rule(candidate):
                position += 1
                continue
            if tried >= most_tries:
                return case
            tried += 1
            if fails(candidate):
                case, changed = candidate, True
            else:
                position += 1
    return case


def smaller(value: Any) -> Iterator[Any]:
    """Yield a case, or part of a case, with one simplification each; the largest first."""
    if isinstance(value, tuple):
        yield from _shorter(value)
        for index, item in enumerate(value):
            if dataclasses.is_dataclass(item):
                for changed in smaller(item):
                    yield (*value[:index], changed, *value[index + 1 :])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # The program is the last field of a case.
        for field in reversed(dataclasses.fields(value)):
            now, plain = getattr(value, field.name), field.default
            if field.default_factory is not MISSING:
                plain = field.default_factory()
            if plain is not MISSING and now != plain:
                yield replace(value, **{field.name: plain})
            for changed in smaller(now):
                yield replace(value, **{field.name: changed})
        if isinstance(value, Node) and value.kind in (
            "mlp",
            "spare",
            "odd",
            "embed",
            "normed",
            "act",
        ):
            yield replace(value, kind="linear", how="", size=0)


def _shorter(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the items without a half, a quarter, ... or one, or with a module's children for it."""
    size = len(items)
    while size >= 1:
        for start in range(0, len(items), size):
            yield items[:start] + items[start + size :]
        size //= 2
    for index, item in enumerate(items):
        if isinstance(item, Node) and item.children:
            yield items[:index] + item.children + items[index + 1 :]
