"""Safetensors files: read by the library, written tensor by tensor.

The library's `save_file` takes all tensors of a file at once, so files are written here: a length
of eight bytes, a header in JSON and the elements. A model above a size becomes several files with
an index beside them, as Hugging Face's libraries name and read them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from megatron_fsdp_v2.checkpoint.trust import check_file_name, check_name, read_json

__all__ = ["INDEX", "SUFFIX", "SafetensorsSource", "index_of", "write_safetensors"]

safetensors: Any = None
with contextlib.suppress(ImportError):
    safetensors = importlib.import_module("safetensors")

SUFFIX = ".safetensors"
INDEX = ".index.json"
"""What the name of an index ends in, after the name that one file would have."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_FORMAT = "format"
_MAX_INDEX = 100_000_000


def index_of(file: Path) -> Path:
    """The index of a model in several files, by the name of one file."""
    return file.with_name(file.name + INDEX)


def write_safetensors(
    source: TensorSource,
    file: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    progress: Progress,
) -> list[Path]:
    """Write a model, one tensor in memory at a time.

    A tensor with several names is written under one, and the header maps the others to it, as the
    library's `save_model` and `load_model` do.

    Args:
        source: Where tensors come from.
        file: The name of the file, if it is one.
        dtype: Of floating-point tensors; None leaves them as they are.
        max_shard_bytes: Bytes of tensors that a file may hold, unless one alone has more.
        progress: Called with the bytes that are written.

    Returns:
        The files; the index is the last of several.

    Raises:
        CheckpointError: The format has no name for the dtype of a tensor, or one cannot be read.
    """
    tied = {name: kept for name, kept in source.tied.items() if name != _FORMAT}
    pairs = [(t, converted(t, dtype)) for t in source.tensors if t.name not in tied]
    for _, tensor in pairs:
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{tensor.name} is of {tensor.dtype}, which {SUFFIX} cannot hold")
    shards = list(_shards(pairs, max_shard_bytes))
    paths = [file]
    if len(shards) > 1:
        names = (f"{file.stem}-{i + 1:05d}-of-{len(shards):05d}" for i in range(len(shards)))
        # Without an index the files are no model, so that it comes last.
        paths = [*(file.with_name(name + SUFFIX) for name in names), index_of(file)]
    total, done = sum(tensor.nbytes for _, tensor in pairs), 0
    weight_map: dict[str, str] = {}
    with written_whole(paths) as unfinished:
        for path, final, shard in zip(unfinished, paths, shards, strict=False):
            with path.open("wb") as out:
                out.write(_header([tensor for _, tensor in shard], tied))
                for stored, tensor in shard:
                    write_elements(out.write, source.read(stored), tensor)
                    weight_map[tensor.name] = final.name
                    done += tensor.nbytes
                    progress(done, total)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            unfinished[-1].write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return paths


_Pair = tuple[PlainTensor, PlainTensor]
"""A tensor as it is stored and as it will be written."""


def _shards(pairs: Sequence[_Pair], limit: int) -> Iterator[list[_Pair]]:
    shards: list[list[_Pair]] = [[]]
    for pair in pairs:
        if shards[-1] and sum(t.nbytes for _, t in shards[-1]) + pair[1].nbytes > limit:
            shards.append([])
        shards[-1].append(pair)
    # Long elements first, so that every element is aligned.
    return (sorted(shard, key=lambda pair: -pair[1].dtype.itemsize) for shard in shards)


def _header(tensors: Sequence[PlainTensor], tied: Mapping[str, str]) -> bytes:
    here = {tensor.name for tensor in tensors}
    others = {name: kept for name, kept in tied.items() if kept in here}
    header: dict[str, Any] = {"__metadata__": {_FORMAT: "pt", **others}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


class SafetensorsSource:
    """Tensors of a file, or of several with an index.

    Args:
        path: The file; or what one file would be called; or the index; or the folder of an index.

    Attributes:
        files: Those it is read from, besides an index.
        notes: What is unusual about them, a sentence each.

    Raises:
        CheckpointError: There is none, it is damaged, or the library is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.left_out: Sequence[str] = ()
        self.files: list[Path] = []
        self.notes: list[str] = []
        self._places: dict[str, tuple[Any, str]] = {}
        found: dict[str, PlainTensor] = {}
        tied: dict[str, str] = {}
        for file, expected in _files(path):
            self.files.append(file)
            opened, there, described = _opened(file)
            for name in sorted(expected - there.keys() - described.keys()):
                raise CheckpointError(f"{file} does not hold {name}, which its index says it does")
            unknown = sorted(there.keys() - expected) if expected else []
            self.notes += [f"{file.name} holds {n}, which the index does not name" for n in unknown]
            found |= {name: tensor for name, tensor in there.items() if name not in unknown}
            self._places |= {name: (opened, name) for name in there}
            tied |= {name: kept for name, kept in described.items() if kept in there}
        # Whatever else a header says about itself names no tensor, or the tensor is there.
        self.tied: Mapping[str, str] = {
            name: kept for name, kept in tied.items() if kept in found and name not in found
        }
        for name, kept in self.tied.items():
            self._places[name] = self._places[kept]
            found[name] = PlainTensor(name, found[kept].shape, found[kept].dtype)
        self.tensors: Sequence[PlainTensor] = list(found.values())

    def read(self, tensor: PlainTensor) -> torch.Tensor:
        """Read one of the tensors."""
        opened, name = self._places[tensor.name]
        data: torch.Tensor = opened.get_tensor(name)
        return data


def _opened(file: Path) -> tuple[Any, dict[str, PlainTensor], dict[str, str]]:
    """Open a file: with the tensors in it by name, and what else its header says."""
    if safetensors is None:
        raise CheckpointError(f"reading {file} needs the library safetensors; install it with pip")
    try:
        opened = safetensors.safe_open(file, "pt")
        there: dict[str, PlainTensor] = {}
        for name in opened.keys():  # noqa: SIM118
            stored = opened.get_slice(check_name(name))
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
            if dtype not in _DTYPES:
                raise ValueError(f"{name} is of {dtype}, which torch does not have")
            there[name] = PlainTensor(name, shape, _DTYPES[dtype])
        return opened, there, opened.metadata() or {}
    except (safetensors.SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read: it is damaged or truncated ({error})"
        ) from error


def _files(path: Path) -> Iterator[tuple[Path, set[str]]]:
    """Files of a model, each with the names an index expects in it: none without an index.

    Raises:
        CheckpointError: The index cannot be read, or a file is missing.
    """
    if path.is_dir():
        indices = sorted(path.glob(f"*{SUFFIX}{INDEX}"))
        if len(indices) != 1:
            raise CheckpointError(f"{path} holds {len(indices)} files *{SUFFIX}{INDEX}: name one")
        path = indices[0]
    if path.is_file() and not path.name.endswith(INDEX):
        yield path, set()
        return
    index = path if path.name.endswith(INDEX) else index_of(path)
    if not index.is_file():
        raise NotFoundError(f"{path} does not exist")
    by_file: dict[str, set[str]] = {}
    try:
        if index.stat().st_size > _MAX_INDEX:
            raise ValueError(f"it is longer than {_MAX_INDEX} bytes")
        weight_map = read_json(index.read_bytes()).get("weight_map")
        if type(weight_map) is not dict:
            raise ValueError("it has no weight_map")
        for key, name in weight_map.items():
            by_file.setdefault(check_file_name(name, check_name(key)), set()).add(key)
    except ValueError as error:
        raise CheckpointError(f"{index} cannot be read ({error}); it is damaged") from error
    for name in sorted(by_file):
        file = index.with_name(name)
        if not file.is_file():
            raise CheckpointError(f"{index} is incomplete: {name} is missing")
        yield file, by_file[name]
