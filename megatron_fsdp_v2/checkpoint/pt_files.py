"""Files of `torch.save`, written tensor by tensor.

`torch.save` wants everything in memory at once. What it writes is a zip archive: a pickle that says
how tensors are made of storages, and one record with the bytes of each storage. The archive is
written here record by record, so that one tensor is in memory at a time; `torch.load` reads it.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, override

import torch

from megatron_fsdp_v2.checkpoint.errors import CheckpointError, NotFoundError
from megatron_fsdp_v2.checkpoint.plain_tensors import (
    PlainTensor,
    Progress,
    TensorSource,
    converted,
    write_elements,
    written_whole,
)
from megatron_fsdp_v2.checkpoint.torch_files import STORAGE_DTYPES, load_plain
from megatron_fsdp_v2.checkpoint.trust import check_name

__all__ = ["SUFFIXES", "PtSource", "write_pt"]

SUFFIXES = (".pt", ".pth", ".bin")

_ROOT = "archive"
_STORAGES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}

# Torch maps files into memory, where elements must lie at multiples of their length.
_ALIGNMENT = 64
_LOCAL_HEADER = 30
_ZIP64_EXTRA = 20
_EXTRA_HEADER = 4
_PADDING_ID = b"FB"


def write_pt(
    source: TensorSource, file: Path, dtype: torch.dtype | None, progress: Progress
) -> list[Path]:
    """Write a model as a dictionary of tensors by name, one tensor in memory at a time.

    A tensor that is there under several names is written once: what is loaded shares memory again.

    Args:
        source: Where tensors come from.
        file: What to call it.
        dtype: Of floating-point tensors; None leaves them as they are.
        progress: Told how many bytes are written.

    Returns:
        The file.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    every = [converted(tensor, dtype) for tensor in source.tensors]
    pairs = [(t, converted(t, dtype)) for t in source.tensors if t.name not in source.tied]
    total, done = sum(tensor.nbytes for _, tensor in pairs), 0
    with (
        written_whole([file]) as (unfinished,),
        zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as archive,
    ):
        numbers = {tensor.name: number for number, (_, tensor) in enumerate(pairs)}
        numbers |= {name: numbers[kept] for name, kept in source.tied.items()}
        pickled = _pickled(every, numbers)
        archive.writestr(zipfile.ZipInfo(f"{_ROOT}/data.pkl"), pickled)
        archive.writestr(zipfile.ZipInfo(f"{_ROOT}/byteorder"), sys.byteorder)
        for number, (stored, tensor) in enumerate(pairs):
            with archive.open(_record(archive, number), "w", force_zip64=True) as record:
                write_elements(record.write, source.read(stored), tensor)
            done += tensor.nbytes
            progress(done, total)
        archive.writestr(zipfile.ZipInfo(f"{_ROOT}/version"), "3\n")
    return [file]


def _record(archive: zipfile.ZipFile, number: int) -> zipfile.ZipInfo:
    """Create the record of a storage, with a header padded to align the elements."""
    info = zipfile.ZipInfo(f"{_ROOT}/data/{number}")
    before = archive.start_dir + _LOCAL_HEADER + len(info.filename) + _ZIP64_EXTRA + _EXTRA_HEADER
    padding = -before % _ALIGNMENT
    info.extra = _PADDING_ID + padding.to_bytes(2, "little") + bytes(padding)
    return info


class _Storage:
    """Placeholder for the storage of a tensor."""

    def __init__(self, number: int, tensor: PlainTensor) -> None:
        name = _STORAGES.get(tensor.dtype)
        kind = torch.storage.UntypedStorage if name is None else getattr(torch, name)
        length = tensor.nbytes if name is None else tensor.numel
        self.pid = ("storage", kind, str(number), "cpu", length)


class _Tensor:
    """Placeholder that pickles as `torch.save` pickles a tensor."""

    def __init__(self, number: int, tensor: PlainTensor) -> None:
        self._storage = _Storage(number, tensor)
        self._tensor = tensor

    @override
    def __reduce__(self) -> Any:
        tensor, step = self._tensor, 1
        stride: list[int] = []
        for length in reversed(tensor.shape):
            stride.insert(0, step)
            step *= max(length, 1)
        hooks: OrderedDict[int, Any] = OrderedDict()
        made = (self._storage, 0, tensor.shape, tuple(stride), False, hooks)
        if tensor.dtype in _STORAGES:
            return torch._utils._rebuild_tensor_v2, made
        return torch._utils._rebuild_tensor_v3, (*made, tensor.dtype)


class _Pickler(pickle.Pickler):
    @override
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, _Storage) else None


def _pickled(tensors: Sequence[PlainTensor], numbers: Mapping[str, int]) -> bytes:
    content = io.BytesIO()
    described = {tensor.name: _Tensor(numbers[tensor.name], tensor) for tensor in tensors}
    _Pickler(content, protocol=2).dump(described)
    return content.getvalue()


class PtSource:
    """Tensors of a file that `torch.save` wrote: a dictionary of tensors by name.

    The file is mapped into memory where it can be: the system reads what is touched, and may forget
    it again.

    Args:
        path: The file.

    Raises:
        CheckpointError: There is none, or it holds something other than plain tensors by name.
    """

    def __init__(self, path: Path) -> None:
        self.left_out: Sequence[str] = ()
        if not path.is_file():
            raise NotFoundError(f"{path} does not exist")
        loaded = load_plain(path, str(path), mmap=True)
        if not isinstance(loaded, dict):
            raise CheckpointError(
                f"{path} holds a {type(loaded).__name__}; save the model's state dict alone"
            )
        for name, value in loaded.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{path} holds {name!r}, which is a {type(value).__name__} and no tensor: save "
                    "the model's state dict alone"
                )
            try:
                check_name(name)
            except ValueError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            # Copied row by row, a few bytes would become as many as their strides say.
            if value.layout != torch.strided or value.nbytes > value.untyped_storage().nbytes():
                raise CheckpointError(
                    f"{path} holds {name}, which is not a dense tensor or repeats its elements; "
                    "save it as contiguous()"
                )
        self.tied: Mapping[str, str] = _tied(loaded)
        self._loaded: dict[str, torch.Tensor] = loaded
        self.tensors: Sequence[PlainTensor] = [
            PlainTensor(name, tuple(value.shape), value.dtype) for name, value in loaded.items()
        ]

    def read(self, tensor: PlainTensor) -> torch.Tensor:
        """Read one of the tensors."""
        return self._loaded[tensor.name].detach()


def _tied(loaded: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Other names of tensors that are the same elements of the same memory."""
    first: dict[tuple[Any, ...], str] = {}
    found: dict[str, str] = {}
    for name, value in loaded.items():
        if value.numel() == 0:
            continue
        place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        kept = first.setdefault(place, name)
        if kept != name:
            found[name] = kept
    return found
