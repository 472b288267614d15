"""Values of parsed arguments whose types need torch."""

from __future__ import annotations

import argparse

import torch

from megatron_fsdp_v2._text import parse_size
from megatron_fsdp_v2_cli.arguments import Dtype, Size


def converted(args: argparse.Namespace) -> argparse.Namespace:
    """Return arguments with sizes as bytes (int) and dtypes as `torch.dtype`."""
    return argparse.Namespace(**{name: _value(each) for name, each in vars(args).items()})


def _value(value: object) -> object:
    if isinstance(value, Size):
        return parse_size(value)
    return getattr(torch, value) if isinstance(value, Dtype) else value
