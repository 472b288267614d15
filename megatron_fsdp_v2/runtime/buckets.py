"""Small things put together, so that they share a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

__all__ = ["Together", "buckets"]


def buckets[ItemT](
    items: Iterable[ItemT], nbytes: Callable[[ItemT], int], most: int
) -> Iterator[list[ItemT]]:
    """Items that follow each other, as many together as take so many bytes at most, or one.

    Args:
        items: The items.
        nbytes: What one takes; nothing is put together with one that takes none.
        most: Bytes.
    """
    bucket: list[ItemT] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if bucket and (not size or not total or total + size > most):
            yield bucket
            bucket, total = [], 0
        bucket.append(item)
        total += size
    if bucket:
        yield bucket


type Together = Callable[[], AbstractContextManager[object]]
"""A context in which collectives are put off to its end, and issued in one."""
