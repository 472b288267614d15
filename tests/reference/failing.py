"""Failures that are planned: hooks that raise, and those who do not hear of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class PlannedFailure(Exception):
    """Raised on purpose, inside a forward or a backward."""


def fail(*args: Any) -> None:
    """A hook of any kind."""
    raise PlannedFailure


def fail_when_it_comes_back(module: Any, args: Any, output: torch.Tensor) -> None:
    """A forward hook that has the backward fail where it comes to the output."""
    output.register_hook(fail)


@contextlib.contextmanager
def failing(handle: Any) -> Iterator[None]:
    """Nobody hears of what a hook raises; it is removed in the end."""
    with contextlib.suppress(PlannedFailure):
        yield
    handle.remove()
