"""Types of arguments on command lines: counts, sizes, dtypes.

A command line is parsed before torch is imported, which takes seconds. Sizes and dtypes are only
checked here and stay text; `conversions` turns them into values when the command runs.
"""

from __future__ import annotations

import argparse
import re

DTYPE_NAMES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp64": "float64",
}
"""Floating-point dtypes: short name, and torch's."""

_SIZE = re.compile(r"\d+(?:\.\d+)?\s*([kmgt]i?)?b", re.IGNORECASE | re.ASCII)


class Size(str):
    """Text of a size, such as `76GiB`."""

    __slots__ = ()


class Dtype(str):
    """Name of a dtype, as torch calls it."""

    __slots__ = ()


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def size(text: str) -> Size:
    """Check a size with its unit, such as `76GiB`, `5gb` or `500 MiB`."""
    # Without a unit `--memory 76` would be 76 bytes.
    if not text.lower().endswith("b"):
        raise argparse.ArgumentTypeError(f"{text!r} has no unit; write a size such as 76GiB")
    if not _SIZE.fullmatch(text) or not re.search("[1-9]", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 5GB or 500MiB")
    return Size(text)


def dtype(text: str) -> Dtype:
    """Check the short name or torch's of a floating-point dtype: `bf16`, `bfloat16`."""
    known = DTYPE_NAMES | {name: name for name in DTYPE_NAMES.values()}
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype; known are {', '.join(known)}")
    return Dtype(known[text])
