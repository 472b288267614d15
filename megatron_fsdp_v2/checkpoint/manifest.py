"""The file of this package in a checkpoint folder: `manifest.json`.

It is an index of the entries, with the place and the checksum of every item: everything that a load
needs. It is written last. A folder without a manifest was saved by torch or Megatron.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_fsdp_v2._text import shown
from megatron_fsdp_v2.checkpoint.errors import CheckpointError

METADATA = ".metadata"
"""The file of torch's distributed checkpoint that describes the others."""
MANIFEST = "manifest.json"
FORMAT = "megatron_fsdp_v2.checkpoint"
FORMAT_VERSION = 1
DATA_SUFFIX = ".distcp"
"""Suffix of torch's files with tensors and objects."""
INCOMPLETE = ".incomplete"
"""Suffix of a folder's name until its save is complete."""

Place = tuple[str, int, int, int]
"""Where an item is stored: file, first byte, length in bytes, and CRC-32."""


class StoredChunk(NamedTuple):
    """A stored block of a tensor, or an object.

    Attributes:
        offsets: Where the block starts in the tensor.
        sizes: Its shape.
        file: Name of the file.
        start: Where the item starts in the file, in bytes.
        length: Length of the item, as `torch.save` wrote it.
        crc32: CRC-32 of the item; None if another program saved it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor or an object in a checkpoint.

    Attributes:
        dtype: Dtype of the tensor; None for an object.
        shape: Shape of the tensor.
        chunks: Blocks of the tensor; or the object.
        path: Where the entry lies in a nested state dict, if known.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    chunks: Sequence[StoredChunk]
    path: tuple[str | int, ...] | None = None

    @classmethod
    def tensor(
        cls,
        dtype: Any,
        shape: Any,
        chunks: Sequence[StoredChunk],
        path: tuple[str | int, ...] | None,
    ) -> Entry:
        """Make the entry of a tensor from what a file says.

        Raises:
            ValueError: Torch has no dtype of this name, chunks have other dimensions, or the tensor
                is too large.
        """
        found = vars(torch).get(dtype) if type(dtype) is str else None
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{shown(dtype)} is in the place of a dtype")
        shape = integers(shape)
        # Strides of other dimensions matter even if one has length zero.
        integer(math.prod(max(length, 1) for length in shape) * found.itemsize)
        if any(not len(chunk.offsets) == len(chunk.sizes) == len(shape) for chunk in chunks):
            raise ValueError("a chunk has other dimensions than its tensor")
        return cls(found, shape, chunks, path)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint, and who saved it.

    Attributes:
        world_size: Number of ranks that saved.
        torch: Version of torch that saved.
        entries: Tensors and objects by name. Their items leave no gap in a file.
        metadata: The whole file `.metadata`.
    """

    world_size: int
    torch: str
    entries: Mapping[str, Entry]
    metadata: StoredChunk

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the manifest of a folder; None if there is none.

        Raises:
            CheckpointError: It is damaged, or of an unknown format or version.
        """
        path = file_inside(folder, MANIFEST)
        if not path.is_file():
            return None
        try:
            raw = path.read_bytes()
            content = read_json(raw)
            format_, version = content["format"], integer(content["version"])
            if format_ != FORMAT or version != FORMAT_VERSION:
                raise ValueError(
                    f"it is of version {version} of the format {shown(format_)}, and this package "
                    f"reads version {FORMAT_VERSION} of {FORMAT!r}"
                )
            if zlib.crc32(raw.rpartition(_CHECKSUM)[0]) != content["crc32"]:
                raise ValueError("its checksum is not that of the save")
            files = [check_file_name(name, "a part of it") for name in content["files"]]
            return cls(
                integer(content["world_size"]),
                check_name(content["torch"]),
                _entries(content["entries"], files),
                _chunk([METADATA], 0, 0, *content["metadata"]),
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error!r}); it is damaged, or of another version"
            ) from error


def write_manifest(
    folder: Path, world_size: int, metadata: Metadata, places: Mapping[MetadataIndex, Place]
) -> None:
    """Write the manifest of a folder.

    Args:
        folder: The folder, with its `.metadata`.
        world_size: Number of ranks that saved.
        metadata: The entries.
        places: Where their items are stored.
    """
    files = sorted({file for file, *_ in places.values()})
    numbers = {file: number for number, file in enumerate(files)}

    def item(index: MetadataIndex) -> list[int]:
        file, *numbers_of_item = places[index]
        return [numbers[file], *numbers_of_item]

    entries: dict[str, Any] = {}
    # Lists of numbers make up most of the file, and are shorter than objects with names.
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = [
                [*item(MetadataIndex(name, chunk.offsets)), *chunk.offsets, *chunk.sizes]
                for chunk in entry.chunks
            ]
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            entries[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
        else:
            entries[name] = {"object": item(MetadataIndex(name))}
        if name in (metadata.planner_data or {}):
            entries[name]["path"] = metadata.planner_data[name]
    of_torch = (folder / METADATA).read_bytes()
    content = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "world_size": world_size,
        "torch": torch.__version__,
        "files": files,
        "entries": entries,
        "metadata": [len(of_torch), zlib.crc32(of_torch)],
    }
    (folder / MANIFEST).write_bytes(dumps(content))


_CHECKSUM = b',"crc32":'


def dumps(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest, whose last value is the CRC-32 of what precedes it."""
    text = json.dumps(content, separators=(",", ":")).removesuffix("}").encode()
    return text + _CHECKSUM + b"%d}\n" % zlib.crc32(text)


