"""The two files that describe a checkpoint folder: torch's `.metadata`, and `manifest.json`.

`.metadata` is a pickle and is read without running code from it. The manifest has files, lengths
and checksums of a complete checkpoint and is written last; a folder without one was saved by torch
or Megatron.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
from megatron_fsdp_v2.checkpoint.unpickling import (
    DTYPES,
    Callee,
    Ignored,
    SafeUnpickler,
    blank,
    check_file_name,
    check_name,
    file_inside,
    integer,
    read_json,
    reason_of,
    shown,
    size_of,
)

__all__ = [
    "FORMAT_VERSION",
    "INCOMPLETE",
    "MANIFEST",
    "METADATA",
    "Manifest",
    "length_of",
    "needed_bytes",
    "read_metadata",
]

METADATA = ".metadata"
MANIFEST = "manifest.json"
FORMAT = "megatron_fsdp_v2.checkpoint"
FORMAT_VERSION = 1
INCOMPLETE = ".incomplete"
"""Suffix of a folder's name until its save is complete."""

_MAX_BYTES = 1 << 30
_MAX_NAMES = 16
_MAX_PATH = 256
_SHOWN = 4


Items = Mapping[int, tuple[int, int]]
"""Blocks of tensors, and objects, in a file: length in bytes and CRC-32 by offset."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Files of a checkpoint, and who saved it.

    Attributes:
        world_size: Number of ranks that saved.
        torch: Version of torch that saved.
        files: Items of all files except the manifest, by name. They leave no gap.
    """

    world_size: int
    torch: str
    files: Mapping[str, Items] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder."""
        content = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "world_size": self.world_size,
            "torch": self.torch,
            "files": {
                name: {
                    "nbytes": length_of(items),
                    # Most of the manifest; lists are shorter than objects with names.
                    "items": [[offset, *item] for offset, item in items.items()],
                }
                for name, items in self.files.items()
            },
        }
        (folder / MANIFEST).write_text(json.dumps(content, separators=(",", ":")) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the manifest of a folder; None if there is none.

        Raises:
            CheckpointError: It is damaged, or of an unknown format or version.
        """
        path = file_inside(folder, MANIFEST)
        if not path.is_file():
            return None
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path} is longer than any manifest: over {_MAX_BYTES} bytes")
        try:
            content = read_json(path.read_bytes())
            format_, version = content["format"], integer(content["version"])
            if format_ != FORMAT or version != FORMAT_VERSION:
                raise ValueError(
                    f"it is of version {version} of the format {shown(format_)}, and this package "
                    f"reads version {FORMAT_VERSION} of {FORMAT!r}"
                )
            return cls(
                integer(content["world_size"]),
                check_name(content["torch"]),
                {
                    check_file_name(name, "a part of it"): {
                        integer(offset): (integer(length), integer(crc32, 0xFFFFFFFF))
                        for offset, length, crc32 in sorted(file["items"])
                    }
                    for name, file in content["files"].items()
                },
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error!r}); it is damaged, or of another version"
            ) from error


def length_of(items: Items) -> int:
    """Length of a file in bytes."""
    return max((offset + length for offset, (length, _) in items.items()), default=0)


class _MetadataUnpickler(SafeUnpickler):
    """Creates the data classes of torch's metadata with checked fields, and nothing else."""

    @override
    def set_state(self, target: Any, state: Any) -> None:
        if type(target) is TensorProperties:
            # The other properties are deprecated.
            target.dtype = _expected(torch.dtype)(state[0])
        elif type(target) in _FIELDS:
            for name, check in _FIELDS[type(target)].items():
                value = state.get(name)
                self.spend(value)
                # Some classes are frozen.
                vars(target)[name] = check(value)
        elif type(target) is not Ignored:
            super().set_state(target, state)


def _expected(*classes: type) -> Callable[[Any], Any]:
    """A check that a value is an instance of one of these classes."""

    def check(value: Any) -> Any:
        if type(value) not in classes:
            raise ValueError(f"a {type(value).__name__} is in the place of a {classes[0].__name__}")
        return value

    return check


