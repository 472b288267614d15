"""Tensors under their plain names on the way from one kind of file to another, one at a time."""

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
"""Of a tensor, this much is converted at a time."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What floating-point tensors can be converted to."""

Progress = Callable[[int, int], None]
"""Told how many bytes are done, and how many there are in all."""


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """What is known of a tensor before it is read.

    Attributes:
        name: Its plain name.
        shape: Its shape.
        dtype: Of its elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes these take."""
        return self.numel * self.dtype.itemsize


class TensorSource(Protocol):
    """Something that tensors can be read from.

    Attributes:
        tensors: Those of the model, in the order they are best read in.
        left_out: Names of what is not a tensor of the model.
        tied: Of tensors that are there under several names, every other name with the one to keep.
    """

    tensors: Sequence[PlainTensor]
    left_out: Sequence[str]
    tied: Mapping[str, str]

    def read(self, tensor: PlainTensor) -> torch.Tensor:
        """One of them, on the CPU."""


def check_dtype(dtype: torch.dtype | None) -> None:
    """Reject what floating-point tensors cannot be converted to.

    Raises:
        ValueError: It is something else; says what there is.
    """
    if dtype is not None and dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(f"dtype is {dtype}; tensors can be converted to {names}")


def converted(tensor: PlainTensor, dtype: torch.dtype | None) -> PlainTensor:
    """The tensor as it will be written: of another dtype if it has a floating-point one."""
    if dtype is None or not tensor.dtype.is_floating_point:
        return tensor
    return replace(tensor, dtype=dtype)


def convert_elements(data: torch.Tensor, tensor: PlainTensor) -> torch.Tensor:
    """A tensor as it is to be written.

    Args:
        data: The tensor.
        tensor: As it is to be written.

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
    """Write the elements of a tensor row after row, in another dtype if need be.

    Args:
        write: Called with bytes, which are gone after the call.
        data: The tensor.
        tensor: As it is to be written.

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
    """Files that are there when all of them are complete, the last one last, or not at all.

    What is there under any of their names stays, whether it was there before or came meanwhile.

    Args:
        paths: The files.

    Yields:
        What to write each of them as: names that nobody else uses.

    Raises:
        ValueError: One of them is there already.
    """
    for path in paths:
        # A link to nowhere is there as well.
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
    """Give a file its name, unless there is one of that name."""
    try:
        # A second name, where renaming would take the place of what is there.
        os.link(written, path)
        return
    except FileExistsError as error:
        raise ValueError(_is_there(path)) from error
    except OSError:
        # Not every file system has second names.
        pass
    if os.path.lexists(path):
        raise ValueError(_is_there(path))
    os.replace(written, path)


def _is_there(path: Path) -> str:
    return f"{path} is there already; remove it or name another"


def _parts(data: torch.Tensor, tensor: PlainTensor) -> Iterator[torch.Tensor]:
    """Elements row after row, as many at a time as there is room for."""
    flat, step = data.detach().reshape(-1), CONVERTED_BYTES // tensor.dtype.itemsize
    for first in range(0, tensor.numel, step):
        yield flat[first : first + step]


def _convert(before: torch.Tensor, after: torch.Tensor, tensor: PlainTensor) -> None:
    after.copy_(before)
    if not before.is_floating_point() or before.dtype == after.dtype:
        return
    # Looking for the largest element takes no memory, unlike asking each whether it is finite.
    if all(math.isfinite(extreme) for extreme in torch.aminmax(after)):
        return
    if bool((after.isinf() & before.double().isfinite()).any()):
        raise CheckpointError(
            f"{tensor.name} has elements that are too large for {after.dtype}; choose bfloat16 or "
            "float32"
        )
