"""Export a checkpoint to plain files, and convert between kinds of checkpoints.

Runs in one process without a process group.

A training framework may store a model in other tensors than those of its modules. Its adapter
provides the function that reassembles them, under the entry-point group
`megatron_fsdp_v2.checkpoint_layouts`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_fsdp_v2._progress import Advance, unwatched
from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.entries import MODEL, other_names
from megatron_fsdp_v2.checkpoint.errors import CheckpointError, naming_full_disk
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder, ReadRequest
from megatron_fsdp_v2.checkpoint.manifest import INCOMPLETE, MANIFEST, METADATA
from megatron_fsdp_v2.checkpoint.plain_files import (
    DTYPES,
    INDEX,
    PT_SUFFIXES,
    SAFETENSORS,
    TensorSource,
    converted,
    index_of,
    open_pt,
    open_safetensors,
    write_pt,
    write_safetensors,
)
from megatron_fsdp_v2.checkpoint.replacing import check_absent, created
from megatron_fsdp_v2.checkpoint.writing import Blocks, write_folder

LAYOUT_GROUP = "megatron_fsdp_v2.checkpoint_layouts"


class Piece(NamedTuple):
    """A stored tensor, or a part of it.

    Attributes:
        key: Name of the stored tensor.
        leading: Index of the part in leading dimensions of the stored tensor, such as the number of
            a layer; empty for the whole tensor.
    """

    key: str
    leading: tuple[int, ...] = ()


Pieces = Mapping[str, Sequence[Piece]]
"""Rows of each tensor of a model, by its plain name: one piece, or several one after the other."""

Layout = Callable[[CheckpointFolder], Pieces | None]
"""Returns the tensors of a checkpoint's model; None if the checkpoint is of another framework."""


def find_layouts() -> Iterator[Layout]:
    """Import the layouts of installed adapters."""
    for point in sorted(entry_points(group=LAYOUT_GROUP)):
        yield point.load()


def _open_folder(path: Path, prefix: str | None) -> TensorSource:
    """Open the model of a checkpoint folder.

    Args:
        path: The folder.
        prefix: Prefix of its tensors' names. If None, the layouts of installed adapters are asked;
            otherwise a folder of this package, or one with a nested state dict, has its model under
            `model.`, and in any other folder all tensors belong to the model.

    Raises:
        CheckpointError: It cannot be read, or holds no tensors of a model.
    """
    folder = CheckpointFolder(path)
    answers = (layout(folder) for layout in (find_layouts() if prefix is None else ()))
    found = next((answer for answer in answers if answer is not None), None)
    if found is None:
        found = _by_prefix(folder, prefix)
    # Metadata lists tensors in the order of the ranks.
    tensors = {n: _described(folder, n, found[n]) for n in sorted(found, key=natural_order)}
    used = {piece.key for pieces in found.values() for piece in pieces}
    return TensorSource(
        tensors,
        lambda name: _read(folder, tensors[name].shape, found[name]),
        _tied(folder, tensors, found),
        [key for key in folder.entries if key not in used],
    )


def _described(folder: CheckpointFolder, name: str, pieces: Sequence[Piece]) -> torch.Tensor:
    """Return a tensor of the model on the meta device.

    Raises:
        CheckpointError: Its pieces have different dtypes or columns.
    """
    shapes = [folder.entries[piece.key].shape[len(piece.leading) :] for piece in pieces]
    dtypes = [folder.entries[piece.key].dtype for piece in pieces]
    if len({*dtypes}) > 1 or len({shape[1:] for shape in shapes}) > 1:
        raise CheckpointError(
            f"{folder.path}: the parts of {name} do not belong to one tensor: they are {shapes} of "
            f"{dtypes}"
        )
    shape = shapes[0] if len(shapes) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
    return torch.empty(shape, dtype=dtypes[0], device="meta")


def _read(folder: CheckpointFolder, shape: Sequence[int], pieces: Sequence[Piece]) -> torch.Tensor:
    """Put a tensor of the model together, in its stored dtype.

    Raises:
        CheckpointError: It is not all there, or damaged.
    """
    for piece in pieces:
        folder.check_stored(piece.key)
    data = torch.empty(shape, dtype=folder.entries[pieces[0].key].dtype)
    parts: Sequence[torch.Tensor] = [data]
    if len(pieces) > 1:
        parts = torch.split(data, [folder.entries[p.key].shape[len(p.leading)] for p in pieces])
    folder.fill(
        [
            ReadRequest(p.key, (*p.leading, *(0 for _ in shape)), part[(None,) * len(p.leading)])
            for p, part in zip(pieces, parts, strict=True)
        ]
    )
    return data


