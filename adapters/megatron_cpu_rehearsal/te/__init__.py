"""Transformer Engine without a GPU: reference kernels for its compiled module, and their loading.

Transformer Engine's Python code runs unmodified. Kernels in plain torch replace its compiled module
`transformer_engine_torch` (`tex` in Transformer Engine's code). Access to a name without a kernel
raises `NotEmulatedError`.
"""

from megatron_cpu_rehearsal.te.load import (
    TESTED_VERSION,
    find,
    loaded,
)
from megatron_cpu_rehearsal.te.module import NotEmulatedError

__all__ = ["TESTED_VERSION", "NotEmulatedError", "find", "loaded"]
