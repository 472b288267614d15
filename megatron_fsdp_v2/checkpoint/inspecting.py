"""List the contents of a checkpoint without reading a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

__all__ = ["Contents", "inspect", "listing"]


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a checkpoint.

    Attributes:
        path: The folder or file.
        tensors: All tensors, the model's and others, under the names they are stored as.
        chunks: In how many chunks a tensor is stored, by its name, where that is not one.
        objects: Entries that are not tensors: bytes they take in their file, by name.
        manifest: What is known of the save; empty without a manifest.
    """

    path: Path
    tensors: Sequence[PlainTensor]
    chunks: Mapping[str, int] = field(default_factory=dict)
    objects: Mapping[str, int] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dictionary for `json.dumps`."""
        return {
            "path": str(self.path),
            "manifest": self.manifest or None,
            "tensors": {
                tensor.name: {
                    "shape": list(tensor.shape),
                    "dtype": _dtype(tensor),
                    "nbytes": tensor.nbytes,
                    "chunks": self.chunks.get(tensor.name, 1),
                }
                for tensor in self.tensors
            },
            "objects": {name: {"nbytes": nbytes} for name, nbytes in self.objects.items()},
            "num_tensors": len(self.tensors),
            "nbytes": self.nbytes,
        }


def inspect(path: str | Path) -> Contents:
    """List the contents of a checkpoint: a folder, a `.safetensors` file or index, or a `.pt` file.

    See `find_kind` for what a folder may hold.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    path = Path(path)
    if find_kind(path)[0] is not CheckpointKind.FOLDER:
        return Contents(path, open_source(path).tensors)
    folder = CheckpointFolder(path)
    tensors, chunks, objects = [], {}, {}
    for key, entry in folder.entries.items():
        if entry.dtype is not None:
            tensors.append(PlainTensor(key, entry.shape, entry.dtype))
            chunks[key] = len(entry.chunks)
        else:
            objects[key] = sum(chunk.length for chunk in entry.chunks)
    manifest: dict[str, Any] = {}
    if (saved := folder.manifest) is not None:
        manifest = {"version": FORMAT_VERSION, "world_size": saved.world_size}
        manifest |= {"torch": saved.torch, "files": len(folder.lengths)}
    return Contents(path, tensors, chunks, objects, manifest)


def listing(contents: Contents, depth: int | None = None) -> Iterator[str]:
    """Format names with shapes, dtypes and sizes, line by line.

    Args:
        contents: What is in it.
        depth: Parts of names to show; entries with the same first parts are added up. None shows
            every entry.
    """
    leaves = {tensor.name: tensor.nbytes for tensor in contents.tensors} | dict(contents.objects)
    tensors = {tensor.name: tensor for tensor in contents.tensors}
    groups: dict[str, list[str]] = {}
    for name in sorted(leaves, key=natural_order):
        groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
    rows = []
    for group, names in groups.items():
        size = readable_size(sum(leaves[name] for name in names))
        if names[0] != group:
            rows.append((group, f"{len(tensors.keys() & set(names))} tensors", "", size))
        elif group in tensors:
            rows.append((group, str(tensors[group].shape), _dtype(tensors[group]), size))
        else:
            rows.append((group, "", "object", size))
    rows.append(("total", f"{len(tensors)} tensors", "", readable_size(contents.nbytes)))
    yield from aligned(rows, left=(0, 1, 2))
    if contents.manifest:
        known = contents.manifest
        yield (
            f"manifest of version {known['version']}: saved by {known['world_size']} ranks with "
            f"torch {known['torch']}, {known['files']} files"
        )
    elif contents.chunks:
        yield "no manifest: saved by another program"


def _dtype(tensor: PlainTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
