"""Metadata of a folder of torch's distributed checkpoint, read without running code from it."""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, override

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.errors import CheckpointError, NotFoundError
from megatron_fsdp_v2.checkpoint.manifest import Manifest
from megatron_fsdp_v2.checkpoint.trust import (
    DTYPES,
    check_file_name,
    check_name,
    check_shape,
    file_inside,
    integer,
)
from megatron_fsdp_v2.checkpoint.unpickling import Callee, Ignored, SafeUnpickler, size_of

__all__ = ["INCOMPLETE", "METADATA", "needed_bytes", "read_metadata"]

METADATA = ".metadata"
INCOMPLETE = ".incomplete"
"""Suffix of a folder's name until its save is complete."""

_MAX_BYTES = 1 << 30
_MAX_NAMES = 16
_MAX_PATH = 256
_SHOWN = 4


@dataclass
class _Properties:
    """Properties of a stored tensor; only the dtype matters."""

    dtype: Any = None


_CLASSES: dict[str, type] = {
    f"{cls.__module__}.{cls.__name__}": cls
    for cls in (
        *(Metadata, MetadataIndex, TensorStorageMetadata, ChunkStorageMetadata),
        *(BytesStorageMetadata, filesystem._StorageInfo),
    )
} | {f"{metadata.__name__}.TensorProperties": _Properties}
# Megatron leaves the plans of all ranks in its metadata; torch writes them from 2.15 on.
_IGNORED = frozenset(
    {
        *(f"{metadata.__name__}.{name}" for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
        *(
            f"torch.distributed.checkpoint.planner.{name}"
            for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
        ),
        *("pathlib.PosixPath", "pathlib.PurePosixPath", "torch.device"),
        *("pathlib._local.PosixPath", "pathlib._local.PurePosixPath"),
        "torch.serialization._get_layout",
    }
)


class _MetadataUnpickler(SafeUnpickler):
    """Creates the data classes of torch's metadata, and nothing else."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _CLASSES:
            cls: Any = _CLASSES[full]
            return Callee(lambda: cls.__new__(cls))
        if full in _IGNORED:
            return Callee(Ignored)
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if full == "torch.Size":
            return Callee(size_of)
        if full == "collections.OrderedDict":
            return Callee(OrderedDict[Any, Any])
        return super().find_class(module, name)

    @override
    def set_state(self, target: Any, state: Any) -> None:
        if type(target) is Ignored:
            return
        if type(target) is _Properties:
            # The other properties are deprecated.
            target.dtype = state[0]
        elif type(target) in _CLASSES.values() and type(state) is dict:
            if not all(type(key) is str and not key.startswith("__") for key in state):
                raise ValueError(f"it sets attributes of {type(target).__name__} by no plain name")
            vars(target).update(state)
        else:
            super().set_state(target, state)


def read_metadata(path: str | Path, manifest: Manifest | None = None) -> Metadata:
    """Read the metadata of a folder of torch's distributed checkpoint, and run nothing in it.

    Args:
        path: The folder.
        manifest: Its manifest, against which the bytes are checked first.

    Raises:
        NotFoundError: There is nothing, or a folder of checkpoints.
        CheckpointError: It cannot be read, it refers to anything but metadata, or a number or name
            in it is out of range.
    """
    folder = Path(path)
    file = folder / METADATA
    content = _content(folder)
    stored = manifest.files.get(METADATA) if manifest is not None else None
    if stored is not None:
        if len(content) != stored.nbytes:
            raise CheckpointError(
                f"{file} is damaged: it has {len(content)} bytes and should have {stored.nbytes}"
            )
        for item in stored.items:
            if zlib.crc32(content[item.offset : item.offset + item.length]) != item.crc32:
                raise CheckpointError(f"{file} is damaged: its checksum is not that of the save")
    try:
        return _checked(_MetadataUnpickler(content).load())
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}): it is damaged, or made to run code or to use up "
            "memory; do not use this checkpoint unless you know where it is from"
        ) from error


def needed_bytes(metadata: Metadata) -> dict[str, int]:
    """Return the length that every file must have at least, by name."""
    needed: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        name = info.relative_path
        needed[name] = max(needed.get(name, 0), info.offset + info.length)
    return needed


def _content(folder: Path) -> bytes:
    unfinished = folder.with_name(folder.name + INCOMPLETE)
    if folder.name.endswith(INCOMPLETE):
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: the save was cut short; use an older one and "
            "remove it"
        )
    if not folder.is_dir():
        more = f"; {unfinished.name} beside it is a save that was cut short"
        kind = "is not a folder" if folder.exists() else "does not exist"
        raise NotFoundError(f"{folder} {kind}{more if unfinished.is_dir() else ''}")
    file = folder / METADATA
    if file.is_file():
        file_inside(folder, METADATA)
        size = file.stat().st_size
        if size > _MAX_BYTES:
            raise CheckpointError(f"{file} has {size} bytes; metadata has at most {_MAX_BYTES}")
        return file.read_bytes()
    inside = sorted(p.parent.name for p in folder.glob(f"*/{METADATA}"))
    if inside:
        raise NotFoundError(
            f"{folder} is not a checkpoint, it holds some: name one of {listed(inside, _SHOWN)}"
        )
    names = sorted(p.name for p in folder.iterdir())
    raise (CheckpointError if names else NotFoundError)(
        f"{folder} is not a folder of torch's distributed checkpoint, or its save was cut short: "
        f"it has no {METADATA}, only {listed(names, _SHOWN) or 'nothing'}"
    )


def _checked(found: Any) -> Metadata:
    """Rebuild metadata from what was unpickled, if everything is of the right type and range."""
    _expect(found, Metadata, "the root")
    # Several names may share an entry, but only so many that reading all of them ends.
    names = Counter(id(entry) for entry in found.state_dict_metadata.values())
    if names and max(names.values()) > _MAX_NAMES:
        raise ValueError(f"more than {_MAX_NAMES} names share one tensor")
    entries: dict[int, Any] = {}
    for key, entry in found.state_dict_metadata.items():
        check_name(key)
        if id(entry) not in entries:
            entries[id(entry)] = _entry(key, entry)
    storage = None
    if found.storage_data is not None:
        storage = {_index(key): _place(key.fqn, info) for key, info in found.storage_data.items()}
        _check_places(storage)
    version = vars(found).get("version")
    return Metadata(
        state_dict_metadata={k: entries[id(v)] for k, v in found.state_dict_metadata.items()},
        planner_data=_paths(vars(found).get("planner_data")),
        storage_data=storage,
        version=version if isinstance(version, str) else None,
    )


def _expect(value: Any, cls: type, where: str) -> None:
    if type(value) is not cls:
        raise ValueError(f"{where} is a {type(value).__name__}, not a {cls.__name__}")


def _entry(key: str, entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(entry) is BytesStorageMetadata:
        return BytesStorageMetadata()
    _expect(entry, TensorStorageMetadata, key)
    _expect(entry.properties, _Properties, f"what describes {key}")
    _expect(entry.properties.dtype, torch.dtype, f"the dtype of {key}")
    _expect(entry.chunks, list, f"the chunks of {key}")
    size = size_of(entry.size)
    check_shape(size, entry.properties.dtype, key)
    chunks = []
    for chunk in entry.chunks:
        _expect(chunk, ChunkStorageMetadata, f"a chunk of {key}")
        chunks.append(ChunkStorageMetadata(size_of(chunk.offsets), size_of(chunk.sizes)))
        if not len(chunks[-1].offsets) == len(chunks[-1].sizes) == len(size):
            raise ValueError(f"{key} has {len(size)} dimensions, and a chunk of it has others")
    # Many entries that share a list would each take as long as the list.
    entry.chunks.clear()
    return TensorStorageMetadata(TensorProperties(dtype=entry.properties.dtype), size, chunks)


def _index(key: Any) -> MetadataIndex:
    _expect(key, MetadataIndex, "a key of what is stored")
    fields = vars(key)
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        check_name(key.fqn),
        None if offset is None else size_of(offset),
        None if index is None else integer(index),
    )


def _place(key: str, info: Any) -> filesystem._StorageInfo:
    _expect(info, filesystem._StorageInfo, f"the place of {key}")
    name = check_file_name(info.relative_path, key)
    end = integer(info.offset) + integer(info.length)
    transforms = vars(info).get("transform_descriptors")
    if transforms is not None:
        transforms = [check_name(transform) for transform in transforms[:_SHOWN]]
    return filesystem._StorageInfo(name, info.offset, integer(end) - info.offset, transforms)


def _check_places(storage: dict[MetadataIndex, Any]) -> None:
    """Check that stored items do not overlap: they take more memory than their file otherwise.

    Raises:
        ValueError: They do, or more names share an item than tied parameters have.
    """
    names = Counter((info.relative_path, info.offset, info.length) for info in storage.values())
    last: tuple[str, int] = "", 0
    for (file, offset, length), count in sorted(names.items()):
        if count > _MAX_NAMES:
            raise ValueError(f"{count} names share what lies at {offset} in {file}")
        if file == last[0] and offset < last[1]:
            raise ValueError(f"what lies at {offset} in {file} overlaps what is before it")
        last = file, offset + length


def _paths(value: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Return where entries lie in a nested state dict; None for data of another planner."""
    if type(value) is not dict:
        return None
    for key, path in value.items():
        is_path = type(path) in (tuple, list) and len(path) <= _MAX_PATH
        if type(key) is not str or not is_path or any(type(p) not in (str, int) for p in path):
            return None
    return {check_name(key): tuple(path) for key, path in value.items()}
