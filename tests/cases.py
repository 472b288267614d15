"""Cases of parametrized tests, some of which run in the longer suites only."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

QUICK_STRATEGIES = ("optim", "optim_grads_params")
"""The strategies whose communication differs most; see `quick_strategies`."""


def longer(*values: Any, id: str | None = None) -> Any:
    """Return a case that runs in the longer suites only."""
    return pytest.param(*values, id=id, marks=pytest.mark.functional)


def quick_if(is_quick: bool, *values: Any, id: str | None = None) -> Any:
    """Return a case that runs in the longer suites only, unless `is_quick`."""
    return pytest.param(*values, id=id) if is_quick else longer(*values, id=id)


def slow_if(is_slow: bool, *values: Any, id: str | None = None) -> Any:
    """Return a case that runs in the longer suites only; in more of their samples if `is_slow`."""
    return (
        pytest.param(*values, id=id, marks=pytest.mark.slow) if is_slow else longer(*values, id=id)
    )


def quick_only(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return the cases; all except the quick ones run in the longer suites only."""
    return [value if value in quick else longer(value) for value in values]


def quick_strategies(strategies: Iterable[str]) -> list[Any]:
    """Return strategies as cases; the two whose communication differs most are quick.

    ZeRO-1 reduces once per synchronization and gathers after a step; ZeRO-3 reduces in every
    backward and gathers for every use.
    """
    return quick_only(strategies, *QUICK_STRATEGIES)


def pairwise(
    levels: Mapping[str, Iterable[str]], conflict: Callable[[Mapping[str, str]], bool]
) -> list[dict[str, str]]:
    """Return few cases in which all pairs of levels of two factors occur (a greedy cover).

    Args:
        levels: Levels by factor.
        conflict: Whether two levels that cannot be combined are among the given ones, which are of
            two factors or more.
    """
    items = [[(factor, level) for level in of] for factor, of in levels.items()]
    # A dictionary, since the order of a set of strings differs between processes.
    left = dict.fromkeys(
        frozenset(pair)
        for first, second in itertools.combinations(items, 2)
        for pair in itertools.product(first, second)
        if not conflict(dict(pair))
    )
    cases, shuffled = [], random.Random(0)
    while left:
        case = dict(next(iter(left)))
        for of in items:
            if of[0][0] not in case:
                free = [item for item in of if not conflict(dict([*case.items(), item]))]
                shuffled.shuffle(free)
                new = {
                    item: sum(frozenset((item, o)) in left for o in case.items()) for item in free
                }
                case.update([max(free, key=new.__getitem__)])
        for pair in itertools.combinations(case.items(), 2):
            left.pop(frozenset(pair), None)
        cases.append({factor: case[factor] for factor in levels})
    return cases
