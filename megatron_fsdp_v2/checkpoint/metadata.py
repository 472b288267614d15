"""Metadata of a folder of torch's distributed checkpoint, read without running what is in it.

Torch unpickles `.metadata`, and a pickle can run anything. Here it is taken apart, compared with
what metadata is made of, and rebuilt from numbers and names that are in range.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
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
from megatron_fsdp_v2.checkpoint.pickles import Call, Mapping, Name, PickleError, read_pickle
from megatron_fsdp_v2.checkpoint.trust import (
    DTYPES,
    MAX_DIMS,
    MAX_INT,
    check_file_name,
    check_name,
    check_shape,
    file_inside,
    shown,
)

__all__ = ["INCOMPLETE", "METADATA", "needed_bytes", "read_metadata"]

METADATA = ".metadata"
INCOMPLETE = ".incomplete"
"""What the name of a folder ends in until its save is complete."""

_DCP = "torch.distributed.checkpoint"
_MAX_BYTES = 1 << 30

_METADATA_CLASSES = frozenset(
    {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    }
)

_PLAN_CLASSES = ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")

# What is stored under these names is never made, only looked at.
_ALLOWED = frozenset(
    {
        *((f"{_DCP}.metadata", name) for name in _METADATA_CLASSES),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        # Megatron leaves the plans of all ranks in its metadata; torch writes them from 2.15 on.
        *((f"{_DCP}.planner", name) for name in _PLAN_CLASSES),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "PurePosixPath"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
        *(("torch", name) for name in DTYPES),
    }
)

_SHOWN = 4
_MAX_PATH = 256


class _ForeignNameError(Exception):
    """The metadata refers to something that torch's checkpoint metadata is not made of."""


def _check_allowed(module: str, name: str) -> None:
    if (module, name) not in _ALLOWED:
        raise _ForeignNameError(f"{module}.{name}")


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
        pickled, _ = read_pickle(content, _check_allowed)
        return _metadata(pickled)
    except _ForeignNameError as error:
        raise CheckpointError(
            f"{file} refers to {error}, which is not allowed: torch's checkpoint metadata has no "
            "such thing in it, and loading it could run code; do not use this checkpoint"
        ) from error
    except PickleError as error:
        raise CheckpointError(f"{file} cannot be read ({error}); the save was cut short") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); it is damaged or made to do damage"
        ) from error


def needed_bytes(metadata: Metadata) -> dict[str, int]:
    """How long every file must be, by name, to hold what the metadata says is in it."""
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


def _metadata(pickled: Any) -> Metadata:
    """Metadata made of numbers and names that are in range.

    Raises:
        ValueError: Something is not what metadata consists of.
    """
    fields = _fields(pickled, f"{_DCP}.metadata.Metadata")
    entries: dict[str, Any] = {}
    for key, value in _pairs(fields.get("state_dict_metadata")):
        if check_name(key) in entries:
            raise ValueError(f"{key} is there twice")
        entries[key] = _entry(key, value)
    storage: dict[MetadataIndex, _StorageInfo] | None = None
    if fields.get("storage_data") is not None:
        storage = {}
        for index, value in _pairs(fields["storage_data"]):
            place = _index(index)
            if place in storage:
                raise ValueError(f"{place.fqn} at {place.offset} is there twice")
            storage[place] = _storage_info(place.fqn, value)
    version = fields.get("version")
    return Metadata(
        state_dict_metadata=entries,
        planner_data=_paths(fields.get("planner_data")),
        storage_data=storage,
        version=version if isinstance(version, str) else None,
    )


def _entry(key: str, value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, Call) and value.of.full == f"{_DCP}.metadata.BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(value, f"{_DCP}.metadata.TensorStorageMetadata", key)
    size = _size(fields.get("size"), key)
    properties = _properties(fields.get("properties"), key)
    check_shape(size, properties.dtype, key)
    chunks = fields.get("chunks")
    if type(chunks) is not list:
        raise ValueError(f"the chunks of {key} are not a list")
    return TensorStorageMetadata(properties, size, [_chunk(c, len(size), key) for c in chunks])


