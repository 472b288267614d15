"""Messages about flags of Megatron's command line that are not supported."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

from megatron_cpu_rehearsal.errors import FlagError

__all__ = ["FlagError", "flag_of", "optimizer_field", "rejections_as_flag_errors"]


def flag_of(name: str) -> str:
    """Return the flag of a field of Megatron's arguments, by Megatron's usual naming."""
    return f"--{name.replace('_', '-')}"


def optimizer_field(name: str, value: Any) -> str:
    """Format a field of Megatron's `OptimizerConfig` for a message of a script without flags."""
    return f"OptimizerConfig.{name} = {value!r}"


@contextlib.contextmanager
def rejections_as_flag_errors(beginning: str) -> Iterator[None]:
    """Convert Megatron's errors about a command line to `FlagError`.

    Megatron checks flags with assertions and plain exceptions, some of them while it builds a
    model.

    Args:
        beginning: The beginning of the message.

    Raises:
        FlagError: Megatron raised such an error, which is its cause.
    """
    try:
        yield
    except FlagError:
        raise
    except (AssertionError, ValueError, RuntimeError, ImportError) as error:
        # For an assertion without a message, the message is its source line.
        frames = traceback.extract_tb(error.__traceback__)
        raise FlagError(f"{beginning}: {str(error) or frames[-1].line}") from error
