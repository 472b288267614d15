"""Telling `fully_shard` of Transformer Engine's quantized tensors, where that is installed."""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from importlib import metadata

from megatron_fsdp_v2.params.formats import register_format

__all__ = ["register_formats"]

_PACKAGE = "transformer_engine"

TESTED_VERSIONS = ("2.20",)
"""Of Transformer Engine, without the patch level."""


def register_formats() -> bool:
    """Have `fully_shard` take weights that Transformer Engine has quantized. Idempotent.

    FP8 with one scale (`Float8Tensor`), with a scale for each 128 x 128 elements
    (`Float8BlockwiseQTensor`), MXFP8 (`MXFP8Tensor`) and NVFP4 (`NVFP4Tensor`). Any other quantized
    tensor stays rejected by name.

    Of a version of Transformer Engine that this was not tested with it is said so, once.

    Returns:
        Whether Transformer Engine is there. Where it is not, nothing is quantized by it.

    Raises:
        RuntimeError: It has not what quantized tensors are known by here.
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
    version = _version()
    if ".".join(version.split(".")[:2]) not in TESTED_VERSIONS:
        warnings.warn(
            f"quantized weights are tested with Transformer Engine {', '.join(TESTED_VERSIONS)}, "
            f"and {version} is installed; its tensors may be made in another way",
            stacklevel=4,
        )
    try:
        from megatron_fsdp_v2_mcore.formats.float8 import BlockwiseFormat, Float8Format
        from megatron_fsdp_v2_mcore.formats.mxfp8 import MXFP8Format
        from megatron_fsdp_v2_mcore.formats.nvfp4 import NVFP4Format
    except ImportError as error:
        raise RuntimeError(
            f"Transformer Engine {version} has not what quantized weights are known by here: "
            f"{error}; install {' or '.join(TESTED_VERSIONS)}, or train without --fp8-format"
        ) from error
    for format_type in (Float8Format, BlockwiseFormat, MXFP8Format, NVFP4Format):
        register_format(format_type)


def _version() -> str:
    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return "of an unknown version"