def _entries(index: Any, files: Sequence[str]) -> dict[str, Entry]:
    """Check the entries of a manifest.

    Raises:
        ValueError: A number or a name is out of range.
        LookupError: A file or a value is missing.
        TypeError: An item has too few numbers.
    """
    found = {}
    for name, entry in index.items():
        path = check_path(entry.get("path"))
        if "object" in entry:
            found[check_name(name)] = Entry(None, (), [_chunk(files, *entry["object"])], path)
        else:
            chunks = [_chunk(files, *numbers) for numbers in entry["chunks"]]
            found[check_name(name)] = Entry.tensor(entry["dtype"], entry["shape"], chunks, path)
    return found


def _chunk(
    files: Sequence[str], file: int, start: int, length: int, crc32: int, *box: int
) -> StoredChunk:
    offsets, sizes = integers(box[: len(box) // 2]), integers(box[len(box) // 2 :])
    item = integer(start), integer(length), integer(crc32, 0xFFFFFFFF)
    return StoredChunk(offsets, sizes, files[integer(file)], *item)


# -- checks of what files contain -----------------------------------------------------------------

MAX_INT = (1 << 63) - 1
"""Offsets, lengths and sizes of tensors in bytes are at most this."""

_MAX_NAME = 1 << 16
_MAX_FILE_NAME = 255
_MAX_DIMS = 64


def check_name(name: Any) -> str:
    """Check that a value can be the name of an entry, and be printed on a terminal.

    Raises:
        ValueError: It is not a string, too long, or not printable.
    """
    if type(name) is not str:
        raise ValueError(f"{shown(name)} is in the place of a name")
    if len(name) > _MAX_NAME or not name.isprintable():
        raise ValueError(f"the name {shown(name)} is too long, or cannot be shown")
    return name


def check_file_name(name: Any, what: str) -> str:
    """Check that a value is the name of a file directly in a folder.

    Args:
        name: The name.
        what: The entry that is stored there, for the error.

    Raises:
        ValueError: It is not a plain file name.
    """
    is_name = type(name) is str and 0 < len(name) <= _MAX_FILE_NAME and name.isprintable()
    if not is_name or name in (".", "..") or "/" in name or "\\" in name:
        raise ValueError(f"the file of {what}, {shown(name)}, is not in the same folder")
    return str(name)


def file_inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder.

    Raises:
        CheckpointError: It is a link to a file outside of the folder, or to none.
    """
    file = folder / name
    if not file.is_symlink():
        return file
    # Path.resolve() raises where links go in a circle.
    parent, own = Path(os.path.realpath(file)).parent, Path(os.path.realpath(folder))
    if parent != own or not file.exists():
        raise CheckpointError(
            f"{file} is a link to nothing, or to a file outside of its folder; copy the file there "
            "if you trust it"
        )
    return file


def integer(value: Any, most: int = MAX_INT) -> int:
    """Check a count or an offset.

    Raises:
        ValueError: It is not an integer from 0 to `most`.
    """
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{shown(value)} is in the place of a number from 0 to {most}")
    return value


def integers(values: Iterable[Any]) -> tuple[int, ...]:
    """Check a shape or an offset.

    Raises:
        ValueError: It is not a tuple or list of at most 64 integers from 0 to 2**63 - 1.
    """
    found = tuple(values)
    for value in found:
        integer(value)
    if len(found) > _MAX_DIMS:
        raise ValueError(f"a shape or an offset has more than {_MAX_DIMS} dimensions")
    return found


def check_path(path: Any) -> tuple[str | int, ...] | None:
    """Return the path of an entry in a nested state dict; None for anything else."""
    is_path = type(path) in (tuple, list) and {*map(type, path)} <= {str, int}
    return tuple(path) if is_path else None


def read_json(content: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: It is not valid, not an object, or nested too deeply.
    """
    try:
        found = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if type(found) is not dict:
        raise ValueError("it is not an object")
    return found