def natural_order(name: str) -> str:
    """Sort key for names in which numbers count as numbers."""
    return re.sub("[0-9]+", lambda number: number[0].zfill(20), name)


def _by_prefix(folder: CheckpointFolder, prefix: str | None) -> Pieces:
    if prefix is None:
        prefix = MODEL if folder.manifest is not None or _is_nested(folder) else ""
    keys = (key for key, _ in folder.tensors() if key.startswith(prefix))
    found = {key.removeprefix(prefix): [Piece(key)] for key in keys}
    if not found:
        raise CheckpointError(
            f"{folder.path} holds no tensors called {prefix}*; name another prefix"
            if prefix
            else f"{folder.path} holds no tensors"
        )
    if prefix and (cut := next((name for name in found if name.startswith(".")), None)):
        raise CheckpointError(
            f"prefix {prefix!r} would leave names such as {cut!r}; name {prefix + '.'!r}"
        )
    return found


def _tied(
    folder: CheckpointFolder, tensors: Mapping[str, torch.Tensor], found: Pieces
) -> dict[str, str]:
    """Map the names of tensors that share the stored chunks of another one to its name."""
    order = {key: i for i, key in enumerate(folder.entries)}

    def place(name: str) -> Hashable:
        pieces = found[name] if tensors[name].nbytes else ()
        stored = tuple((frozenset(folder.entries[p.key].chunks), p.leading) for p in pieces)
        return tensors[name].shape, tensors[name].dtype, stored or name

    # The first name of a tensor is that of the first entry.
    by_entry = sorted(tensors, key=lambda name: order[found[name][0].key])
    return other_names((name, place(name)) for name in by_entry)


def _is_nested(folder: CheckpointFolder) -> bool:
    """Whether tensors were saved in a nested dictionary under `model`."""
    paths = [entry.path for entry in folder.entries.values() if entry.path is not None]
    if not paths:
        return any(key.startswith(MODEL) for key, _ in folder.tensors())
    return any(len(path) > 1 and f"{path[0]}." == MODEL for path in paths)


MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export.

    Attributes:
        files: The files or the folder; of several safetensors files the index is the last.
        num_tensors: Number of names of tensors of the model.
        nbytes: Bytes of their elements; tied tensors count once.
        left_out: Other names in the source: optimizer state and objects.
    """

    files: tuple[Path, ...]
    num_tensors: int
    nbytes: int
    left_out: tuple[str, ...]


def export(
    path: str | Path,
    out_file: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    prefix: str | None = None,
    advance: Advance = unwatched,
) -> Exported:
    """Write the model of a checkpoint as plain tensors under plain names.

    One process, no process group. It takes the memory of one `.safetensors` file, or of the model
    for `.pt`.

    Args:
        path: The checkpoint: a folder of `save`, of torch's own distributed checkpoint, or of a
            framework whose adapter is installed; or any other source of `convert`.
        out_file: The file to write: `.safetensors`, or `.pt` for `torch.load`.
        dtype: Dtype of floating-point tensors; None leaves them unchanged.
        max_shard_bytes: A larger `.safetensors` model becomes several files of at most so many
            bytes, or of one tensor, and an index.
        prefix: Prefix of the model's tensors in the checkpoint, which is removed; detected if None.
        advance: Called with the bytes that were read so far, and with all bytes of the model.

    Returns:
        What was written.

    Raises:
        ValueError: An argument is not valid, or the file already exists.
        CheckpointError: The checkpoint cannot be read, is damaged, or contains a tensor that the
            file format does not support.
    """
    target = Path(out_file)
    if target.suffix not in (SAFETENSORS, *PT_SUFFIXES):
        raise ValueError(f"out_file is {target.name}; name it {SAFETENSORS} or .pt")
    return convert(
        path, target, dtype=dtype, max_shard_bytes=max_shard_bytes, prefix=prefix, advance=advance
    )


def convert(
    source: str | Path,
    target: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    prefix: str | None = None,
    advance: Advance = unwatched,
) -> Exported:
    """Write the model of a checkpoint of one kind as one of another.

    Args:
        source: A checkpoint's folder, a `.safetensors` file or index, or a `.pt` file that holds
            a model's state dict.
        target: As in `export`; anything else is a folder, which `load` reads.
        dtype: As in `export`.
        max_shard_bytes: As in `export`.
        prefix: As in `export`, of a folder.
        advance: As in `export`.

    Returns:
        What was written.

    Raises:
        ValueError: As in `export`.
        CheckpointError: As in `export`.
    """
    target = Path(target)
    if dtype is not None and dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(f"dtype is {dtype}; tensors can be converted to {names}")
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be at least 1")
    check_absent(target)
    check_absent(index_of(target))
    for parent in target.absolute().parents:
        if parent.exists() and not parent.is_dir():
            raise ValueError(f"{target} cannot be written: {parent} is not a folder")
    opened = converted(open_source(source, prefix=prefix), dtype, advance)
    with naming_full_disk(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == SAFETENSORS:
            files = write_safetensors(opened, target, max_shard_bytes)
        elif target.suffix in PT_SUFFIXES:
            files = write_pt(opened, target)
        else:
            files = _write_folder(opened, target)
    nbytes = sum(t.nbytes for name, t in opened.tensors.items() if name not in opened.tied)
    return Exported(tuple(files), len(opened.tensors), nbytes, tuple(opened.left_out))


def open_source(path: str | Path, *, prefix: str | None = None) -> TensorSource:
    """Open a checkpoint of any kind to read its model.

    Args:
        path: As the source of `convert`.
        prefix: As in `export`.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    kind, path = find_kind(path)
    if prefix is not None and kind is not CheckpointKind.FOLDER:
        raise CheckpointError(
            f"{path} holds nothing but a model, and prefix {prefix!r} selects tensors of a folder; "
            "leave it out"
        )
    if kind is CheckpointKind.SAFETENSORS:
        return open_safetensors(path)
    if kind is CheckpointKind.PT:
        return open_pt(path)
    return _open_folder(path, prefix)


