"""Models in plain files, `.safetensors` and `.pt`, which the libraries' own writers write.

Files are written to temporary names, and appear under their own when they are complete.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_v2._progress import Advance
from megatron_fsdp_v2._text import shown
from megatron_fsdp_v2.checkpoint.entries import other_names
from megatron_fsdp_v2.checkpoint.errors import CheckpointError, NotFoundError, os_error_number
from megatron_fsdp_v2.checkpoint.foreign import load_object
from megatron_fsdp_v2.checkpoint.manifest import check_file_name, check_name, read_json
from megatron_fsdp_v2.checkpoint.replacing import created
from megatron_fsdp_v2.checkpoint.writing import own_storage

safetensors: Any = None
with contextlib.suppress(ImportError):
    importlib.import_module("safetensors.torch")
    safetensors = importlib.import_module("safetensors")

PT_SUFFIXES = (".pt", ".pth", ".bin")
SAFETENSORS = ".safetensors"
INDEX = ".index.json"
"""Suffix of the index of several files; it follows the name of a single file."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes that floating-point tensors can be converted to."""

_FORMAT = "format"


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A checkpoint that tensors of a model can be read from.

    Attributes:
        tensors: Tensors of the model by name, on the meta device, in the order in which to read
            them.
        read: Reads a tensor by its name, on the CPU.
        tied: Other names of tied tensors, each with the name under which to write the tensor.
        left_out: Names of entries that are not tensors of the model.
        files: The files it is read from, besides an index; empty for a folder.
        notes: Differences between an index and its files, a sentence each.
    """

    tensors: Mapping[str, torch.Tensor]
    read: Callable[[str], torch.Tensor]
    tied: Mapping[str, str]
    left_out: Sequence[str] = ()
    files: Sequence[Path] = ()
    notes: Sequence[str] = ()


def converted(source: TensorSource, dtype: torch.dtype | None, advance: Advance) -> TensorSource:
    """Return a source that reads tensors in the dtype they are written in.

    No tensor that it reads shares its storage. Its `read` raises a CheckpointError if an element is
    too large for the dtype.

    Args:
        source: Source of the stored tensors.
        dtype: Dtype of floating-point tensors; None keeps the stored dtypes.
        advance: Called with the bytes that were read so far, and with all stored bytes.
    """
    total, done = sum(tensor.nbytes for tensor in source.tensors.values()), 0
    tensors = {
        name: t.to(dtype) if dtype is not None and t.is_floating_point() else t
        for name, t in source.tensors.items()
    }

    def read(name: str) -> torch.Tensor:
        nonlocal done
        data = source.read(name)
        done += data.nbytes
        advance(done, total)
        if data.dtype == tensors[name].dtype:
            return own_storage(data)
        after = data.to(tensors[name].dtype)
        # Unlike isfinite(), aminmax() allocates nothing.
        is_finite = not after.numel() or all(map(math.isfinite, torch.aminmax(after)))
        if not is_finite and bool((after.isinf() & data.double().isfinite()).any()):
            raise CheckpointError(
                f"{name} has elements that are too large for {after.dtype}; choose "
                "bfloat16 or float32"
            )
        return own_storage(after)

    return replace(source, tensors=tensors, read=read)


# -- safetensors ----------------------------------------------------------------------------------


def index_of(file: Path) -> Path:
    """The index of a model in several files, by the name of one file."""
    return file.with_name(file.name + INDEX)


def write_safetensors(source: TensorSource, file: Path, max_shard_bytes: int) -> list[Path]:
    """Write a model into one file, or several and an index as Hugging Face's libraries name them.

    A tensor with several names is written under one, and the header maps the others to it, as the
    library's `save_model` and `load_model` do.

    Torch's `HuggingFaceStorageWriter` rejects tensors with several names, calls every model
    `model`, and writes a single file as `model-00001-of-00001` with an index.

    Args:
        source: Source of the tensors, as `converted` returns it.
        file: The name of the file, if it is one.
        max_shard_bytes: Bytes of tensors that a file may hold, unless one alone has more.

    Returns:
        The files; the index is the last of several.

    Raises:
        CheckpointError: The format has no name for the dtype of a tensor, one cannot be read, or
            the library is not installed.
    """
    library = _library(f"writing {file}")
    tied = {name: kept for name, kept in source.tied.items() if name != _FORMAT}
    shards: list[dict[str, torch.Tensor]] = [{}]
    total = in_last = 0
    for name, tensor in source.tensors.items():
        if name in tied:
            continue
        try:
            library.torch.save({"empty": torch.empty(0, dtype=tensor.dtype)})
        except (KeyError, ValueError, library.SafetensorError) as error:
            raise CheckpointError(
                f"{name} is of {tensor.dtype}, which {SAFETENSORS} cannot hold"
            ) from error
        if shards[-1] and in_last + tensor.nbytes > max_shard_bytes:
            shards.append({})
            in_last = 0
        shards[-1][name] = tensor
        in_last += tensor.nbytes
        total += tensor.nbytes
    paths = [file]
    if len(shards) > 1:
        names = (f"{file.stem}-{i + 1:05d}-of-{len(shards):05d}" for i in range(len(shards)))
        # Without an index the files are no model, so that it comes last.
        paths = [*(file.with_name(name + SAFETENSORS) for name in names), index_of(file)]
    with created(paths) as unfinished:
        for path, final, shard in zip(unfinished, paths, shards, strict=False):
            others = {name: kept for name, kept in tied.items() if kept in shard}
            try:
                # Nothing refers to the tensors while those of the next file are read.
                library.torch.save_file(
                    {name: source.read(name) for name in shard},
                    path,
                    {_FORMAT: "pt", **others},
                )
            except library.SafetensorError as error:
                # The text of the error has a temporary name.
                if (number := os_error_number(error)) is not None:
                    raise OSError(number, os.strerror(number), str(final)) from error
                raise CheckpointError(f"{final} cannot be written: {error}") from error
        if len(shards) > 1:
            placed = zip(paths, shards, strict=False)
            weight_map = {name: path.name for path, shard in placed for name in shard}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            unfinished[-1].write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return paths


def open_safetensors(path: Path) -> TensorSource:
    """Open a file, or several with an index.

    Args:
        path: The file; or what one file would be called; or the index.

    Raises:
        CheckpointError: There is none, it is damaged, or the library is not installed.
    """
    files, notes = [], []
    places: dict[str, tuple[Any, str]] = {}
    found: dict[str, torch.Tensor] = {}
    described: dict[str, str] = {}
    for file, expected in _files(path):
        files.append(file)
        opened, there = _opened(file)
        more = {n: kept for n, kept in (opened.metadata() or {}).items() if kept in there}
        for name in sorted(expected - there.keys() - more.keys()):
            raise CheckpointError(f"{file} does not hold {name}, which its index says it does")
        for name, tensor in there.items():
            if expected and name not in expected:
                notes.append(f"{file.name} holds {name}, which the index does not name")
            else:
                found[name], places[name] = tensor, (opened, name)
        described |= more
    # Other entries of a header name no tensor, or name a tensor of the file.
    tied = {n: kept for n, kept in described.items() if kept in found and n not in found}
    for name, kept in tied.items():
        found[name], places[name] = found[kept], places[kept]

    def read(name: str) -> torch.Tensor:
        opened, kept = places[name]
        data: torch.Tensor = opened.get_tensor(kept)
        return data

    return TensorSource(found, read, tied, files=files, notes=notes)


def _library(what: str) -> Any:
    if safetensors is None:
        raise CheckpointError(f"{what} needs the library safetensors; install it with pip")
    return safetensors


def _opened(file: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Open a file, and list the tensors in it by name."""
    library = _library(f"reading {file}")
    try:
        opened = library.safe_open(file, "pt")
        there: dict[str, torch.Tensor] = {}
        for name in opened.keys():  # noqa: SIM118
            # The file is mapped into memory: no element is read.
            there[name] = opened.get_tensor(check_name(name)).to("meta")
        return opened, there
    except (library.SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read: it is damaged or truncated ({error})"
        ) from error


