"""Find the tensors of a model in a checkpoint folder, and their plain names.

A training framework may store a model in other pieces than it is made of. What puts them together
again belongs to its adapter, which offers a function under the entry-point group
`megatron_fsdp_v2.checkpoint_layouts`; the core knows none of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder, ReadRequest
from megatron_fsdp_v2.checkpoint.plain_tensors import PlainTensor

__all__ = [
    "LAYOUT_GROUP",
    "MODEL",
    "FolderSource",
    "Layout",
    "ModelTensor",
    "Piece",
    "find_layouts",
    "natural_order",
]

LAYOUT_GROUP = "megatron_fsdp_v2.checkpoint_layouts"
MODEL = "model."
"""Prefix of a model's tensors in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a stored tensor.

    Attributes:
        key: Name of the stored tensor.
        start: Where the block starts in it.
        size: How long it is, per dimension of the stored tensor. That may have dimensions in front
            of those of the tensor it is a piece of (a number of a layer), of which it takes one
            index each.
    """

    key: str
    start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of the model, and the stored blocks it consists of.

    Attributes:
        tensor: Its plain name, shape and dtype.
        pieces: One after the other along a dimension.
        dim: This dimension.
    """

    tensor: PlainTensor
    pieces: tuple[Piece, ...]
    dim: int = 0


Layout = Callable[[CheckpointFolder], Sequence[ModelTensor] | None]
"""Returns the tensors of a checkpoint's model; None if the checkpoint is of another framework."""


def find_layouts() -> Iterator[Layout]:
    """Import the layouts of installed adapters."""
    for point in sorted(entry_points(group=LAYOUT_GROUP)):
        yield point.load()


class FolderSource:
    """The model of a checkpoint folder.

    Args:
        path: The folder.
        layouts: Asked one after the other what the model consists of; those of installed adapters
            when None.
        prefix: What the names of its tensors begin with. When None, a folder of this package, or
            one with a nested state dict, has them under `model.`, and in any other folder every
            tensor is one of the model.

    Raises:
        CheckpointError: It cannot be read, or holds no tensors of a model.
    """

    def __init__(
        self, path: Any, layouts: Sequence[Layout] | None = None, prefix: str | None = None
    ) -> None:
        self._folder = CheckpointFolder(path)
        found = None
        if prefix is None:
            for layout in find_layouts() if layouts is None else layouts:
                found = layout(self._folder)
                if found is not None:
                    break
        if found is None:
            found = _by_prefix(self._folder, prefix)
        # Metadata is in the order in which ranks were asked.
        found = sorted(found, key=lambda t: natural_order(t.tensor.name))
        self._by_name = {model_tensor.tensor.name: model_tensor for model_tensor in found}
        self.tensors: Sequence[PlainTensor] = [t.tensor for t in found]
        self.tied: Mapping[str, str] = _tied(self._folder, found)
        used = {piece.key for t in found for piece in t.pieces}
        self.left_out: Sequence[str] = [
            key for key in self._folder.metadata.state_dict_metadata if key not in used
        ]

    def read(self, tensor: PlainTensor) -> torch.Tensor:
        """Read a tensor of the model.

        Raises:
            CheckpointError: It is not all there, or damaged.
        """
        model_tensor, first = self._by_name[tensor.name], 0
        for key in {piece.key for piece in model_tensor.pieces}:
            self._folder.check_stored(key)
        data = torch.empty(tensor.shape, dtype=tensor.dtype)
        wanted = []
        for piece in model_tensor.pieces:
            target = data
            if len(model_tensor.pieces) > 1:
                extra = len(piece.size) - data.dim()
                length = piece.size[extra + model_tensor.dim]
                target = data.narrow(model_tensor.dim, first, length)
                first += length
            wanted.append(ReadRequest(piece.key, piece.start, target.view(piece.size)))
        self._folder.fill(wanted)
        return data


def natural_order(name: str) -> list[tuple[int, str, str]]:
    """Sort key for names in which numbers count as numbers."""
    parts = re.split(r"([0-9]+)", name)
    # Every other one is a number, of any length: the longer one is larger.
    numbers = [part.lstrip("0") if i % 2 else "" for i, part in enumerate(parts)]
    return [
        (len(number), number, part) if i % 2 else (-1, "", part)
        for i, (number, part) in enumerate(zip(numbers, parts, strict=True))
    ]


def _by_prefix(folder: CheckpointFolder, prefix: str | None) -> list[ModelTensor]:
    if prefix is None:
        prefix = MODEL if folder.manifest is not None or _is_nested(folder) else ""
    found = [
        _whole(key.removeprefix(prefix), key, entry)
        for key, entry in folder.tensors()
        if key.startswith(prefix)
    ]
    if not found:
        raise CheckpointError(
            f"{folder.path} holds no tensors called {prefix}*; name another prefix"
            if prefix
            else f"{folder.path} holds no tensors"
        )
    return found


def _whole(name: str, key: str, entry: TensorStorageMetadata) -> ModelTensor:
    shape = tuple(entry.size)
    piece = Piece(key, (0,) * len(shape), shape)
    return ModelTensor(PlainTensor(name, shape, entry.properties.dtype), (piece,))


def _tied(folder: CheckpointFolder, found: Sequence[ModelTensor]) -> dict[str, str]:
    """Other names of tied tensors: those that are stored at the same place."""
    order = {key: i for i, key in enumerate(folder.metadata.state_dict_metadata)}
    places: dict[str, list[tuple[Any, ...]]] = {}
    for index, info in (folder.metadata.storage_data or {}).items():
        place = (tuple(index.offset or ()), info.relative_path, info.offset, info.length)
        places.setdefault(index.fqn, []).append(place)
    stored = {key: tuple(sorted(of_key)) for key, of_key in places.items()}
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    # What a model calls a tensor first is saved first.
    for model_tensor in sorted(found, key=lambda t: order[t.pieces[0].key]):
        tensor = model_tensor.tensor
        pieces = tuple((stored.get(p.key, p.key), p.start, p.size) for p in model_tensor.pieces)
        what = (tensor.shape, tensor.dtype, model_tensor.dim, pieces)
        kept = first.setdefault(what, tensor.name)
        if kept != tensor.name and tensor.numel:
            tied[tensor.name] = kept
    return tied


def _is_nested(folder: CheckpointFolder) -> bool:
    """Whether tensors were saved in a nested dictionary under `model`."""
    paths = folder.metadata.planner_data
    if not isinstance(paths, dict):
        return any(key.startswith(MODEL) for key, _ in folder.tensors())
    return any(len(path) > 1 and f"{path[0]}." == MODEL for path in paths.values())
