"""Stage entries as of one moment, and write a folder of torch's distributed checkpoint of them.

Torch's planner and writer do the work; a manifest is added. Entries may be read when they are
written, so that a process can write a model that does not fit into its memory.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast, override

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
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
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_map_with_path

from megatron_fsdp_v2.checkpoint.errors import CheckpointError, naming_full_disk
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, Manifest
from megatron_fsdp_v2.checkpoint.metadata import METADATA
from megatron_fsdp_v2.checkpoint.replacing import sync
from megatron_fsdp_v2.checkpoint.unpickling import load_plain
from megatron_fsdp_v2.comm.backends import host_block, wait_for_device
from megatron_fsdp_v2.dtensor.sharded_rows import rows_like, rows_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of

__all__ = [
    "Blocks",
    "Planner",
    "Staged",
    "StoredObject",
    "Writer",
    "own_storage",
    "pack",
    "pickled",
    "stage",
    "write_folder",
]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as the bytes that are written.

    Attributes:
        content: What `torch.save` writes for it.
        is_written: Whether this rank may write it; of several ranks, any one does.
    """

    content: bytes
    is_written: bool = True

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        del obj
        item = WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)
        return [item] if self.is_written else []


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
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offset, sizes),
                    properties=properties,
                    size=self.shape,
                ),
            )
            for offset, (sizes, _) in self._blocks.items()
        ]


class Planner(DefaultSavePlanner):
    """Torch's planner, for tensors, `Blocks` and `StoredObject`s by name.

    Args:
        paths: Path of each entry in the nested state dict; written to the metadata.
    """

    def __init__(self, paths: Mapping[str, Any] | None = None) -> None:
        super().__init__(flatten_state_dict=paths is not None, flatten_sharded_tensors=False)
        self._paths = paths

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Set the entries."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if self._paths is not None:
            self.mappings = dict(self._paths)

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the values of an item."""
        entry = self.state_dict[index.fqn]
        if isinstance(entry, Blocks):
            assert index.offset is not None
            return entry.read(index.offset)
        return super().lookup_object(index)

    @override
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return an item as torch writes it."""
        if isinstance(object, StoredObject):
            return io.BytesIO(object.content)
        return super().transform_object(write_item, object)


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
        entries: Tensors, `Blocks` and `StoredObject`s by name.
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
        self._file = file
        self.crc32 = self.length = 0

    def write(self, content: Any) -> int:
        count = self._file.write(content)
        self.crc32 = zlib.crc32(content, self.crc32)
        self.length += count
        return count

    def flush(self) -> None:
        self._file.flush()


def _write_item(file: BinaryIO, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
    offset, out = file.tell(), _Checksummed(file)
    data = planner.resolve_data(item)
    if isinstance(data, torch.Tensor):
        torch.save(own_storage(data.detach().cpu()), cast("BinaryIO", out))
    else:
        out.write(data.getbuffer())
    place = _StorageInfo(name, offset, out.length)
    return _CheckedResult(item.index, out.length, place, out.crc32)


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
            every = [result for of_rank in results for result in of_rank]
            super().finish(metadata, [every, list(self._named_again(metadata, every))])
            if self._has_manifest:
                self._write_manifest(len(results), every)
            sync(self._folder)

    def _write_manifest(self, world_size: int, results: Sequence[WriteResult]) -> None:
        files: dict[str, dict[int, tuple[int, int]]] = {}
        for result in results:
            assert isinstance(result, _CheckedResult)
            info = result.storage_data
            items = files.setdefault(info.relative_path, {})
            items[info.offset] = info.length, result.crc32
        content = (self._folder / METADATA).read_bytes()
        files[METADATA] = {0: (len(content), zlib.crc32(content))}
        Manifest(world_size, torch.__version__, files).write(self._folder)
        sync(self._folder / MANIFEST)

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


def pack(name: str, value: Any) -> bytes:
    """Serialize plain data, and check that it can be loaded without running code.

    Args:
        name: Its name in errors.
        value: Plain data. Of a tensor that is a view, only the view is written.

    Returns:
        The bytes of `torch.save`.

    Raises:
        CheckpointError: It, or a part of it, could not be loaded again; names the part.
    """
    try:
        plain = tree_map_with_path(lambda at, leaf: _plain(name + keystr(at), leaf), value)
        content = pickled(plain)
    except RecursionError as error:
        raise CheckpointError(f"{name} is nested too deeply, or contains itself") from error
    try:
        load_plain(content, name)
    except CheckpointError as error:
        raise CheckpointError(f"{name} could not be loaded again ({error.__cause__})") from error
    return content


def _plain(path: str, value: Any) -> Any:
    """Check a leaf; tensors are moved to host memory."""
    if isinstance(value, torch.Tensor):
        return _plain_tensor(path, value)
    try:
        load_plain(pickled(value), path)
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise CheckpointError(
            f"{path} is of the type {kind}, which a checkpoint does not keep, because loading it "
            "would run code from the file; keep to numbers, strings, tuples, lists, dictionaries "
            "and tensors (of numpy, value.item() and torch.from_numpy(value))"
        ) from error
    return value


def _plain_tensor(path: str, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        raise CheckpointError(
            f"{path} is a {type(tensor).__name__}, of which every rank holds a part; only model "
            "and optimizer may hold such tensors, so put its full_tensor() there"
        )
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise CheckpointError(
            f"{path} is a {type(tensor).__name__}, which would be loaded as a plain tensor; put a "
            "plain tensor there"
        )
    if tensor.is_meta:
        raise CheckpointError(f"{path} is on the meta device and has no values to save")
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return own_storage(tensor)


@dataclass(frozen=True, slots=True)
class Staged:
    """Contents of a checkpoint, as of one moment.

    Attributes:
        entries: Entries by name.
        tied: Other names of entries, each with the name of the entry.
        paths: Paths of entries in a nested state dict; None if there was none.
    """

    entries: dict[str, Any]
    tied: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, Any] | None = None


def stage(
    entries: Mapping[str, Any],
    *,
    copies: bool,
    to_bytes: Callable[[str, Any], bytes] = pack,
) -> dict[str, Any]:
    """Stage entries, by name.

    Args:
        entries: Tensors and objects by name.
        copies: Whether to copy values to host memory, so that they may change afterwards.
        to_bytes: Serializes an object, given its name.

    Raises:
        CheckpointError: An entry is neither a tensor nor plain data.
    """
    taken = _copied if copies else torch.Tensor.detach
    staged = {name: _staged(name, value, taken, to_bytes) for name, value in entries.items()}
    tensors = [value for value in entries.values() if isinstance(value, torch.Tensor)]
    for device in {rows_of(tensor).device for tensor in tensors} if copies else ():
        wait_for_device(device)
    return staged


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to host memory, pinned for CUDA; complete after `wait_for_device`."""
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor.to("cpu", copy=True)
    memory = host_block(tensor.nbytes, tensor.device).view(tensor.dtype)
    return memory.view(tensor.shape).copy_(tensor, non_blocking=True)


def _staged(
    name: str,
    value: Any,
    taken: Callable[[torch.Tensor], torch.Tensor],
    to_bytes: Callable[[str, Any], bytes],
) -> Any:
    if isinstance(value, UnevenDTensor):
        return rows_like(taken(local_of(value)), value)
    if isinstance(value, DTensor):
        raise CheckpointError(
            f"{name} is a DTensor that fully_shard of megatron_fsdp_v2 did not make; use torch's "
            "own torch.distributed.checkpoint.save for such a model"
        )
    if isinstance(value, torch.Tensor):
        return taken(value)
    return StoredObject(to_bytes(name, value))
