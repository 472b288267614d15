"""`manifest.json`: files, lengths and checksums of a complete checkpoint.

It is written last. A folder without a manifest was saved by torch or Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.trust import (
    check_file_name,
    check_name,
    file_inside,
    integer,
    read_json,
    shown,
)

__all__ = ["FORMAT_VERSION", "MANIFEST", "Manifest", "StoredFile", "StoredItem"]

MANIFEST = "manifest.json"
FORMAT = "megatron_fsdp_v2.checkpoint"
FORMAT_VERSION = 1

_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A block of a tensor, or an object, in a file.

    Attributes:
        offset: Its first byte.
        length: Its length in bytes.
        crc32: CRC-32 of these bytes.
    """

    offset: int
    length: int
    crc32: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a checkpoint.

    Attributes:
        nbytes: Its length in bytes.
        items: Its items, in order.
    """

    nbytes: int
    items: tuple[StoredItem, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Files of a checkpoint, and who saved it.

    Attributes:
        world_size: Number of ranks that saved.
        torch: Version of torch that saved.
        units: Human-readable sharding of each parameter, by its name.
        files: All files except the manifest, by name.
    """

    world_size: int
    torch: str
    units: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, StoredFile] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder."""
        content = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self)}
        # Most of the file are items; lists are shorter than objects with names.
        content["files"] = {
            name: {
                "nbytes": file.nbytes,
                "items": [[item.offset, item.length, item.crc32] for item in file.items],
            }
            for name, file in self.files.items()
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
            is_ours = content["format"] == FORMAT
            version = integer(content["version"])
            if is_ours and version == FORMAT_VERSION:
                return cls._parse(content)
        except KeyError as error:
            raise CheckpointError(f"{path} cannot be read (no {error}); it is damaged") from error
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be read ({error}); it is damaged") from error
        if not is_ours:
            format_ = shown(content["format"])
            raise CheckpointError(f"{path} is of the format {format_}, not {FORMAT!r}")
        raise CheckpointError(
            f"{path} is of version {version} of the format, and this package reads version "
            f"{FORMAT_VERSION}; use the package that wrote it"
        )

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> Manifest:
        return cls(
            integer(content["world_size"]),
            check_name(content["torch"]),
            {check_name(k): check_name(v) for k, v in _object(content["units"]).items()},
            {
                check_file_name(name, "a part of it"): _parse_file(file)
                for name, file in _object(content["files"]).items()
            },
        )


def _object(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{shown(value)} is in the place of an object")
    return value


def _parse_file(content: Any) -> StoredFile:
    items = _object(content)["items"]
    if type(items) is not list:
        raise ValueError(f"{shown(items)} is in the place of a list")
    return StoredFile(integer(content["nbytes"]), tuple(_parse_item(item) for item in items))


def _parse_item(content: Any) -> StoredItem:
    if type(content) is not list or len(content) != 3:
        raise ValueError(f"{shown(content)} is in the place of offset, length and checksum")
    offset, length, crc32 = content
    return StoredItem(integer(offset), integer(length), integer(crc32, 0xFFFFFFFF))
