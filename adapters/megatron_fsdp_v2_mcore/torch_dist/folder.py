"""Reading a folder of torch's distributed checkpoint piece by piece, without running what is in it.

Torch's own loading asks for whole state dicts, and unpickles whatever is no tensor. Here only
metadata, tensors and plain data of Megatron's are made from a file; anything else is refused.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, override

import torch
from megatron.core.safe_globals import SAFE_GLOBALS
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_fsdp_v2_mcore.checkpoint_check import read_metadata
from megatron_fsdp_v2_mcore.errors import FlagError

__all__ = ["CheckpointFolder", "Wanted"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block of a checkpoint's tensor, and where to put it.

    Attributes:
        key: Name of the tensor in the checkpoint.
        offset: Where the block starts in it.
        target: What to fill, with as many dimensions as the tensor in the checkpoint.
    """

    key: str
    offset: tuple[int, ...]
    target: torch.Tensor


class CheckpointFolder:
    """A folder of torch's distributed checkpoint, open for reading.

    Args:
        path: The folder; `checkpoint_check` has looked at it.

    Attributes:
        path: The folder.
        metadata: What torch's checkpoint knows about it.

    Raises:
        FlagError: Its metadata cannot be read, or is made of other things than metadata.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata = read_metadata(path)
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        self._chunks: dict[str, _SavedChunks] = {}

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None where there is none of that name."""
        entry = self.metadata.state_dict_metadata.get(key)
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None

    def has(self, key: str) -> bool:
        """Whether there is something of that name, a tensor or not."""
        return key in self.metadata.state_dict_metadata

    def object(self, key: str) -> Any:
        """Something that is no tensor.

        Raises:
            KeyError: There is nothing of that name.
            FlagError: It is made of something that Megatron's checkpoints are not made of.
        """
        info = self.metadata.storage_data[MetadataIndex(key)]
        with (self.path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            content = file.read(info.length)
        return load_plain(io.BytesIO(content), f"{key} in {self.path}")

    def fill(self, wanted: Sequence[Wanted]) -> list[int]:
        """Read blocks into their targets, one stored chunk in memory at a time.

        Args:
            wanted: Blocks of tensors that are there. Where a block reaches beyond the tensor, that
                part of the target is left alone.

        Returns:
            How many elements of each were read.
        """
        items: list[ReadItem] = []
        counts = [0] * len(wanted)
        for number, block in enumerate(wanted):
            for item in self._items(block, number):
                items.append(item)
                counts[number] += torch.Size(item.lengths).numel()
        storage = self.metadata.storage_data
        items.sort(key=lambda i: _place(storage[i.storage_index]))
        self._reader.read_data(LoadPlan(items), _Targets(wanted)).wait()
        return counts

    def _items(self, block: Wanted, number: int) -> Iterable[ReadItem]:
        near = self._saved(block.key).near(block)
        chunk = ChunkStorageMetadata(torch.Size(block.offset), block.target.shape)
        for item in create_read_items_for_chunk_list(block.key, near, [chunk]):
            yield ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(block.key, block.offset, number),
                dest_offsets=item.dest_offsets,
                storage_index=item.storage_index,
                storage_offsets=item.storage_offsets,
                lengths=item.lengths,
            )

    def _saved(self, key: str) -> _SavedChunks:
        if key not in self._chunks:
            entry = self.metadata.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata)
            self._chunks[key] = _SavedChunks(entry)
        return self._chunks[key]


class _SavedChunks:
    """The chunks of a tensor, found by layer and expert instead of by trying all of them."""

    def __init__(self, entry: TensorStorageMetadata) -> None:
        self._entry = entry
        self._depth = 0
        while self._depth < len(entry.size) and all(
            c.sizes[self._depth] == 1 for c in entry.chunks
        ):
            self._depth += 1
        self._by_front: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
        for chunk in entry.chunks:
            front = tuple(chunk.offsets[: self._depth])
            self._by_front.setdefault(front, []).append(chunk)

    def near(self, block: Wanted) -> TensorStorageMetadata:
        """The tensor with those of its chunks that may overlap a block, and few others."""
        depth = self._depth
        if any(length != 1 for length in block.target.shape[:depth]):
            return self._entry
        found = self._by_front.get(tuple(block.offset[:depth]), [])
        return TensorStorageMetadata(self._entry.properties, self._entry.size, found)


def load_plain(file: Any, what: str) -> Any:
    """Load plain data: numbers, containers, tensors and the few classes Megatron saves.

    Args:
        file: What `torch.save` wrote.
        what: What to call it in an error.

    Raises:
        FlagError: It holds something else.
    """
    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FlagError(
            f"{what} cannot be loaded as plain data ({str(error).splitlines()[0]}); do not use "
            "this checkpoint unless you know where it is from"
        ) from error


def _place(info: Any) -> tuple[str, int]:
    return info.relative_path, info.offset


class _Targets(LoadPlanner):
    """Tells torch's reader where to put what it reads; the plan is made already."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._wanted = wanted

    @override
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None
        target = self._wanted[number].target
        ends = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return target[tuple(slice(first, first + length) for first, length in ends)]

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: it was read in place."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise RuntimeError(f"{read_item.storage_index.fqn} is no tensor")

    @override
    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: blocks are known."""

    @override
    def create_local_plan(self) -> LoadPlan:
        raise RuntimeError("the plan is made by whom this planner is made for")

    @override
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    @override
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan
