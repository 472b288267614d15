"""Which stored chunks of a tensor have something of a block that is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

__all__ = ["Piece", "ReadRequest", "SavedChunks", "overlap"]


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A block of a checkpoint's tensor, and where to put it.

    Attributes:
        key: Name of the tensor in the checkpoint.
        offset: Where the block starts in it.
        target: What to fill, with as many dimensions as the tensor in the checkpoint, on any
            device; elements are converted to its dtype.
    """

    key: str
    offset: tuple[int, ...]
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """What one stored chunk has of one wanted block.

    Attributes:
        index: The chunk.
        sizes: Its shape.
        start: Where the piece starts in the chunk.
        target: Where to put it.
    """

    index: MetadataIndex
    sizes: tuple[int, ...]
    start: tuple[int, ...]
    target: torch.Tensor


def overlap(block: ReadRequest, chunk: ChunkStorageMetadata) -> Piece | None:
    """What a chunk has of a block; None where they do not meet."""
    start, inside = [], []
    for wanted, length, first, size in zip(
        block.offset, block.target.shape, chunk.offsets, chunk.sizes, strict=True
    ):
        low, high = max(wanted, first), min(wanted + length, first + size)
        if low >= high:
            return None
        start.append(low - first)
        inside.append(slice(low - wanted, high - wanted))
    return Piece(
        MetadataIndex(block.key, chunk.offsets),
        tuple(chunk.sizes),
        tuple(start),
        block.target[tuple(inside)],
    )


class SavedChunks:
    """The chunks of a tensor, found by layer and expert instead of by trying all of them."""

    def __init__(self, entry: TensorStorageMetadata) -> None:
        self._all = entry.chunks
        self._depth = 0
        while self._depth < len(entry.size) and all(
            c.sizes[self._depth] == 1 for c in entry.chunks
        ):
            self._depth += 1
        self._by_front: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
        for chunk in entry.chunks:
            front = tuple(chunk.offsets[: self._depth])
            self._by_front.setdefault(front, []).append(chunk)

    def near(self, block: ReadRequest) -> Sequence[ChunkStorageMetadata]:
        """Those of the chunks that may overlap a block, and few others."""
        depth = self._depth
        if any(length != 1 for length in block.target.shape[:depth]):
            return self._all
        return self._by_front.get(tuple(block.offset[:depth]), [])
