"""Messages about flags of Megatron's command line that are not supported."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

from megatron_cpu_rehearsal.errors import FlagError

__all__ = ["FlagError", "flag_of", "optimizer_field", "rejections_as_flag_errors"]


def flag_of(name: str) -> str:
    """The flag that sets a field of Megatron's arguments, as most of them are called."""
    return f"--{name.replace('_', '-')}"


def optimizer_field(name: str, value: Any) -> str:
    """How a field of Megatron's `OptimizerConfig` is written in a message, where no flag set it."""
    return f"OptimizerConfig.{name} = {value!r}"


@contextlib.contextmanager
def rejections_as_flag_errors(beginning: str) -> Iterator[None]:
    """Say in Megatron's own words what it has against a command line.

    Megatron checks flags with assertions and plain exceptions, here and there also while it builds
    a model.

    Args:
        beginning: What the sentence begins with.

    Raises:
        FlagError: Megatron raised one of those; it is the cause.
    """
    try:
        yield
    except FlagError:
        raise
    except (AssertionError, ValueError, RuntimeError, ImportError) as error:
        # Many of its assertions have no words; then the line that was asserted has to do.
        frames = traceback.extract_tb(error.__traceback__)
        raise FlagError(f"{beginning}: {str(error) or frames[-1].line}") from error
