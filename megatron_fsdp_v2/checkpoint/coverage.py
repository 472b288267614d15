"""Do the chunks of a tensor cover it, every element once?"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

__all__ = ["coverage_problems"]

_MAX_CORNERS = 1 << 23


def coverage_problems(key: str, entry: TensorStorageMetadata) -> Iterator[str]:
    """What is wrong with the chunks of a tensor, a sentence each."""
    total, covered = math.prod(entry.size), 0
    for chunk in entry.chunks:
        ends = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        if any(first + size > length for first, size, length in ends):
            yield f"{key} has a chunk at {tuple(chunk.offsets)} that reaches out of it"
        covered += math.prod(chunk.sizes)
    if covered != total:
        yield f"{key} has {total} elements, and its chunks {covered}"
    if len({tuple(chunk.offsets) for chunk in entry.chunks}) != len(entry.chunks):
        yield f"{key} has several chunks at the same place"
    elif covered == total and not _is_tiled(entry.size, entry.chunks):
        yield f"{key} has chunks that overlap, and elements that are in none"


def _is_tiled(size: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether boxes fill a box without overlapping.

    They do just where the corners of all of them, added up with the sign a corner has in a sum over
    a box, are those of the whole. That takes time in proportion to the boxes, not to their pairs.
    """
    boxes = [chunk for chunk in chunks if 0 not in chunk.sizes]
    if len(boxes) <= 1:
        return True
    # Along the others every box is as long as the whole.
    dims = [
        d
        for d, length in enumerate(size)
        if any(box.offsets[d] != 0 or box.sizes[d] != length for box in boxes)
    ]
    if len(boxes) << len(dims) > _MAX_CORNERS:
        # Nobody shards along so many dimensions.
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sides in itertools.product((0, 1), repeat=len(dims)):
        sign = -1 if sum(sides) % 2 else 1
        for box in boxes:
            corner = (box.offsets[d] + at * box.sizes[d] for d, at in zip(dims, sides, strict=True))
            corners[tuple(corner)] += sign
        whole = tuple(at * size[d] for d, at in zip(dims, sides, strict=True))
        corners[whole] -= sign
    return not any(corners.values())
