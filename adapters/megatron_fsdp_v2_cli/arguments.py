"""Types of arguments on command lines: counts, sizes, dtypes."""

from __future__ import annotations

import argparse

import torch

from megatron_fsdp_v2._text import parse_size
from megatron_fsdp_v2.layout.mixed_precision import DTYPES


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def size(text: str) -> int:
    """Parse a size with its unit into bytes, such as `76GiB`, `5gb` or `500 MiB`."""
    # Without a unit `--memory 76` would be 76 bytes.
    if not text.lower().endswith("b"):
        raise argparse.ArgumentTypeError(f"{text!r} has no unit; write a size such as 76GiB")
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def dtype(text: str) -> torch.dtype:
    """Parse a floating-point dtype by its short name or torch's: `bf16`, `bfloat16`."""
    known = DTYPES | {str(one).removeprefix("torch."): one for one in DTYPES.values()}
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype; known are {', '.join(known)}")
    return known[text]
