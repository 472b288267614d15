"""Errors a user of Megatron's command line can cause."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

__all__ = ["FlagError", "rejections_as_flag_errors"]


class FlagError(ValueError):
    """A flag, or a combination of flags, that this package cannot support; the message names it."""


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
