"""Checkpoints for the tests here: written, damaged, and compared bit by bit."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp_v2.checkpoint.manifest import MANIFEST
from megatron_fsdp_v2.checkpoint.metadata import METADATA
from megatron_fsdp_v2.checkpoint.writing import FolderWriter
from megatron_fsdp_v2.cli import main

FIRST, SECOND = "__0_0.distcp", "__0_1.distcp"
"""Files of data, as writers call them."""

Tensors = Mapping[str, torch.Tensor]


def ckpt(*words: object) -> int:
    """The exit code of `megatron-fsdp-v2 ckpt`."""
    return main(["ckpt", *map(str, words)])


def write_folder(
    path: Path,
    tensors: Tensors,
    objects: Mapping[str, object] | None = None,
    *,
    cut: int | None = None,
    **options: Any,
) -> Path:
    """A checkpoint folder as several ranks write it.

    Args:
        path: The folder.
        tensors: What it holds, by name.
        objects: Other things in it.
        cut: Row at which tensors with more rows are cut in two chunks.
        options: Of the writer.
    """
    writer = FolderWriter(path, **options)
    for name, data in tensors.items():
        shape = tuple(data.shape)
        is_cut = cut is not None and data.dim() > 0 and len(data) > cut
        for start, part in ((0, data[:cut]), (cut, data[cut:])) if is_cut else ((0, data),):
            writer.add_block(name, shape, (start, *[0] * len(shape))[: len(shape)], part)
    for name, value in (objects or {}).items():
        writer.add_object(name, value)
    writer.finish()
    return path


def flip(file: Path, position: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


@contextlib.contextmanager
def changed_metadata(path: Path) -> Iterator[Metadata]:
    """A folder's metadata, to be changed; the folder has no manifest that would tell any more."""
    file = path / METADATA
    metadata: Metadata = pickle.loads(file.read_bytes())
    yield metadata
    (path / MANIFEST).unlink(missing_ok=True)
    file.write_bytes(pickle.dumps(metadata))


def names_in(folder: Path) -> list[str]:
    """What a folder holds."""
    return sorted(path.name for path in folder.iterdir())


def same_bits(mine: Tensors, theirs: Tensors) -> bool:
    """Whether tensors are the same by name, shape, dtype and every bit, as float8 needs."""

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).contiguous().view(torch.uint8)

    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        other = theirs[name]
        assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype), name
        assert torch.equal(plain(tensor), plain(other)), name
    return True
