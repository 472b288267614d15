"""List the contents of a checkpoint without reading a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fsdp_v2._text import aligned, readable_size
from megatron_fsdp_v2.checkpoint.exporting import Kind, find_kind, open_source
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.manifest import FORMAT_VERSION
from megatron_fsdp_v2.checkpoint.model_tensors import natural_order
from megatron_fsdp_v2.checkpoint.plain_tensors import PlainTensor

__all__ = ["Contents", "inspect", "tree"]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A stored object that is not a tensor.

    Attributes:
        name: Its name.
        nbytes: Bytes it takes in its file.
    """

    name: str
    nbytes: int


@dataclass(slots=True)
class Contents:
    """Contents of a checkpoint.

    Attributes:
        path: The folder or file.
        tensors: All tensors, the model's and others, under the names they are stored as.
        chunks: In how many chunks a tensor is stored, by its name, where that is not one.
        objects: What is not a tensor.
        manifest: What is known of the save; empty without a manifest.
    """

    path: Path
    tensors: Sequence[PlainTensor] = ()
    chunks: dict[str, int] = field(default_factory=dict)
    objects: Sequence[StoredObject] = ()
    manifest: dict[str, Any] = field(default_factory=dict)

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
            "objects": {found.name: {"nbytes": found.nbytes} for found in self.objects},
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
    if find_kind(path)[0] is not Kind.FOLDER:
        return Contents(path, open_source(path).tensors)
    folder = CheckpointFolder(path)
    tensors, objects, chunks = [], [], {}
    stored = {
        index.fqn: info.length for index, info in (folder.metadata.storage_data or {}).items()
    }
    for key, entry in folder.metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors.append(PlainTensor(key, tuple(entry.size), entry.properties.dtype))
            chunks[key] = len(entry.chunks)
        else:
            objects.append(StoredObject(key, stored.get(key, 0)))
    manifest: dict[str, Any] = {}
    if folder.manifest is not None:
        manifest = {
            "version": FORMAT_VERSION,
            "world_size": folder.manifest.world_size,
            "torch": folder.manifest.torch,
            "units": dict(folder.manifest.units),
            "files": len(folder.manifest.files),
        }
    return Contents(path, tensors, chunks, objects, manifest)


@dataclass(slots=True)
class _Node:
    """A part of names, and the parts that follow it."""

    children: dict[str, _Node] = field(default_factory=dict)
    leaf: PlainTensor | StoredObject | None = None
    num_tensors: int = 0
    num_objects: int = 0
    nbytes: int = 0

    def add(self, leaf: PlainTensor | StoredObject) -> None:
        node = self
        for part in leaf.name.split("."):
            node._count(leaf)
            node = node.children.setdefault(part, _Node())
        node._count(leaf)
        node.leaf = leaf

    def _count(self, leaf: PlainTensor | StoredObject) -> None:
        self.num_tensors += isinstance(leaf, PlainTensor)
        self.num_objects += isinstance(leaf, StoredObject)
        self.nbytes += leaf.nbytes


def tree(contents: Contents, depth: int | None = None) -> Iterator[str]:
    """Format names as a tree, with shapes, dtypes and sizes, line by line.

    Args:
        contents: What is in it.
        depth: Parts of names to show; what is below is added up. All of them when None.
    """
    root = _Node()
    leaves: list[PlainTensor | StoredObject] = [*contents.tensors, *contents.objects]
    for leaf in leaves:
        root.add(leaf)
    rows = list(_rows(root, 0, depth))
    rows.append(("total", f"{len(contents.tensors)} tensors", "", readable_size(contents.nbytes)))
    yield from aligned(rows, left=(0, 1, 2))
    if contents.manifest:
        known = contents.manifest
        yield (
            f"manifest of version {known['version']}: saved by {known['world_size']} ranks with "
            f"torch {known['torch']}, {known['files']} files"
        )
    elif contents.path.is_dir() and contents.chunks:
        yield "no manifest: saved by another program"


def _rows(node: _Node, level: int, depth: int | None) -> Iterator[tuple[str, str, str, str]]:
    for part, below in sorted(node.children.items(), key=lambda item: natural_order(item[0])):
        name, child = part, below
        # Parts without siblings share a line.
        while child.leaf is None and len(child.children) == 1:
            ((more, child),) = child.children.items()
            name = f"{name}.{more}"
        indented = "  " * level + name
        size = readable_size(child.nbytes)
        leaf = child.leaf
        if isinstance(leaf, PlainTensor):
            yield indented, str(tuple(leaf.shape)), _dtype(leaf), size
        elif leaf is not None:
            yield indented, "", "object", size
        else:
            count = f"{child.num_tensors} tensors" if child.num_tensors else ""
            yield indented, count or f"{child.num_objects} objects", "", size
        if depth is None or level + 1 < depth:
            yield from _rows(child, level + 1, depth)


def _dtype(tensor: PlainTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
