"""Write a folder of torch's distributed checkpoint block by block.

Torch's own writer needs a whole state dict. This one needs one block at a time, so that a process
can write a model that does not fit into its memory.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_fsdp_v2.checkpoint.manifest import Manifest, StoredFile, StoredItem
from megatron_fsdp_v2.checkpoint.metadata import METADATA

__all__ = ["Checksummed", "FolderWriter"]

FILE_BYTES = 4 << 30


class Checksummed:
    """A file that computes the checksum of what is written to it.

    Args:
        file: The file to write to.

    Attributes:
        crc32: CRC-32 of the bytes written.
        length: Number of bytes written.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc32 = 0
        self.length = 0

    def write(self, content: Any) -> int:
        """Write bytes, and return how many."""
        count = self._file.write(content)
        self.crc32 = zlib.crc32(content, self.crc32)
        self.length += count
        return count

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()


class FolderWriter:
    """Writes blocks of tensors and objects one after the other.

    Args:
        path: The folder; created if it does not exist.
        file_bytes: Length of a file after which the next one is started.
        has_manifest: Whether to write a manifest with checksums.
    """

    def __init__(
        self, path: Path, file_bytes: int = FILE_BYTES, *, has_manifest: bool = True
    ) -> None:
        self._path = path
        self._file_bytes = file_bytes
        self._has_manifest = has_manifest
        self._num_files = 0
        self._file: BinaryIO | None = None
        self._entries: dict[str, Any] = {}
        self._paths: dict[str, tuple[str, ...]] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._items: dict[str, list[StoredItem]] = {}
        path.mkdir(parents=True, exist_ok=True)

    def add_block(
        self,
        key: str,
        shape: tuple[int, ...],
        offset: tuple[int, ...],
        data: torch.Tensor,
        path: tuple[str, ...] = (),
    ) -> None:
        """Write a block of a tensor.

        Args:
            key: Name of the tensor.
            shape: Its shape.
            offset: Where the block starts in it.
            data: The block, with as many dimensions.
            path: Its path in the nested state dict that torch creates from the folder alone.

        Raises:
            ValueError: Another block of the tensor had another shape or dtype.
        """
        entry = self._entries.setdefault(
            key,
            TensorStorageMetadata(TensorProperties(dtype=data.dtype), torch.Size(shape), []),
        )
        if tuple(entry.size) != shape or entry.properties.dtype != data.dtype:
            raise ValueError(
                f"blocks of {key} do not belong to one tensor: {tuple(entry.size)} of "
                f"{entry.properties.dtype}, then {shape} of {data.dtype}"
            )
        if path:
            self._paths[key] = path
        chunk = ChunkStorageMetadata(torch.Size(offset), data.shape)
        entry.chunks.append(chunk)
        index = MetadataIndex(key, chunk.offsets, len(entry.chunks) - 1)
        block = data.detach().contiguous()
        if block.untyped_storage().nbytes() != block.nbytes:
            # torch.save writes the whole storage of a view.
            block = block.clone()
        self._write(index, lambda file: torch.save(block, file))

    def add_name(self, key: str, of: str, path: tuple[str, ...] = ()) -> None:
        """Give a written tensor another name; its blocks are stored once.

        Args:
            key: The other name.
            of: The name it was written under.
            path: As in `add_block`.
        """
        entry = self._entries[key] = self._entries[of]
        if path:
            self._paths[key] = path
        for number, chunk in enumerate(entry.chunks):
            place = self._storage[MetadataIndex(of, chunk.offsets)]
            self._storage[MetadataIndex(key, chunk.offsets, number)] = place

    def add_object(self, key: str, value: Any) -> None:
        """Write an object that is not a tensor."""
        self._entries[key] = BytesStorageMetadata()
        self._write(MetadataIndex(key), lambda file: torch.save(value, file))

    def finish(self) -> None:
        """Write metadata and manifest, which complete the checkpoint."""
        self._close()
        metadata = Metadata(
            state_dict_metadata=self._entries,
            planner_data=self._paths or None,
            storage_data=self._storage,
            storage_meta=StorageMeta(checkpoint_id=str(self._path)),
            version="1.0.0",
        )
        content = pickle.dumps(metadata)
        if self._has_manifest:
            files = {name: _stored_file(items) for name, items in self._items.items()}
            files[METADATA] = _stored_file([StoredItem(0, len(content), zlib.crc32(content))])
            Manifest(world_size=1, torch=torch.__version__, files=files).write(self._path)
        unfinished = self._path / f"{METADATA}.tmp"
        unfinished.write_bytes(content)
        unfinished.rename(self._path / METADATA)

    def _write(self, index: MetadataIndex, write: Callable[[Any], object]) -> None:
        file = self._open()
        name, offset = Path(file.name).name, file.tell()
        into = Checksummed(file)
        write(into)
        self._storage[index] = _StorageInfo(name, offset, into.length)
        self._items.setdefault(name, []).append(StoredItem(offset, into.length, into.crc32))

    def _open(self) -> BinaryIO:
        if self._file is None or self._file.tell() >= self._file_bytes:
            self._close()
            name = f"__0_{self._num_files}.distcp"
            self._file = (self._path / name).open("wb")
            self._num_files += 1
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _stored_file(items: list[StoredItem]) -> StoredFile:
    last = items[-1]
    return StoredFile(last.offset + last.length, tuple(items))
