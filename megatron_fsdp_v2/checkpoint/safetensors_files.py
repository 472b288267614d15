"""Safetensors files, written and read tensor by tensor.

The format is a length of eight bytes, a header in JSON and the elements. A model that is longer
than a limit becomes several files with an index beside them, as Hugging Face's libraries name and
read them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from megatron_fsdp_v2.checkpoint.torch_files import StoredTensor, read_block
from megatron_fsdp_v2.checkpoint.trust import (
    MAX_DIMS,
    check_file_name,
    check_name,
    check_shape,
    integer,
    read_json,
    shown,
)

__all__ = ["INDEX", "SUFFIX", "SafetensorsSource", "index_of", "write_safetensors"]

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

_METADATA = "__metadata__"
_FORMAT = "format"
_MAX_HEADER = 100_000_000
_SCRATCH_BYTES = 16 << 20


def index_of(file: Path) -> Path:
    """Where the index of a model in several files is that would be called so in one."""
    return file.with_name(file.name + INDEX)


def write_safetensors(
    source: TensorSource,
    file: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    progress: Progress,
) -> list[Path]:
    """Write a model, one tensor in memory at a time.

    A tensor that is there under several names is written under one, and the header says which the
    others are, in the way of the safetensors library's `save_model` and `load_model`.

    Args:
        source: Where tensors come from.
        file: What to call it, if it is one file.
        dtype: Of floating-point tensors; None leaves them as they are.
        max_shard_bytes: How many bytes of tensors a file may hold, unless one alone has more.
        progress: Told how many bytes are written.

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
    names = [file.name]
    if len(shards) > 1:
        count = len(shards)
        names = [f"{file.stem}-{i + 1:05d}-of-{count:05d}{SUFFIX}" for i in range(count)]
    total, done = sum(tensor.nbytes for _, tensor in pairs), 0
    paths = [file.with_name(name) for name in names]
    if len(shards) > 1:
        # Without an index the files are no model, so that it comes last.
        paths.append(index_of(file))
    weight_map: dict[str, str] = {}
    with written_whole(paths) as unfinished:
        for path, name, shard in zip(unfinished, names, shards, strict=False):
            with path.open("wb") as out:
                out.write(_header([tensor for _, tensor in shard], tied))
                for stored, tensor in shard:
                    write_elements(out.write, source.read(stored), tensor)
                    weight_map[tensor.name] = name
                    done += tensor.nbytes
                    progress(done, total)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            unfinished[-1].write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return paths


_Pair = tuple[PlainTensor, PlainTensor]
"""A tensor as it is stored and as it will be written."""


def _shards(pairs: Sequence[_Pair], limit: int) -> Iterator[list[_Pair]]:
    shard: list[_Pair] = []
    size = 0
    for pair in pairs:
        if shard and size + pair[1].nbytes > limit:
            yield _aligned(shard)
            shard, size = [], 0
        shard.append(pair)
        size += pair[1].nbytes
    yield _aligned(shard)


def _aligned(shard: list[_Pair]) -> list[_Pair]:
    """Long elements first, so that none starts in the middle of its own length."""
    return sorted(shard, key=lambda pair: -pair[1].dtype.itemsize)


def _header(tensors: Sequence[PlainTensor], tied: Mapping[str, str]) -> bytes:
    here = {tensor.name for tensor in tensors}
    others = {name: kept for name, kept in tied.items() if kept in here}
    header: dict[str, Any] = {_METADATA: {_FORMAT: "pt", **others}}
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


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    stored: StoredTensor


