"""What kind of checkpoint a path is."""

from __future__ import annotations

import enum
from pathlib import Path

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST
from megatron_fsdp_v2.checkpoint.metadata import INCOMPLETE, METADATA
from megatron_fsdp_v2.checkpoint.pt_files import SUFFIXES as PT_SUFFIXES
from megatron_fsdp_v2.checkpoint.safetensors_files import INDEX
from megatron_fsdp_v2.checkpoint.safetensors_files import SUFFIX as SAFETENSORS_SUFFIX

__all__ = ["Kind", "find_kind"]

_MODEL = "model"
"""What Hugging Face's libraries call the files of a model."""


class Kind(enum.Enum):
    """What checkpoints are there to be read; the value is what to call one."""

    FOLDER = "folder of torch's distributed checkpoint"
    SAFETENSORS = "safetensors"
    PT = "file of torch.save"


def find_kind(path: str | Path) -> tuple[Kind, Path]:
    """Find out what a path is, by its name and by the names in it.

    Args:
        path: A folder of torch's distributed checkpoint, with a manifest or without; a
            `.safetensors` file, an index of several, or a folder with either, as Hugging Face's
            libraries write it; or a file of `torch.save`, or a folder with one.

    Returns:
        What it is, and the folder, file or index to read. What is not known, or does not exist, is
        said to be a folder: reading it says what is wrong.

    Raises:
        CheckpointError: A folder holds several models.
    """
    path = Path(path)
    if not path.is_dir():
        # The name of a file that became several stands for their index.
        if path.name.endswith((SAFETENSORS_SUFFIX, SAFETENSORS_SUFFIX + INDEX)):
            return Kind.SAFETENSORS, path
        return (Kind.PT if path.suffix in PT_SUFFIXES else Kind.FOLDER), path
    is_folder = (path / METADATA).exists() or (path / MANIFEST).exists()
    if is_folder or path.name.endswith(INCOMPLETE):
        return Kind.FOLDER, path
    for kind, endings in (
        (Kind.SAFETENSORS, (SAFETENSORS_SUFFIX + INDEX,)),
        (Kind.SAFETENSORS, (SAFETENSORS_SUFFIX,)),
        (Kind.PT, PT_SUFFIXES),
    ):
        found = sorted(file for file in path.iterdir() if file.name.endswith(endings))
        if found:
            return kind, _only(path, found, endings[0])
    return Kind.FOLDER, path


def _only(folder: Path, found: list[Path], ending: str) -> Path:
    named = [file for file in found if file.name == _MODEL + ending]
    if len(found) > 1 and not named:
        names = listed((file.name for file in found), 4)
        raise CheckpointError(f"{folder} holds {len(found)} files *{ending}: name one of {names}")
    return named[0] if named else found[0]
