"""Safetensors files, written and read tensor by tensor.

The format is a length of eight bytes, a header in JSON and the elements. A model that is longer
than a limit becomes several files with an index beside them, as Hugging Face's libraries name and
read them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.plain_tensors import (
    PlainTensor,
    Progress,
    TensorSource,
    converted,
    write_elements,
    written_whole,
)
from megatron_fsdp_v2.checkpoint.stored_tensor import StoredTensor, read_block

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
    pairs = [(tensor, converted(tensor, dtype)) for tensor in source.tensors]
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
                out.write(_header([tensor for _, tensor in shard]))
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


def _header(tensors: Sequence[PlainTensor]) -> bytes:
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
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

    Raises:
        CheckpointError: There is none, or it is not whole.
    """

    def __init__(self, path: Path) -> None:
        self.left_out: Sequence[str] = ()
        self._places: dict[str, _Place] = {}
        self._scratch = bytearray(_SCRATCH_BYTES)
        found: list[PlainTensor] = []
        for file, expected in _files(path):
            there = dict(_read_header(file))
            for name in sorted(expected - there.keys()):
                raise CheckpointError(f"{file} does not hold {name}, which its index says it does")
            for name, stored in there.items():
                if expected and name not in expected:
                    continue
                self._places[name] = _Place(file, stored)
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
        raise CheckpointError(f"{path} does not exist")
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read ({error}); it is damaged") from error
    for name in names:
        file = index.with_name(Path(name).name)
        if not file.is_file():
            raise CheckpointError(f"{index} is incomplete: {name} is missing")
        yield file, {key for key, of in weight_map.items() if of == name}


def _read_header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(f"{file} is no {SUFFIX} file, or it is truncated")
        content = opened.read(length)
    try:
        header = json.loads(content)
        header.pop(_METADATA, None)
        found = {name: _stored(entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); it is damaged") from error
    for name, stored in found.items():
        end = stored.offset + math.prod(stored.shape) * stored.dtype.itemsize
        if end > size:
            raise CheckpointError(f"{file} is truncated: {name} ends at {end} of {size} bytes")
    yield from found.items()


def _stored(entry: dict[str, Any], base: int) -> StoredTensor:
    begin, end = map(int, entry["data_offsets"])
    dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    if begin < 0 or min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{entry} is no tensor")
    return StoredTensor(dtype, shape, base + begin)
