"""Export a checkpoint to plain files, and convert between kinds of checkpoints.

Runs in one process without a process group. Tensors are read and written one at a time.
"""

from __future__ import annotations

import enum
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.errors import CheckpointError, naming_full_disk
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST
from megatron_fsdp_v2.checkpoint.metadata import INCOMPLETE, METADATA
from megatron_fsdp_v2.checkpoint.model_tensors import MODEL, FolderSource, Layout
from megatron_fsdp_v2.checkpoint.plain_tensors import (
    Progress,
    TensorSource,
    check_dtype,
    convert_elements,
    converted,
)
from megatron_fsdp_v2.checkpoint.pt_files import SUFFIXES as PT_SUFFIXES
from megatron_fsdp_v2.checkpoint.pt_files import PtSource, write_pt
from megatron_fsdp_v2.checkpoint.replacing import (
    make_temporary,
    put_new,
    remove_own,
    temporary_name,
)
from megatron_fsdp_v2.checkpoint.safetensors_files import (
    INDEX,
    SafetensorsSource,
    index_of,
    write_safetensors,
)
from megatron_fsdp_v2.checkpoint.safetensors_files import SUFFIX as SAFETENSORS_SUFFIX
from megatron_fsdp_v2.checkpoint.writing import FolderWriter

__all__ = [
    "MAX_SHARD_BYTES",
    "Exported",
    "Kind",
    "convert",
    "export",
    "find_kind",
    "open_source",
]

MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export.

    Attributes:
        files: The files or the folder; of several safetensors files the index is the last.
        num_tensors: Number of names of tensors of the model.
        nbytes: Bytes of their elements; tied tensors count once.
        largest: Bytes of the largest tensor, as stored or as written, whichever is more.
        left_out: Other names in the source: optimizer state and objects.
    """

    files: tuple[Path, ...]
    num_tensors: int
    nbytes: int
    largest: int
    left_out: tuple[str, ...]


def export(
    path: str | Path,
    out_file: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    prefix: str | None = None,
    progress: Progress | None = None,
    layouts: Sequence[Layout] | None = None,
) -> Exported:
    """Write the model of a checkpoint as plain tensors under plain names.

    One process, no process group. It takes the memory of the largest tensor and a constant of
    about 20 MiB.

    Args:
        path: The checkpoint's folder: of `save`, of torch's own distributed checkpoint, or of a
            framework whose adapter is installed.
        out_file: The file to write: `.safetensors`, or `.pt` for `torch.load`.
        dtype: Dtype of floating-point tensors; None leaves them unchanged.
        max_shard_bytes: A larger `.safetensors` model becomes several files of at most so many
            bytes, or of one tensor, and an index.
        prefix: Prefix of the model's tensors in the checkpoint, which is removed; detected if None.
        progress: Called with the bytes written and the total.
        layouts: Layouts of frameworks; those of installed adapters if None.

    Returns:
        What was written.

    Raises:
        ValueError: An argument is not valid, or the file already exists.
        CheckpointError: The checkpoint cannot be read, is damaged, or contains a tensor that the
            file format does not support.
    """
    target = Path(out_file)
    if target.suffix not in (SAFETENSORS_SUFFIX, *PT_SUFFIXES):
        raise ValueError(f"out_file is {target.name}; name it {SAFETENSORS_SUFFIX} or .pt")
    _check(target, dtype, max_shard_bytes)
    source = FolderSource(path, layouts, prefix)
    return _write(source, target, dtype, max_shard_bytes, progress)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    prefix: str | None = None,
    progress: Progress | None = None,
    layouts: Sequence[Layout] | None = None,
) -> Exported:
    """Write the model of a checkpoint of one kind as one of another.

    Args:
        source: A checkpoint's folder, a `.safetensors` file or index, or a `.pt` file that holds
            a model's state dict.
        target: As in `export`; anything else is a folder, which `load` reads.
        dtype: As in `export`.
        max_shard_bytes: As in `export`.
        prefix: As in `export`, of a folder.
        progress: As in `export`.
        layouts: As in `export`.

    Returns:
        What was written.

    Raises:
        ValueError: As in `export`.
        CheckpointError: As in `export`.
    """
    target = Path(target)
    _check(target, dtype, max_shard_bytes)
    opened = open_source(source, prefix=prefix, layouts=layouts)
    return _write(opened, target, dtype, max_shard_bytes, progress)


def open_source(
    path: str | Path, *, prefix: str | None = None, layouts: Sequence[Layout] | None = None
) -> TensorSource:
    """Open a checkpoint of any kind to read its model.

    Args:
        path: As the source of `convert`.
        prefix: As in `export`.
        layouts: As in `export`.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    kind, path = find_kind(path)
    if kind is Kind.SAFETENSORS:
        return SafetensorsSource(path)
    if kind is Kind.PT:
        return PtSource(path)
    return FolderSource(path, layouts, prefix)


