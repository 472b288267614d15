"""List the contents of a checkpoint without reading a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_fsdp_v2._text import aligned, readable_size
from megatron_fsdp_v2.checkpoint.exporting import (
    CheckpointKind,
    find_kind,
    natural_order,
    open_source,
)
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.manifest import FORMAT_VERSION
from megatron_fsdp_v2.checkpoint.plain_files import PlainTensor


def inspect(path: str | Path) -> dict[str, Any]:
    """List the contents of a checkpoint: a folder, a `.safetensors` file or index, or a `.pt` file.

    See `find_kind` for what a folder may hold.

    Returns:
        What `ckpt inspect --json` prints: `path` and `kind`; `tensors`, by the names they are
        stored as, each with its shape, dtype, bytes and number of chunks; `objects`, the other
        entries, each with its bytes in the file; the number and the bytes of all tensors; and
        `manifest`, what is known of the save, None without a manifest.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    kind, _ = find_kind(path)
    objects: dict[str, Any] = {}
    manifest: dict[str, Any] | None = None
    if kind is CheckpointKind.FOLDER:
        folder, found = CheckpointFolder(path), []
        for key, entry in folder.entries.items():
            if entry.dtype is not None:
                found.append((PlainTensor(key, entry.shape, entry.dtype), len(entry.chunks)))
            else:
                objects[key] = {"nbytes": sum(chunk.length for chunk in entry.chunks)}
        if (saved := folder.manifest) is not None:
            manifest = {"version": FORMAT_VERSION, "world_size": saved.world_size}
            manifest |= {"torch": saved.torch, "files": len(folder.lengths)}
    else:
        found = [(tensor, 1) for tensor in open_source(path).tensors]
    return {
        "path": str(path),
        "kind": kind.value,
        "manifest": manifest,
        "tensors": {
            tensor.name: {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "nbytes": tensor.nbytes,
                "chunks": chunks,
            }
            for tensor, chunks in found
        },
        "objects": objects,
        "num_tensors": len(found),
        "nbytes": sum(tensor.nbytes for tensor, _ in found),
    }


def listing(contents: Mapping[str, Any], depth: int | None = None) -> Iterator[str]:
    """Format names with shapes, dtypes and sizes, line by line.

    Args:
        contents: The result of `inspect`.
        depth: Parts of names to show; entries with the same first parts are added up. None shows
            every entry.
    """
    tensors, known = contents["tensors"], contents["manifest"]
    leaves = tensors | contents["objects"]
    groups: dict[str, list[str]] = {}
    for name in sorted(leaves, key=natural_order):
        groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
    rows = []
    for group, names in groups.items():
        size = readable_size(sum(leaves[name]["nbytes"] for name in names))
        if names[0] != group:
            rows.append((group, f"{len(tensors.keys() & set(names))} tensors", "", size))
        elif group in tensors:
            shape = str(tuple(tensors[group]["shape"]))
            rows.append((group, shape, tensors[group]["dtype"], size))
        else:
            rows.append((group, "", "object", size))
    rows.append(("total", f"{len(tensors)} tensors", "", readable_size(contents["nbytes"])))
    yield from aligned(rows, left=(0, 1, 2))
    if known:
        yield (
            f"manifest of version {known['version']}: saved by {known['world_size']} ranks with "
            f"torch {known['torch']}, {known['files']} files"
        )
    elif contents["kind"] == CheckpointKind.FOLDER.value:
        yield "no manifest: saved by another program"
