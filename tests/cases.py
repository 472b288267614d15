"""Cases of parametrized tests: those of every run, and those that are left to the longer suites."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def longer(*values: Any, id: str | None = None) -> Any:
    """A case that is left to the longer suites."""
    return pytest.param(*values, id=id, marks=pytest.mark.functional)


def quick_if(is_quick: bool, *values: Any, id: str | None = None) -> Any:
    """A case that is left to the longer suites unless it is said to be quick."""
    return pytest.param(*values, id=id) if is_quick else longer(*values, id=id)


def quick_only(values: Iterable[Any], *quick: Any) -> list[Any]:
    """These cases, of which all but the quick ones are left to the longer suites."""
    return [value if value in quick else longer(value) for value in values]


def quick_strategies(strategies: Iterable[str]) -> list[Any]:
    """Strategies as cases, of which the two that differ most in what they communicate are quick.

    ZeRO-1 reduces once for each synchronization and gathers after a step; ZeRO-3 reduces in every
    backward and gathers for every use.
    """
    return quick_only(strategies, "optim", "optim_grads_params")


def quick_rows(rows: Iterable[tuple[Any, ...]], quick: Collection[Any]) -> list[Any]:
    """Cases of several values each, of which all but the quick ones are left to those, too."""
    return [quick_if(row in quick, *row) for row in rows]
