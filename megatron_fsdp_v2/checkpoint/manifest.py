"""`manifest.json`: files, lengths and checksums of a complete checkpoint.

It is written last. A folder without a manifest was saved by torch or Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.trust import (
    check_file_name,
    check_name,
    file_inside,
    integer,
    read_json,
    shown,
)

__all__ = ["FORMAT_VERSION", "MANIFEST", "Items", "Manifest", "length_of"]

MANIFEST = "manifest.json"
FORMAT = "megatron_fsdp_v2.checkpoint"
FORMAT_VERSION = 1

_MAX_BYTES = 1 << 30


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