def _mapping(key: Callable[[Any], Any], value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda found: {key(k): value(v) for k, v in _expected(dict)(found).items()}


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _each(cls: type) -> Callable[[Any], list[Any]]:
    return lambda values: [_expected(cls)(value) for value in _expected(list)(values)]


def _paths(value: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Return where entries lie in a nested state dict; None for data of another planner."""
    if type(value) is not dict:
        return None
    for key, path in value.items():
        is_path = type(path) in (tuple, list) and len(path) <= _MAX_PATH
        if type(key) is not str or not is_path or any(type(p) not in (str, int) for p in path):
            return None
    return {check_name(key): tuple(path) for key, path in value.items()}


_FIELDS: dict[type, dict[str, Callable[[Any], Any]]] = {
    Metadata: {
        "state_dict_metadata": _mapping(
            check_name, _expected(TensorStorageMetadata, BytesStorageMetadata)
        ),
        "planner_data": _paths,
        "storage_data": _optional(
            _mapping(_expected(MetadataIndex), _expected(filesystem._StorageInfo))
        ),
        "version": lambda version: version if type(version) is str else None,
    },
    TensorStorageMetadata: {
        "properties": _expected(TensorProperties),
        "size": size_of,
        "chunks": _each(ChunkStorageMetadata),
    },
    ChunkStorageMetadata: {"offsets": size_of, "sizes": size_of},
    BytesStorageMetadata: {},
    MetadataIndex: {"fqn": check_name, "offset": _optional(size_of), "index": _optional(integer)},
    filesystem._StorageInfo: {
        "relative_path": lambda name: check_file_name(name, "a part of it"),
        "offset": integer,
        "length": integer,
        "transform_descriptors": _optional(lambda found: [*map(check_name, found[:_SHOWN])]),
    },
}
"""Fields of the data classes, each with a function that checks a value and returns it."""

# Megatron leaves the plans of all ranks in its metadata; torch writes them from 2.15 on.
_IGNORED = (
    *(f"{metadata.__name__}.{name}" for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(
        f"torch.distributed.checkpoint.planner.{name}"
        for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
    *("pathlib.PosixPath", "pathlib.PurePosixPath", "torch.device"),
    *("pathlib._local.PosixPath", "pathlib._local.PurePosixPath"),
    "torch.serialization._get_layout",
)
_MetadataUnpickler.names = {
    **{f"{cls.__module__}.{cls.__name__}": blank(cls) for cls in _FIELDS},
    **{name: Callee(Ignored) for name in _IGNORED},
    **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
    f"{metadata.__name__}.TensorProperties": Callee(lambda: TensorProperties()),
    "torch.Size": Callee(size_of),
    "collections.OrderedDict": Callee(OrderedDict[Any, Any]),
}


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
    stored = manifest.files.get(METADATA, {}) if manifest is not None else {}
    for offset, (length, crc32) in stored.items():
        if len(content) != length or zlib.crc32(content) != crc32 or offset:
            raise CheckpointError(f"{file} is damaged: its checksum is not that of the save")
    try:
        return _checked(_MetadataUnpickler(content).load())
    # A damaged pickle raises nearly anything.
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read ({reason_of(error)}): it is damaged, or made to run code or to "
            "use up memory; do not use this checkpoint unless you know where it is from"
        ) from error


def needed_bytes(metadata: Metadata) -> dict[str, int]:
    """Return the length that every file must have at least, by name."""
    needed: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        name = info.relative_path
        needed[name] = max(needed.get(name, 0), info.offset + info.length)
    return needed


def _content(folder: Path) -> bytes:
    if folder.name.endswith(INCOMPLETE):
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: the save was cut short; use an older one and "
            "remove it"
        )
    if not folder.is_dir():
        kind = "is not a folder" if folder.exists() else "does not exist"
        raise NotFoundError(f"{folder} {kind}")
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
    """Check that the fields of related objects are consistent.

    Raises:
        ValueError: The fields contradict each other, or reading their tensors would not end.
    """
    checked: Metadata = _expected(Metadata)(found)
    entries = checked.state_dict_metadata
    # Several names may share an entry, but only so many that reading all of them ends.
    names = Counter(id(entry) for entry in entries.values())
    if names and max(names.values()) > _MAX_NAMES:
        raise ValueError(f"more than {_MAX_NAMES} names share one tensor")
    for key, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            # Strides of other dimensions matter even if one has length zero.
            numel = math.prod(max(length, 1) for length in entry.size)
            integer(numel * entry.properties.dtype.itemsize)
            if any(not len(c.offsets) == len(c.sizes) == len(entry.size) for c in entry.chunks):
                raise ValueError(f"{key} has {len(entry.size)} dimensions, a chunk of it others")
    _check_places(checked.storage_data or {})
    return checked


def _check_places(storage: dict[MetadataIndex, Any]) -> None:
    """Check that stored items do not overlap: they take more memory than their file otherwise.

    Raises:
        ValueError: They do, or more names share an item than tied parameters have.
    """
    names = Counter((info.relative_path, info.offset, info.length) for info in storage.values())
    last: tuple[str, int] = "", 0
    for (file, offset, length), count in sorted(names.items()):
        if count > _MAX_NAMES:
            raise ValueError(f"{count} names refer to the item at {offset} in {file}")
        if file == last[0] and offset < last[1]:
            raise ValueError(f"the item at {offset} in {file} overlaps the one before")
        last = file, integer(offset + length)
