"""Writing a folder of torch's distributed checkpoint tensor by tensor.

Torch's own writer keeps what it has written until a file is complete. This one holds one block at
a time, so that a model of any size can be written by a process that could not hold it.
"""

from __future__ import annotations

import pickle
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

__all__ = ["FolderWriter"]

FILE_BYTES = 4 << 30


class FolderWriter:
    """Writes blocks of tensors, and objects, one after the other.

    Args:
        path: The folder; made if it is not there.
        file_bytes: How long a file may be before the next one is begun.
    """

    def __init__(self, path: Path, file_bytes: int = FILE_BYTES) -> None:
        self._path = path
        self._file_bytes = file_bytes
        self._num_files = 0
        self._file: BinaryIO | None = None
        self._entries: dict[str, Any] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        path.mkdir(parents=True, exist_ok=True)

    def add_block(
        self, key: str, shape: tuple[int, ...], offset: tuple[int, ...], data: torch.Tensor
    ) -> None:
        """Write a block of a tensor.

        Args:
            key: Name of the tensor.
            shape: Its shape.
            offset: Where the block starts in it.
            data: The block, with as many dimensions.

        Raises:
            ValueError: Another block of the tensor said something else of its shape or dtype.
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
        chunk = ChunkStorageMetadata(torch.Size(offset), data.shape)
        entry.chunks.append(chunk)
        index = MetadataIndex(key, chunk.offsets, len(entry.chunks) - 1)
        self._write(index, lambda file: torch.save(data.contiguous(), file))

    def add_object(self, key: str, value: Any) -> None:
        """Write something that is no tensor."""
        self._entries[key] = BytesStorageMetadata()
        self._write(MetadataIndex(key), lambda file: torch.save(value, file))

    def finish(self) -> None:
        """Write what makes the folder a checkpoint; until then it is none."""
        self._close()
        metadata = Metadata(
            state_dict_metadata=self._entries,
            storage_data=self._storage,
            storage_meta=StorageMeta(checkpoint_id=str(self._path)),
            version="1.0.0",
        )
        unfinished = self._path / ".metadata.tmp"
        with unfinished.open("wb") as file:
            pickle.dump(metadata, file)
        unfinished.rename(self._path / ".metadata")

    def _write(self, index: MetadataIndex, write: Callable[[BinaryIO], object]) -> None:
        file = self._open()
        offset = file.tell()
        write(file)
        name = Path(file.name).name
        self._storage[index] = _StorageInfo(name, offset, file.tell() - offset)

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
