"""Transformer Engine without a GPU: reference kernels for its compiled module, and their loading.

Transformer Engine's Python code runs unmodified. Its compiled module `transformer_engine_torch`
(`tex` in Transformer Engine's code) is replaced by kernels in plain torch, each with the definition
of its format; a missing name raises `NotEmulatedError`.
"""

from megatron_cpu_rehearsal.te.load import (
    TESTED_VERSION,
    find,
    loaded,
)
from megatron_cpu_rehearsal.te.module import NotEmulatedError

__all__ = ["TESTED_VERSION", "NotEmulatedError", "find", "loaded"]
