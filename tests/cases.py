"""Cases of parametrized tests, some of which run in the longer suites only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def longer(*values: Any, id: str | None = None) -> Any:
    """Return a case that runs in the longer suites only."""
    return pytest.param(*values, id=id, marks=pytest.mark.functional)


def quick_if(is_quick: bool, *values: Any, id: str | None = None) -> Any:
    """Return a case that runs in the longer suites only, unless `is_quick`."""
    return pytest.param(*values, id=id) if is_quick else longer(*values, id=id)


def quick_only(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return the cases; all except the quick ones run in the longer suites only."""
    return [value if value in quick else longer(value) for value in values]


def quick_strategies(strategies: Iterable[str]) -> list[Any]:
    """Return strategies as cases; the two whose communication differs most are quick.

    ZeRO-1 reduces once per synchronization and gathers after a step; ZeRO-3 reduces in every
    backward and gathers for every use.
    """
    return quick_only(strategies, "optim", "optim_grads_params")


def quick_rows(rows: Iterable[tuple[Any, ...]], quick: Collection[Any]) -> list[Any]:
    """Return cases of several values; all except the quick ones run in the longer suites only."""
    return [quick_if(row in quick, *row) for row in rows]
