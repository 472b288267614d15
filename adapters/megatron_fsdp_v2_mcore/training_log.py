"""Megatron's logging of an iteration: who logs something of our own does so around it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["around_training_log", "training_globals"]


def training_globals() -> Any:
    """Megatron's module of arguments and writers."""
    # By name: whoever uses Megatron-Core alone never comes here.
    return importlib.import_module("megatron.training.global_vars")


def around_training_log[T](
    original: Callable[..., Any], before: Callable[[], T], after: Callable[[int, T], None]
) -> Callable[..., Any]:
    """Wrap Megatron's logging of an iteration.

    Args:
        original: `training_log`.
        before: Called before anything that Megatron does to log it.
        after: Called after it, with the iteration and what `before` returned.
    """

    def training_log(
        loss_dict: Any,
        total_loss_dict: Any,
        learning_rate: Any,
        iteration: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        found = before()
        result = original(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)
        after(iteration, found)
        return result

    return training_log
