"""Tensors under plain names, converted from one kind of file to another one at a time."""

from __future__ import annotations

import contextlib
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.metadata import INCOMPLETE
from megatron_fsdp_v2.checkpoint.replacing import sync

__all__ = [
    "CONVERTED_BYTES",
    "PlainTensor",
    "Progress",
    "TensorSource",
    "check_dtype",
    "convert_elements",
    "converted",
    "write_elements",
    "written_whole",
]

CONVERTED_BYTES = 4 << 20
"""Bytes of a tensor that are converted at a time."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes that floating-point tensors can be converted to."""

Progress = Callable[[int, int], None]
"""Called with the number of bytes done and the total."""


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """Name, shape and dtype of a tensor.

    Attributes:
        name: Its plain name.
        shape: Its shape.
        dtype: Its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.dtype.itemsize


class TensorSource(Protocol):
    """A checkpoint that tensors of a model can be read from.

    Attributes:
        tensors: Tensors of the model, in the order in which to read them.
        left_out: Names of entries that are not tensors of the model.
        tied: Other names of tied tensors, each with the name under which to write the tensor.
    """

    tensors: Sequence[PlainTensor]
    left_out: Sequence[str]
    tied: Mapping[str, str]

    def read(self, tensor: PlainTensor) -> torch.Tensor:
        """Read a tensor, on the CPU."""


def check_dtype(dtype: torch.dtype | None) -> None:
    """Check that floating-point tensors can be converted to a dtype.

    Raises:
        ValueError: They cannot; lists the supported dtypes.
    """
    if dtype is not None and dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(f"dtype is {dtype}; tensors can be converted to {names}")


def converted(tensor: PlainTensor, dtype: torch.dtype | None) -> PlainTensor:
    """Describe a tensor as it will be written; only floating-point dtypes are converted."""
    if dtype is None or not tensor.dtype.is_floating_point:
        return tensor
    return replace(tensor, dtype=dtype)


def convert_elements(data: torch.Tensor, tensor: PlainTensor) -> torch.Tensor:
    """Convert a tensor to the dtype it is written in.

    Args:
        data: The tensor.
        tensor: Its description as written.

    Raises:
        CheckpointError: An element is too large for the dtype.
    """
    if data.dtype == tensor.dtype:
        return data
    there = torch.empty(tensor.shape, dtype=tensor.dtype)
    for part, whole in zip(_parts(data, tensor), _parts(there, tensor), strict=True):
        _convert(part, whole, tensor)
    return there


def write_elements(
    write: Callable[[memoryview], object], data: torch.Tensor, tensor: PlainTensor
) -> None:
    """Write the elements of a tensor in row-major order, converted if necessary.

    Args:
        write: Called with bytes, which are valid during the call only.
        data: The tensor.
        tensor: Its description as written.

    Raises:
        CheckpointError: An element is too large for the dtype.
    """
    room = bytearray(min(CONVERTED_BYTES, tensor.nbytes))
    for part in _parts(data, tensor):
        there = torch.frombuffer(room, dtype=tensor.dtype, count=part.numel())
        _convert(part, there, tensor)
        write(memoryview(room)[: there.nbytes])


@contextlib.contextmanager
def written_whole(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Create several files, all of them or none; the last one appears last.

    Existing files are not changed, not even if they are created meanwhile.

    Args:
        paths: The files.

    Yields:
        Temporary paths to write them to.

    Raises:
        ValueError: One of them already exists.
    """
    for path in paths:
        # A dangling link counts as well.
        if os.path.lexists(path):
            raise ValueError(_is_there(path))
    token = uuid.uuid4().hex
    unfinished = [path.with_name(f"{path.name}.{token}{INCOMPLETE}") for path in paths]
    placed: list[Path] = []
    try:
        yield unfinished
        for written in unfinished:
            sync(written)
        for written, path in zip(unfinished, paths, strict=True):
            _place(written, path)
            placed.append(path)
    except BaseException:
        for path in placed:
            path.unlink(missing_ok=True)
        raise
    finally:
        for written in unfinished:
            written.unlink(missing_ok=True)


def _place(written: Path, path: Path) -> None:
    """Rename a file, unless the new name exists."""
    try:
        # Renaming would replace an existing file; a hard link does not.
        os.link(written, path)
        return
    except FileExistsError as error:
        raise ValueError(_is_there(path)) from error
    except OSError:
        # Not every file system has hard links.
        pass
    if os.path.lexists(path):
        raise ValueError(_is_there(path))
    os.replace(written, path)


def _is_there(path: Path) -> str:
    return f"{path} already exists; remove it or name another"


def _parts(data: torch.Tensor, tensor: PlainTensor) -> Iterator[torch.Tensor]:
    """Split elements in row-major order into parts of a fixed size."""
    flat, step = data.detach().reshape(-1), CONVERTED_BYTES // tensor.dtype.itemsize
    for first in range(0, tensor.numel, step):
        yield flat[first : first + step]


def _convert(before: torch.Tensor, after: torch.Tensor, tensor: PlainTensor) -> None:
    after.copy_(before)
    if not before.is_floating_point() or before.dtype == after.dtype:
        return
    # Unlike isfinite(), aminmax() allocates nothing.
    if all(math.isfinite(extreme) for extreme in torch.aminmax(after)):
        return
    if bool((after.isinf() & before.double().isfinite()).any()):
        raise CheckpointError(
            f"{tensor.name} has elements that are too large for {after.dtype}; choose bfloat16 or "
            "float32"
        )