class SafetensorsSource:
    """Tensors of a file, or of several with an index.

    Args:
        path: The file; or what one file would be called; or the index; or the folder of an index.

    Attributes:
        files: Those it is read from, besides an index.
        notes: What is unusual about them, a sentence each.

    Raises:
        CheckpointError: There is none, or it is not whole.
    """

    def __init__(self, path: Path) -> None:
        self.left_out: Sequence[str] = ()
        self.files: list[Path] = []
        self.notes: list[str] = []
        self._places: dict[str, _Place] = {}
        self._scratch = bytearray(_SCRATCH_BYTES)
        found: list[PlainTensor] = []
        tied: dict[str, str] = {}
        for file, expected in _files(path):
            self.files.append(file)
            there, described = _read_header(file)
            for name in sorted(expected - there.keys() - described.keys()):
                raise CheckpointError(f"{file} does not hold {name}, which its index says it does")
            for name, stored in there.items():
                if expected and name not in expected:
                    self.notes.append(f"{file.name} holds {name}, which the index does not name")
                    continue
                self._places[name] = _Place(file, stored)
                found.append(PlainTensor(name, stored.shape, stored.dtype))
            tied |= {name: kept for name, kept in described.items() if kept in there}
        # Whatever else a header says about itself names no tensor, or the tensor is there.
        self.tied: Mapping[str, str] = {
            name: kept
            for name, kept in tied.items()
            if kept in self._places and name not in self._places
        }
        for name, kept in self.tied.items():
            stored = self._places[kept].stored
            self._places[name] = self._places[kept]
            found.append(PlainTensor(name, stored.shape, stored.dtype))
        self.tensors: Sequence[PlainTensor] = found

    def read(self, tensor: PlainTensor) -> torch.Tensor:
        """One of the tensors."""
        place = self._places[tensor.name]
        data = torch.empty(tensor.shape, dtype=tensor.dtype)
        with place.file.open("rb", buffering=0) as file:
            read_block(file, place.stored, (0,) * data.dim(), data, self._scratch)
        return data


def _files(path: Path) -> Iterator[tuple[Path, set[str]]]:
    """Files of a model, each with the names an index expects in it: none where there is no index.

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
        if index.stat().st_size > _MAX_HEADER:
            raise ValueError(f"it is longer than {_MAX_HEADER} bytes")
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


def _read_header(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Where the tensors of a file are, and what else its header says."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(f"{file} is not a {SUFFIX} file, or it is truncated")
        content = opened.read(length)
    try:
        header = read_json(content)
        described = header.pop(_METADATA, {})
        if type(described) is not dict or any(type(v) is not str for v in described.values()):
            raise ValueError(f"{_METADATA} is not strings by name")
        found = {check_name(name): _stored(entry, 8 + length) for name, entry in header.items()}
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read ({error}); it is damaged") from error
    end = 8 + length
    for name, stored in sorted(found.items(), key=lambda item: (item[1].offset, _length(item[1]))):
        if stored.offset != end:
            raise CheckpointError(
                f"{file} is damaged: {name} starts at byte {stored.offset}, and what is in front "
                f"of it ends at {end}"
            )
        end += _length(stored)
        if end > size:
            raise CheckpointError(f"{file} is truncated: {name} ends at {end} of {size} bytes")
    if end != size:
        raise CheckpointError(
            f"{file} is damaged: it has {size} bytes, and its tensors end at {end}"
        )
    return found, described


def _length(stored: StoredTensor) -> int:
    return math.prod(stored.shape) * stored.dtype.itemsize


def _stored(entry: Any, base: int) -> StoredTensor:
    """Where a tensor is, from what the header says of it.

    Raises:
        ValueError: It is not a tensor.
    """
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{shown(entry)} has to be a dtype, a shape and offsets")
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(name) is not str or name not in _DTYPES:
        raise ValueError(f"dtype {shown(name)} is not one of {', '.join(_DTYPES)}")
    if type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
        raise ValueError("a shape and two offsets have to be lists")
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a tensor has {len(shape)} dimensions, more than {MAX_DIMS}")
    begin, end = map(integer, offsets)
    stored = StoredTensor(_DTYPES[name], tuple(map(integer, shape)), base + begin)
    check_shape(stored.shape, stored.dtype, "a tensor")
    if end - begin != _length(stored):
        raise ValueError(f"{stored.shape} of {name} does not take {end - begin} bytes")
    return stored
