"""What a layout could be at best, slowly and plainly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Shape = tuple[int, ...]


def numel_of(shapes: Sequence[Shape]) -> int:
    """Elements of all parameters."""
    return sum(math.prod(shape) for shape in shapes)


def fits(items: Sequence[tuple[int, int]], num_shards: int, size: int, line: int = 1) -> bool:
    """Whether any order fits in slices of this size, each item at the first legal offset.

    The first legal offset is best for all that follow, so this misses no layout.

    Args:
        items: Elements of each parameter, and how many of them must not be cut.
        num_shards: Number of slices.
        size: Elements of a slice.
        line: Elements that starts of parameters are aligned to.
    """
    for order in set(itertools.permutations(items)):
        start = 0
        for numel, granule in order:
            for offset in range(start, start + 2 * size + line):
                cuts = range(-offset % size or size, numel, size)
                if offset % math.gcd(granule, line) == 0 and all(c % granule == 0 for c in cuts):
                    break
            else:
                start = num_shards * size + 1
                break
            start = offset + numel
        if start <= num_shards * size:
            return True
    return False
