"""`manifest.json`: what a complete checkpoint consists of, and how to tell that it is undamaged.

Torch's distributed checkpoint says where every tensor lies; the manifest says that all of it was
written, by whom, and what the bytes add up to. It is written last. A folder without one is a
checkpoint of torch's own calls or of Megatron's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_fsdp_v2.checkpoint.errors import CheckpointError

__all__ = ["FORMAT_VERSION", "MANIFEST", "Manifest", "StoredFile", "StoredItem"]

MANIFEST = "manifest.json"
FORMAT = "megatron_fsdp_v2.checkpoint"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A tensor's block, or an object, in a file.

    Attributes:
        offset: Its first byte.
        length: Bytes.
        crc32: Of these bytes.
    """

    offset: int
    length: int
    crc32: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a checkpoint.

    Attributes:
        nbytes: Its length.
        items: What is in it, in order.
    """

    nbytes: int
    items: tuple[StoredItem, ...]

    def item_at(self, offset: int) -> StoredItem | None:
        """The item that starts at a byte."""
        return next((item for item in self.items if item.offset == offset), None)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        world_size: Ranks that wrote it.
        torch: Version of torch that wrote it.
        units: How every unit was sharded, as text by its name.
        files: Every file but the manifest, by name.
    """

    world_size: int
    torch: str
    units: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, StoredFile] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        content = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self)}
        # Items take most of it; three numbers each need no names.
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
        """Read it; None where there is none.

        Raises:
            CheckpointError: It is damaged, or of a format that is not known here.
        """
        path = folder / MANIFEST
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text())
            is_ours = content["format"] == FORMAT
            version = int(content["version"])
            if is_ours and version == FORMAT_VERSION:
                return cls._parse(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); it is damaged") from error
        if not is_ours:
            raise CheckpointError(f"{path} is of the format {content['format']!r}, not {FORMAT!r}")
        raise CheckpointError(
            f"{path} is of version {version} of the format, and this package reads version "
            f"{FORMAT_VERSION}; use the package that wrote it"
        )

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> Manifest:
        return cls(
            int(content["world_size"]),
            str(content["torch"]),
            {str(name): str(text) for name, text in content["units"].items()},
            {name: _parse_file(file) for name, file in content["files"].items()},
        )


def _parse_file(content: dict[str, Any]) -> StoredFile:
    items: Sequence[Sequence[int]] = content["items"]
    return StoredFile(int(content["nbytes"]), tuple(StoredItem(*map(int, item)) for item in items))