def _chunk(value: Any, dims: int, key: str) -> ChunkStorageMetadata:
    fields = _fields(value, f"{_DCP}.metadata.ChunkStorageMetadata", key)
    offsets, sizes = _size(fields.get("offsets"), key), _size(fields.get("sizes"), key)
    if len(offsets) != dims or len(sizes) != dims:
        raise ValueError(f"{key} has {dims} dimensions, and a chunk of it has others")
    return ChunkStorageMetadata(offsets, sizes)


def _properties(value: Any, key: str) -> TensorProperties:
    state = _made(value, f"{_DCP}.metadata.TensorProperties", key).state
    if type(state) is not tuple or not state or type(state[0]) is not Name:
        raise ValueError(f"the properties of {key} are not those of a tensor")
    name = state[0]
    if name.module != "torch" or name.name not in DTYPES:
        raise ValueError(f"{key} is said to be of {name.full}, which is not a dtype")
    # The rest is deprecated, and nothing here depends on it.
    return TensorProperties(dtype=DTYPES[name.name])


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, f"{_DCP}.metadata.MetadataIndex")
    fqn, offset, index = check_name(fields.get("fqn")), fields.get("offset"), fields.get("index")
    place = None if offset is None else _size(offset, fqn)
    return MetadataIndex(fqn, place, None if index is None else _integer(index, fqn))


def _storage_info(key: str, value: Any) -> _StorageInfo:
    fields = _fields(value, f"{_DCP}.filesystem._StorageInfo", key)
    name = check_file_name(fields.get("relative_path"), key)
    transforms = fields.get("transform_descriptors")
    offset, length = (_integer(fields.get(which), key) for which in ("offset", "length"))
    if offset + length > MAX_INT:
        raise ValueError(f"{key} is said to end at byte {offset + length} of a file")
    if transforms is not None:
        if type(transforms) not in (list, tuple):
            raise ValueError(f"how {key} was transformed is not a list of names")
        transforms = [check_name(transform) for transform in transforms]
    return _StorageInfo(name, offset, length, transforms)


def _paths(value: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Where entries lie in a nested state dict; None where a planner keeps something else."""
    if not isinstance(value, Mapping):
        return None
    found: dict[str, tuple[str | int, ...]] = {}
    for key, path in value.pairs:
        is_path = type(path) in (list, tuple) and len(path) <= _MAX_PATH
        if not is_path or any(type(part) not in (str, int) for part in path):
            return None
        found[check_name(key)] = tuple(path)
    return found


def _made(value: Any, full_name: str, where: str = "it") -> Call:
    if type(value) is not Call or value.of.full != full_name:
        kind = value.of.full if type(value) is Call else type(value).__name__
        raise ValueError(f"{where} has a {kind} in the place of a {full_name.rpartition('.')[2]}")
    return value


def _fields(value: Any, full_name: str, where: str = "it") -> dict[str, Any]:
    """Attributes of an instance of a dataclass."""
    state = _made(value, full_name, where).state
    if type(state) is not Mapping:
        raise ValueError(f"{where} has a {full_name.rpartition('.')[2]} without attributes")
    found: dict[str, Any] = {}
    for key, entry in state.pairs:
        if type(key) is not str or key in found:
            raise ValueError(f"{where} has an attribute {key!r} twice, or not called by a string")
        found[key] = entry
    return found


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if type(value) is Mapping:
        return value.pairs
    if type(value) is Call and value.of.full == "collections.OrderedDict":
        return value.pairs
    raise ValueError(f"it has a {type(value).__name__} in the place of a dictionary")


def _size(value: Any, key: str) -> torch.Size:
    if type(value) is Call and value.of.full == "torch.Size" and len(value.args) == 1:
        (value,) = value.args
    if type(value) not in (tuple, list):
        raise ValueError(f"{key} has a {type(value).__name__} in the place of a shape or an offset")
    if len(value) > MAX_DIMS:
        raise ValueError(f"{key} has {len(value)} dimensions; tensors have at most {MAX_DIMS}")
    for length in value:
        # A bool is an int as well.
        if type(length) is not int or not 0 <= length <= MAX_INT:
            raise ValueError(f"{key} has {shown(length)} in the place of a length or an offset")
    return torch.Size(value)


def _integer(value: Any, key: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise ValueError(f"{key} is said to lie at {shown(value)}, which is not a place in a file")
    return value
