"""Progress of functions that may take more than a few seconds, for their callers."""

from collections.abc import Callable

type Advance = Callable[[int, int], object]
"""Called with what is done so far and with the whole, such as bytes."""


def unwatched(done: int, total: int) -> None:
    """Ignore progress."""