def _files(path: Path) -> Iterator[tuple[Path, set[str]]]:
    """Files of a model, each with the names an index expects in it: none without an index.

    Raises:
        CheckpointError: The index cannot be read, or a file is missing.
    """
    if path.is_file() and not path.name.endswith(INDEX):
        yield path, set()
        return
    index = path if path.name.endswith(INDEX) else index_of(path)
    if not index.is_file():
        raise NotFoundError(f"{path} does not exist")
    by_file: dict[str, set[str]] = {}
    try:
        for key, name in read_json(index.read_bytes())["weight_map"].items():
            by_file.setdefault(check_file_name(name, check_name(key)), set()).add(key)
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read ({error!r}); it is damaged") from error
    for name in sorted(by_file):
        file = index.with_name(name)
        if not file.is_file():
            raise CheckpointError(f"{index} is incomplete: {name} is missing")
        yield file, by_file[name]


# -- torch.save -----------------------------------------------------------------------------------


def write_pt(source: TensorSource, file: Path) -> list[Path]:
    """Write a model as a dictionary of tensors by name, with `torch.save`.

    A tensor with several names is written once: what is loaded shares memory again.

    Args:
        source: Source of the tensors, as `converted` returns it.
        file: The name of the file.

    Returns:
        The file.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    tied, model = source.tied, dict[str, torch.Tensor]()
    for name in sorted(source.tensors, key=tied.__contains__):
        model[name] = model[tied[name]] if name in tied else source.read(name)
    with created([file]) as (unfinished,), unfinished.open("wb") as out:
        torch.save({name: model[name] for name in source.tensors}, out)
    return [file]


def open_pt(path: Path) -> TensorSource:
    """Open a file that `torch.save` wrote: a dictionary of tensors by name.

    The file is memory-mapped: pages are read on access and can be evicted.

    Raises:
        CheckpointError: It cannot be read, or holds something other than plain tensors by name.
    """
    loaded = load_object(path, str(path))
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"{path} holds a {type(loaded).__name__}; save the model's state dict alone"
        )
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path} holds {shown(name)}, which is a {type(value).__name__}, not a tensor; "
                "save only the model's state dict"
            )
        try:
            check_name(name)
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        # A contiguous copy of repeated elements could take far more memory than the file.
        if value.nbytes > value.untyped_storage().nbytes():
            raise CheckpointError(
                f"{path} holds {name}, which repeats its elements; save it as contiguous()"
            )
    # Empty tensors have no place.
    tied = other_names(
        (name, (t.data_ptr() or name, t.dtype, t.shape, t.stride())) for name, t in loaded.items()
    )
    # Quantized tensors cannot be moved to the meta device.
    tensors = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in loaded.items()}
    return TensorSource(tensors, lambda name: loaded[name].detach().clone(), tied)