def _write_folder(source: TensorSource, target: Path) -> list[Path]:
    """Write a folder of torch's distributed checkpoint with one chunk for each tensor."""
    entries: dict[str, Blocks] = {}
    for name, tensor in source.tensors.items():
        if name not in source.tied:
            blocks = entries[MODEL + name] = Blocks(tensor.shape, tensor.dtype)
            blocks.add((0,) * tensor.dim(), tensor.shape, partial(source.read, name))
    tied = {MODEL + name: MODEL + kept for name, kept in source.tied.items()}
    paths = {MODEL + name: (MODEL.removesuffix("."), name) for name in source.tensors}
    with created([target]) as (unfinished,):
        write_folder(unfinished, entries, tied=tied, paths=paths)
    return [target]


_MODEL = "model"
"""Name of a model's files in Hugging Face's libraries."""


class CheckpointKind(enum.Enum):
    """Kinds of checkpoints; the value is a name for messages."""

    FOLDER = "folder of torch's distributed checkpoint"
    SAFETENSORS = "safetensors"
    PT = "file of torch.save"


def find_kind(path: str | Path) -> tuple[CheckpointKind, Path]:
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
        # The name of a single file also selects the index of several files.
        if path.name.endswith((SAFETENSORS, SAFETENSORS + INDEX)):
            return CheckpointKind.SAFETENSORS, path
        is_pt = path.suffix in PT_SUFFIXES and path.is_file()
        return (CheckpointKind.PT if is_pt else CheckpointKind.FOLDER), path
    is_folder = (path / METADATA).exists() or (path / MANIFEST).exists()
    if is_folder or path.name.endswith(INCOMPLETE):
        return CheckpointKind.FOLDER, path
    for kind, endings in (
        (CheckpointKind.SAFETENSORS, (SAFETENSORS + INDEX,)),
        (CheckpointKind.SAFETENSORS, (SAFETENSORS,)),
        (CheckpointKind.PT, PT_SUFFIXES),
    ):
        found = sorted(file for file in path.iterdir() if file.name.endswith(endings))
        named = [file for file in found if file.name == _MODEL + endings[0]]
        if len(found) > 1 and not named:
            names = listed((file.name for file in found), 4)
            raise CheckpointError(
                f"{path} holds {len(found)} files *{endings[0]}: name one of {names}"
            )
        if found:
            return kind, (named or found)[0]
    return CheckpointKind.FOLDER, path
