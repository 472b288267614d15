"""Functions that write, damage and bitwise compare checkpoints."""

from __future__ import annotations

import contextlib
import pickle
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp_v2.checkpoint import writing
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, METADATA
from megatron_fsdp_v2.checkpoint.writing import Blocks, pickled
from megatron_fsdp_v2_cli import main

FIRST = "__0_0.distcp"
"""Name of the first data file."""

Tensors = Mapping[str, torch.Tensor]


def ckpt(*words: object) -> int:
    """Run `megatron-fsdp-v2 ckpt` and return its exit code."""
    return main(["ckpt", *map(str, words)])


def write_folder(
    path: Path,
    tensors: Tensors,
    objects: Mapping[str, object] | None = None,
    *,
    cut: int | None = None,
) -> Path:
    """Write a checkpoint folder with tensors in chunks, as several ranks do; return its path.

    Args:
        path: The folder.
        tensors: Tensors by name.
        objects: Other objects by name.
        cut: Row at which tensors with more rows are split into two chunks.
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
    """Yield a folder's metadata for changes; write the metadata and remove the manifest."""
    file = path / METADATA
    metadata: Metadata = pickle.loads(file.read_bytes())
    yield metadata
    (path / MANIFEST).unlink(missing_ok=True)
    file.write_bytes(pickle.dumps(metadata))


@contextlib.contextmanager
def no_file_longer_than(nbytes: int) -> Iterator[None]:
    """Simulate a full disk: writes beyond this file size fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names_in(folder: Path) -> list[str]:
    """Return the sorted names of a folder's entries."""
    return sorted(path.name for path in folder.iterdir())


def same_bits(mine: Tensors, theirs: Tensors) -> bool:
    """Assert equal names, shapes, dtypes and bits, also for float8; return True."""

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).contiguous().view(torch.uint8)

    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        other = theirs[name]
        assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype), name
        assert torch.equal(plain(tensor), plain(other)), name
    return True
