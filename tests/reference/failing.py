"""Injected failures: hooks that raise, and contexts that suppress the exception."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class PlannedFailure(Exception):
    """Raised on purpose, inside a forward or a backward."""


def fail(*args: Any) -> None:
    """Raise `PlannedFailure`; usable as any kind of hook."""
    raise PlannedFailure


def fail_in_backward(module: Any, args: Any, output: torch.Tensor) -> None:
    """Forward hook that makes the backward raise at the output."""
    output.register_hook(fail)


@contextlib.contextmanager
def failing(handle: Any) -> Iterator[None]:
    """Suppress the exception of a hook, and remove the hook at the end."""
    with contextlib.suppress(PlannedFailure):
        yield
    handle.remove()
