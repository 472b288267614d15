"""Injected failures: hooks that raise, and contexts that suppress the exception."""

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
    """A forward hook that makes the backward raise at the output."""
    output.register_hook(fail)


@contextlib.contextmanager
def failing(handle: Any) -> Iterator[None]:
    """Suppress the exception of a hook, and remove the hook at the end."""
    with contextlib.suppress(PlannedFailure):
        yield
    handle.remove()
