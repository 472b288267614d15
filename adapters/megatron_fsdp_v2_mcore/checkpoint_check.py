"""Is there a whole `fsdp_dtensor` checkpoint in a folder? Asked before anything is built.

Megatron starts from scratch where it finds nothing, and fails deep inside torch where a file is
cut short. A run that was told to resume should say so in its first second.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, override

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp_v2_mcore.errors import FlagError

__all__ = ["RELEASE", "TRACKER", "check_checkpoint_folder", "find_checkpoint", "read_metadata"]

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""What that file says, and the folder is called, where weights are of no iteration."""

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


def check_checkpoint_folder(
    folder: str | Path, *, may_be_empty: bool, iteration: int | None = None
) -> None:
    """Find out whether a folder holds a complete `fsdp_dtensor` checkpoint.

    Args:
        folder: What `--load` names.
        may_be_empty: Whether nothing at all is fine: `--load` and `--save` of one folder mean
            "resume if there is something".
        iteration: The iteration asked for; the latest when None.

    Raises:
        FlagError: There is none, or it is not complete; says what is wrong.
    """
    root = Path(folder)
    tracker = root / TRACKER
    if not tracker.is_file():
        if may_be_empty and iteration is None:
            return
        state = "is empty of checkpoints" if root.is_dir() else "does not exist"
        raise FlagError(
            f"--load {folder} {state} (no {TRACKER}); name the folder a run saved to with --save"
        )
    if iteration is None:
        iteration = _tracked_iteration(tracker)
    if iteration is None:
        return
    path = iteration_folder(root, iteration)
    if not path.is_dir():
        raise FlagError(f"--load {folder} has no checkpoint of iteration {iteration} ({path.name})")
    _check_dcp_folder(path)


def _tracked_iteration(tracker: Path) -> int | None:
    text = tracker.read_text().strip()
    if text == RELEASE:
        return None
    if not text.isdecimal():
        raise FlagError(f"{tracker} should hold an iteration number, it holds {text[:40]!r}")
    return int(text)


def find_checkpoint(folder: str | Path, iteration: int | None = None) -> tuple[Path, int] | None:
    """The folder and the iteration of a checkpoint; None where Megatron would find none.

    Args:
        folder: What `--load` names.
        iteration: The iteration asked for; the latest when None.

    Returns:
        The iteration is 0 for a release, which has none.
    """
    root = Path(folder)
    if iteration is None:
        tracker = root / TRACKER
        if not tracker.is_file():
            return None
        iteration = _tracked_iteration(tracker)
    return (
        (root / RELEASE, 0) if iteration is None else (iteration_folder(root, iteration), iteration)
    )


def iteration_folder(root: Path, iteration: int) -> Path:
    """Where Megatron keeps the checkpoint of an iteration."""
    return root / f"iter_{iteration:07d}"


def read_metadata(path: Path) -> Metadata:
    """Read the metadata of a folder of torch's distributed checkpoint, and run nothing in it.

    Args:
        path: The folder of one iteration.

    Raises:
        FlagError: There is none, it cannot be read, or it refers to anything but metadata.
    """
    metadata_file = path / ".metadata"
    if not metadata_file.is_file():
        found = ", ".join(sorted(p.name for p in path.iterdir())[:4]) or "nothing"
        raise FlagError(
            f"{path} is not an fsdp_dtensor checkpoint, or its save was cut short: it has no "
            f".metadata, only {found}"
        )
    try:
        metadata: Metadata = _MetadataUnpickler(io.BytesIO(metadata_file.read_bytes())).load()
        _needed_bytes(metadata.storage_data)
    except _ForeignNameError as error:
        raise FlagError(
            f"{metadata_file} refers to {error}, which is not allowed: torch's checkpoint metadata "
            "has no such thing in it, and loading it could run code; do not use this checkpoint"
        ) from error
    except Exception as error:
        raise FlagError(
            f"{metadata_file} cannot be read ({error}); the save was cut short"
        ) from error
    return metadata


def _check_dcp_folder(path: Path) -> None:
    needed = _needed_bytes(read_metadata(path).storage_data)
    for name, nbytes in needed.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            raise FlagError(f"{path} is incomplete: {name} is missing")
        if size < nbytes:
            raise FlagError(f"{path} is truncated: {name} has {size} of {nbytes} bytes")


def _needed_bytes(storage_data: dict[Any, Any]) -> dict[str, int]:
    """How long every shard file must be to hold what the metadata says is in it."""
    needed: dict[str, int] = {}
    for info in storage_data.values():
        name = info.relative_path
        needed[name] = max(needed.get(name, 0), info.offset + info.length)
    return needed
