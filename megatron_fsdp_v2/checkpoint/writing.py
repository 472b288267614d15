"""Write a folder of torch's distributed checkpoint.

Torch's planner and writer do the work; a manifest is added. Entries may be read when they are
written, so that a process can write a model that does not fit into its memory.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast, override

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_fsdp_v2.checkpoint.errors import naming_full_disk
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, Place, write_manifest
from megatron_fsdp_v2.checkpoint.replacing import sync


def pickled(value: Any) -> bytes:
    """What `torch.save` writes for a value."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that is all of its storage, which `torch.save` writes whole."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class Blocks:
    """Blocks of one tensor, each read when it is written.

    Args:
        shape: Shape of the tensor.
        dtype: Its dtype.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype
        self._blocks: dict[torch.Size, tuple[torch.Size, Callable[[], torch.Tensor]]] = {}

    def add(
        self, offset: Sequence[int], sizes: Sequence[int], read: Callable[[], torch.Tensor]
    ) -> None:
        """Add a block.

        Args:
            offset: Where it starts in the tensor.
            sizes: Its shape, of as many dimensions.
            read: Returns its elements.
        """
        self._blocks[torch.Size(offset)] = torch.Size(sizes), read

    def read(self, offset: torch.Size) -> torch.Tensor:
        """Read the block that starts at an offset."""
        return self._blocks[offset][1]()

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        del obj
        kind, about = WriteItemType.SHARD, TensorProperties(dtype=self.dtype)
        chunks = [ChunkStorageMetadata(at, sizes) for at, (sizes, _) in self._blocks.items()]
        data = [TensorWriteData(chunk, about, self.shape) for chunk in chunks]
        return [WriteItem(MetadataIndex(fqn, d.chunk.offsets), kind, tensor_data=d) for d in data]


class Planner(DefaultSavePlanner):
    """Torch's planner, for tensors, `Blocks`, and objects as the bytes to write, by name.

    Args:
        paths: Path of each entry in the nested state dict; written to the metadata.
    """

    def __init__(self, paths: Mapping[str, Any] | None = None) -> None:
        super().__init__(flatten_state_dict=paths is not None, flatten_sharded_tensors=False)
        self._paths = paths

    @override
    def create_local_plan(self) -> SavePlan:
        """Plan what this rank writes."""
        self.mappings = dict(self._paths or {})
        return super().create_local_plan()

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return an item as torch writes it."""
        index = write_item.index
        entry = self.state_dict[index.fqn]
        if isinstance(entry, bytes):
            return io.BytesIO(entry)
        if isinstance(entry, Blocks):
            assert index.offset is not None
            return entry.read(index.offset)
        return super().resolve_data(write_item)


def write_folder(
    folder: Path,
    entries: Mapping[str, Any],
    *,
    tied: Mapping[str, str] | None = None,
    paths: Mapping[str, Any] | None = None,
    has_manifest: bool = True,
) -> None:
    """Write a checkpoint in one process.

    Args:
        folder: Where to; created if it does not exist.
        entries: Tensors, `Blocks`, and objects as `pickled`, by name.
        tied: Other names of entries, each with the name of the entry.
        paths: As in `Planner`.
        has_manifest: Whether to write a manifest with checksums.
    """
    writer, planner = Writer(folder, tied or {}, has_manifest=has_manifest), Planner(paths)
    planner.set_up_planner(dict(entries), is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [written.value()])


@dataclass(frozen=True)
class _CheckedResult(WriteResult):
    """Where an item was written, and its checksum."""

    crc32: int = 0


class _Checksummed:
    """Computes the checksum of what is written to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.crc32 = file, 0

    def write(self, content: Any) -> int:
        self.crc32 = zlib.crc32(content, self.crc32)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def _write_item(file: BinaryIO, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
    offset, out = file.tell(), _Checksummed(file)
    data = planner.resolve_data(item)
    if isinstance(data, torch.Tensor):
        torch.save(own_storage(data.detach().cpu()), cast("BinaryIO", out))
    else:
        out.write(data.getbuffer())
    length = file.tell() - offset
    return _CheckedResult(item.index, length, _StorageInfo(name, offset, length), out.crc32)


def _place(result: WriteResult) -> Place:
    assert isinstance(result, _CheckedResult)
    info: _StorageInfo = result.storage_data
    return info.relative_path, info.offset, info.length, result.crc32


class Writer(FileSystemWriter):
    """Torch's writer of files, with checksums of all items in a manifest.

    Args:
        folder: Where to write.
        tied: Other names of entries, each with the name of the entry.
        has_manifest: Whether to write a manifest.
    """

    def __init__(self, folder: Path, tied: Mapping[str, str], *, has_manifest: bool = True) -> None:
        super().__init__(folder)
        self._folder, self._tied, self._has_manifest = folder, tied, has_manifest

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's items into one file."""
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        results: list[WriteResult] = []
        name = f"{plan.storage_data.prefix}0.distcp"
        # A rank that holds only what others write has no file.
        if plan.items:
            with naming_full_disk(self._folder), (self._folder / name).open("wb") as file:
                results += [_write_item(file, name, item, planner) for item in plan.items]
                file.flush()
                os.fsync(file.fileno())
        written.set_result(results)
        return written

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata and manifest. On the first rank only."""
        with naming_full_disk(self._folder):
            written = [result for of_rank in results for result in of_rank]
            every = [*written, *self._named_again(metadata, written)]
            super().finish(metadata, [every])
            if self._has_manifest:
                places = {result.index: _place(result) for result in every}
                write_manifest(self._folder, len(results), metadata, places)
                sync(self._folder / MANIFEST)
            sync(self._folder)

    def _named_again(
        self, metadata: Metadata, results: Sequence[WriteResult]
    ) -> Iterator[WriteResult]:
        """Results for tensors that were written under another of their names."""
        entries = metadata.state_dict_metadata
        for key, written in self._tied.items():
            entries[key] = entries[written]
            for result in results:
                if result.index.fqn == written:
                    index = MetadataIndex(key, result.index.offset, result.index.index)
                    yield replace(result, index=index)
