"""Is there a whole `fsdp_dtensor` checkpoint in a folder? Asked before anything is built.

Megatron starts from scratch where it finds nothing, and fails deep inside torch where a file is
cut short. A run that was told to resume should say so in its first second.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, override

from megatron_fsdp_v2_mcore.errors import FlagError

__all__ = ["check_checkpoint_folder"]

TRACKER = "latest_checkpointed_iteration.txt"

_SAFE_MODULES = (
    "torch.distributed.checkpoint.",
    "torch.serialization",
    "collections",
)
_SAFE_NAMES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("builtins", "dict"),
    ("builtins", "list"),
    ("builtins", "set"),
    ("builtins", "tuple"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("datetime", "datetime"),
    ("torch.storage", "TypedStorage"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Loads what torch's checkpoint metadata is made of, and nothing that could run code."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and name in _TORCH_NAMES
        if is_dtype or (module, name) in _SAFE_NAMES or module.startswith(_SAFE_MODULES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"metadata refers to {module}.{name}, which is not allowed")


_TORCH_NAMES = frozenset(
    {
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "bool",
        "strided",
        "contiguous_format",
        "preserve_format",
        "Size",
        "device",
    }
)


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
    path = root / f"iter_{iteration:07d}"
    if not path.is_dir():
        raise FlagError(f"--load {folder} has no checkpoint of iteration {iteration} ({path.name})")
    _check_dcp_folder(path)


def _tracked_iteration(tracker: Path) -> int | None:
    text = tracker.read_text().strip()
    if text == "release":
        return None
    if not text.isdecimal():
        raise FlagError(f"{tracker} should hold an iteration number, it holds {text[:40]!r}")
    return int(text)


def _check_dcp_folder(path: Path) -> None:
    metadata_file = path / ".metadata"
    if not metadata_file.is_file():
        found = ", ".join(sorted(p.name for p in path.iterdir())[:4]) or "nothing"
        raise FlagError(
            f"{path} is not an fsdp_dtensor checkpoint, or its save was cut short: it has no "
            f".metadata, only {found}"
        )
    try:
        metadata = _MetadataUnpickler(io.BytesIO(metadata_file.read_bytes())).load()
        needed = _needed_bytes(metadata.storage_data)
    except Exception as error:
        raise FlagError(f"{metadata_file} cannot be read ({error}); the save was cut short") from (
            error
        )
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
