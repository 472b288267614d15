"""Tests whose body runs on every rank of a pool."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.distributed.wrapping import MESHES
from tests.ranks import DEFAULT_TIMEOUT_S, RankPools

MOST_CHARACTERS = 500
"""Maximum length of a value that is shown with a failed assertion."""


def on_ranks(
    ranks: int | str | Callable[..., int],
    *,
    pools: str = "pools",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **cases: Iterable[Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test's body on every rank, with the arguments that pytest passes.

    An assertion that fails on a rank fails the test and shows the plain local values of its
    function. Write assertions after the last collective, so that no rank waits for a failed one.

    Args:
        ranks: The number of ranks; or the name of an argument that is a number, sizes of a mesh or
            the name of a mesh; or a function of the arguments.
        pools: Name of the fixture of rank pools.
        timeout_s: Timeout of the whole body.
        cases: Values of arguments by name; every combination is a case.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            started: RankPools = given.pop(pools)
            number = ranks(**given) if callable(ranks) else ranks
            if isinstance(number, str):
                number = _number(given[number])
            name = (body.__module__, body.__name__)
            started(number).run(_run_body, *name, given, timeout_s=timeout_s)

        signature = inspect.signature(body)
        fixture = inspect.Parameter(pools, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[fixture, *signature.parameters.values()]
        )
        for argument, values in cases.items():
            test = pytest.mark.parametrize(argument, values)(test)
        return test

    return decorate


def _number(size: Any) -> int:
    if isinstance(size, int):
        return size
    # Cases of some tests are objects with a `mesh`.
    return math.prod(MESHES[size][0] if isinstance(size, str) else getattr(size, "mesh", size))


def _run_body(module: str, name: str, given: dict[str, Any]) -> None:
    body = getattr(importlib.import_module(module), name).__wrapped__
    try:
        body(**given)
    except AssertionError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        for key, value in frames[-1].f_locals.items():
            if _is_plain(value):
                error.add_note(f"{key} = {repr(value)[:MOST_CHARACTERS]}")
        raise


def _is_plain(value: Any) -> bool:
    """Whether a value can be shown without reading a tensor, which may be collective."""
    if isinstance(value, dict):
        return all(_is_plain(part) for item in value.items() for part in item)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
