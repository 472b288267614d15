"""Checkpoints for the tests here: written, damaged, and compared bit by bit."""

from __future__ import annotations

import contextlib
import pickle
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp_v2.checkpoint import writing
from megatron_fsdp_v2.checkpoint.metadata import MANIFEST, METADATA
from megatron_fsdp_v2.checkpoint.writing import Blocks, pickled
from megatron_fsdp_v2.cli import main

FIRST = "__0_0.distcp"
"""The file of data that one process writes."""

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
) -> Path:
    """A checkpoint folder as several ranks write it.

    Args:
        path: The folder.
        tensors: What it holds, by name.
        objects: Other things in it.
        cut: Row at which tensors with more rows are cut in two chunks.
    """
    entries: dict[str, object] = {}
    for name, data in tensors.items():
        blocks = entries[name] = Blocks(data.shape, data.dtype)
        is_cut = cut is not None and data.dim() > 0 and len(data) > cut
        for start, part in ((0, data[:cut]), (cut, data[cut:])) if is_cut else ((0, data),):
            offset = (start, *[0] * data.dim())[: data.dim()]
            blocks.add(offset, part.shape, lambda part=part: part)
    entries |= {name: pickled(value) for name, value in (objects or {}).items()}
    writing.write_folder(path, entries)
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


@contextlib.contextmanager
def no_file_longer_than(nbytes: int) -> Iterator[None]:
    """Simulate a disk that becomes full: writes beyond this length of a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
