"""Transformer Engine's quantized weights as formats of `fully_shard`, where it is installed."""

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
"""Tested versions of Transformer Engine, without the patch level."""


def register_formats() -> bool:
    """Register the weight formats of Transformer Engine with `fully_shard`. Idempotent.

    The formats are FP8 with one scale (`Float8Tensor`), FP8 with a scale per 128 x 128 elements
    (`Float8BlockwiseQTensor`), MXFP8 (`MXFP8Tensor`) and NVFP4 (`NVFP4Tensor`). Other quantized
    tensors are rejected by name.

    For an untested version of Transformer Engine the function warns once.

    Returns:
        Whether Transformer Engine is installed.

    Raises:
        RuntimeError: The installed version lacks the classes of quantized tensors.
    """
    if _PACKAGE in sys.modules:
        is_installed = sys.modules[_PACKAGE] is not None
    else:
        is_installed = importlib.util.find_spec(_PACKAGE) is not None
    if is_installed:
        _register()
    return is_installed


@functools.cache
def _register() -> None:
    try:
        version = metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        version = "of an unknown version"
    if ".".join(version.split(".")[:2]) not in TESTED_VERSIONS:
        warnings.warn(
            f"quantized weights are tested with Transformer Engine {', '.join(TESTED_VERSIONS)}, "
            f"and {version} is installed, whose tensors may differ",
            stacklevel=4,
        )
    try:
        from megatron_fsdp_v2_mcore.formats.quantized import FORMATS
    except ImportError as error:
        raise RuntimeError(
            f"Transformer Engine {version} lacks the classes of quantized weights: {error}; "
            f"install {' or '.join(TESTED_VERSIONS)}, or train without --fp8-format"
        ) from error
    for format_type in FORMATS:
        register_format(format_type)
