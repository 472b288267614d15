"""Metadata of a folder of torch's distributed checkpoint, read without running what is in it.

Torch unpickles `.metadata`, and a pickle can run anything. Here it may refer to what metadata is
made of, by exact names, and to nothing else.
"""

from __future__ import annotations

import io
import pickle
import zlib
from pathlib import Path
from typing import Any, override

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.manifest import Manifest

__all__ = ["INCOMPLETE", "METADATA", "needed_bytes", "read_metadata"]

METADATA = ".metadata"
INCOMPLETE = ".incomplete"
"""What the name of a folder ends in until its save is complete."""

_DCP = "torch.distributed.checkpoint"

# Exact names, never prefixes: a pickle may ask a module for a dotted name such as `os.system`, and
# nearly every module has imported something that runs code.
_ALLOWED = frozenset(
    {
        (f"{_DCP}.metadata", "BytesStorageMetadata"),
        (f"{_DCP}.metadata", "ChunkStorageMetadata"),
        (f"{_DCP}.metadata", "Metadata"),
        (f"{_DCP}.metadata", "MetadataIndex"),
        (f"{_DCP}.metadata", "StorageMeta"),
        (f"{_DCP}.metadata", "TensorProperties"),
        (f"{_DCP}.metadata", "TensorStorageMetadata"),
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "PurePosixPath"),
        ("torch", "Size"),
        ("torch", "device"),
        # Looks a layout up by its name.
        ("torch.serialization", "_get_layout"),
    }
)

_SHOWN = 4


class _ForeignNameError(Exception):
    """The metadata refers to something that torch's checkpoint metadata is not made of."""


class _MetadataUnpickler(pickle.Unpickler):
    """Loads what torch's checkpoint metadata is made of, and nothing that could run code."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise _ForeignNameError(f"{module}.{name}")


def read_metadata(path: str | Path, manifest: Manifest | None = None) -> Metadata:
    """Read the metadata of a folder of torch's distributed checkpoint, and run nothing in it.

    Args:
        path: The folder.
        manifest: Its manifest, against which the bytes are checked first.

    Raises:
        CheckpointError: There is none, it cannot be read, or it refers to anything but metadata.
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
        metadata: Metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        _check(metadata)
    except _ForeignNameError as error:
        raise CheckpointError(
            f"{file} refers to {error}, which is not allowed: torch's checkpoint metadata has no "
            "such thing in it, and loading it could run code; do not use this checkpoint"
        ) from error
    # A pickle of random bytes can raise nearly anything.
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read ({error}); the save was cut short") from error
    return metadata


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
        raise CheckpointError(f"{folder} {kind}{more if unfinished.is_dir() else ''}")
    file = folder / METADATA
    if file.is_file():
        return file.read_bytes()
    inside = sorted(p.parent.name for p in folder.glob(f"*/{METADATA}"))
    if inside:
        raise CheckpointError(
            f"{folder} is not a checkpoint, it holds some: name one of {_some(inside)}"
        )
    found = _some(sorted(p.name for p in folder.iterdir())) or "nothing"
    raise CheckpointError(
        f"{folder} is not a folder of torch's distributed checkpoint, or its save was cut short: "
        f"it has no {METADATA}, only {found}"
    )


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _check(metadata: Metadata) -> None:
    """Raise what comes along where metadata is not of the form the rest relies on."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it is a {type(metadata).__name__}")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(
            entry, BytesStorageMetadata | TensorStorageMetadata
        ):
            raise TypeError(f"{key!r} is neither a tensor nor an object")
    for index, info in (metadata.storage_data or {}).items():
        if not isinstance(index, MetadataIndex):
            raise TypeError(f"{index!r} is no place of a tensor")
        # A file elsewhere is none of this checkpoint's.
        if Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"{index.fqn} is said to lie in {info.relative_path!r}")
        if not (int(info.offset) >= 0 and int(info.length) >= 0):
            raise ValueError(f"{index.fqn} is said to lie at a negative offset")