def _check(target: Path, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    check_dtype(dtype)
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be at least 1")
    for path in (target, index_of(target)):
        if os.path.lexists(path):
            raise ValueError(f"{path} already exists; remove it or name another")


def _write(
    source: TensorSource,
    target: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    progress: Progress | None,
) -> Exported:
    progress = progress or (lambda done, total: None)
    with naming_full_disk(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == SAFETENSORS_SUFFIX:
            files = write_safetensors(source, target, dtype, max_shard_bytes, progress)
        elif target.suffix in PT_SUFFIXES:
            files = write_pt(source, target, dtype, progress)
        else:
            files = _write_folder(source, target, dtype, progress)
    written = [converted(t, dtype) for t in source.tensors if t.name not in source.tied]
    return Exported(
        tuple(files),
        len(source.tensors),
        sum(tensor.nbytes for tensor in written),
        max((tensor.nbytes for tensor in (*written, *source.tensors)), default=0),
        tuple(source.left_out),
    )


def _write_folder(
    source: TensorSource, target: Path, dtype: torch.dtype | None, progress: Progress
) -> list[Path]:
    """Write a folder of torch's distributed checkpoint with one chunk for each tensor."""
    unfinished = temporary_name(target, uuid.uuid4().hex)
    make_temporary(unfinished)
    try:
        _write_tensors(FolderWriter(unfinished), source, dtype, progress)
        put_new(unfinished, target)
    except BaseException:
        remove_own(unfinished)
        raise
    return [target]


def _write_tensors(
    writer: FolderWriter, source: TensorSource, dtype: torch.dtype | None, progress: Progress
) -> None:
    once = [tensor for tensor in source.tensors if tensor.name not in source.tied]
    total = sum(converted(tensor, dtype).nbytes for tensor in once)
    done = 0
    for stored in once:
        tensor = converted(stored, dtype)
        data = convert_elements(source.read(stored), tensor)
        path = (MODEL.removesuffix("."), tensor.name)
        writer.add_block(MODEL + tensor.name, tensor.shape, (0,) * len(tensor.shape), data, path)
        done += tensor.nbytes
        progress(done, total)
        del data
    for name, kept in source.tied.items():
        path = (MODEL.removesuffix("."), name)
        writer.add_name(MODEL + name, MODEL + kept, path)
    writer.finish()


_MODEL = "model"
"""Name of a model's files in Hugging Face's libraries."""


class Kind(enum.Enum):
    """Kinds of checkpoints; the value is a name for messages."""

    FOLDER = "folder of torch's distributed checkpoint"
    SAFETENSORS = "safetensors"
    PT = "file of torch.save"


def find_kind(path: str | Path) -> tuple[Kind, Path]:
    """Determine the kind of a checkpoint by its name and by the names in it.

    Args:
        path: A folder of torch's distributed checkpoint, with a manifest or without; a
            `.safetensors` file, an index of several, or a folder with either, as Hugging Face's
            libraries write it; or a file of `torch.save`, or a folder with one.

    Returns:
        The kind, and the folder, file or index to read. A path that does not exist, or is of no
        known kind, counts as a folder: reading it raises an error that says what is wrong.

    Raises:
        CheckpointError: A folder holds several models.
    """
    path = Path(path)
    if not path.is_dir():
        # The name of one file also stands for the index of several.
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
