"""Telling `fully_shard` of Transformer Engine's quantized tensors, where that is installed."""

from __future__ import annotations

import functools
import importlib.util
import sys

from megatron_fsdp_v2.params.formats import register_format

__all__ = ["register_formats"]

_PACKAGE = "transformer_engine"


def register_formats() -> bool:
    """Have `fully_shard` take weights that Transformer Engine has quantized. Idempotent.

    FP8 with one scale (`Float8Tensor`), with a scale for each 128 x 128 elements
    (`Float8BlockwiseQTensor`), and MXFP8 (`MXFP8Tensor`). Any other quantized tensor stays rejected
    by name.

    Returns:
        Whether Transformer Engine is there. Where it is not, nothing is quantized by it.
    """
    if _PACKAGE in sys.modules:
        is_there = sys.modules[_PACKAGE] is not None
    else:
        is_there = importlib.util.find_spec(_PACKAGE) is not None
    if is_there:
        _register()
    return is_there


@functools.cache
def _register() -> None:
    from megatron_fsdp_v2_mcore.formats.float8 import BlockwiseFormat, Float8Format
    from megatron_fsdp_v2_mcore.formats.mxfp8 import MXFP8Format

    for format_type in (Float8Format, BlockwiseFormat, MXFP8Format):
        register_format(format_type)
