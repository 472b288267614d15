"""Checks of numbers, names and JSON in files that are not trusted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch

from megatron_fsdp_v2.checkpoint.errors import CheckpointError

__all__ = [
    "DTYPES",
    "check_file_name",
    "check_name",
    "check_shape",
    "file_inside",
    "integer",
    "read_json",
    "shown",
]

MAX_INT = (1 << 63) - 1
"""Offsets, lengths and sizes of tensors in bytes are at most this."""

DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
}
"""Of elements of tensors, by the name that a pickle has for it."""

_MAX_NAME = 1 << 16
_MAX_FILE_NAME = 255


def check_name(name: Any) -> str:
    """Check that a value can be the name of an entry, and be printed on a terminal.

    Raises:
        ValueError: It is not a string, too long, or not printable.
    """
    if type(name) is not str:
        raise ValueError(f"{shown(name)} is in the place of a name")
    if len(name) > _MAX_NAME or not name.isprintable():
        raise ValueError(f"the name {shown(name)} is too long, or cannot be shown")
    return name


def check_file_name(name: Any, what: str) -> str:
    """Check that a value is the name of a file directly in a folder.

    Args:
        name: The name.
        what: The entry that is stored there, for the error.

    Raises:
        ValueError: It is not a plain file name.
    """
    is_name = type(name) is str and 0 < len(name) <= _MAX_FILE_NAME and name.isprintable()
    if not is_name or name in (".", "..") or "/" in name or "\\" in name:
        raise ValueError(f"{what} is said to lie in {shown(name)}, which is not a file beside it")
    return str(name)


def file_inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder.

    Raises:
        CheckpointError: It is a link to a file outside of the folder, or to none.
    """
    file = folder / name
    if not file.is_symlink():
        return file
    # Path.resolve() raises where links go in a circle.
    parent, own = Path(os.path.realpath(file)).parent, Path(os.path.realpath(folder))
    if parent != own or not file.exists():
        raise CheckpointError(
            f"{file} is a link to nothing, or to a file outside of its folder; copy the file there "
            "if you trust it"
        )
    return file


def check_shape(shape: Sequence[int], dtype: torch.dtype, what: str) -> None:
    """Check that a shape has fewer than 2**63 bytes.

    Raises:
        ValueError: It has more.
    """
    # Strides of other dimensions matter even if one has length zero.
    if math.prod(max(length, 1) for length in shape) * dtype.itemsize > MAX_INT:
        raise ValueError(f"{what} is said to be {tuple(shape)}, which no memory can hold")


def integer(value: Any, most: int = MAX_INT) -> int:
    """Check a count or an offset.

    Raises:
        ValueError: It is not an integer from 0 to `most`.
    """
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{shown(value)} is in the place of a number from 0 to {most}")
    return value


def read_json(content: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: It is not valid, not an object, or nested too deeply.
    """
    try:
        found = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if type(found) is not dict:
        raise ValueError("it is not an object")
    return found
