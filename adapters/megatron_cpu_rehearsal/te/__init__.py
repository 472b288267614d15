"""Transformer Engine without a GPU: reference kernels for its compiled module, and what loads them.

Transformer Engine's Python runs unmodified. Beneath it, `transformer_engine_torch` (Transformer
Engine's own code calls it `tex`) is a module of kernels in plain torch, each with the definition of
its format; a name it lacks raises `NotEmulatedError`.
"""

from megatron_cpu_rehearsal.te.load import (
    TESTED_VERSION,
    find,
    loaded,
)
from megatron_cpu_rehearsal.te.module import NotEmulatedError

__all__ = ["TESTED_VERSION", "NotEmulatedError", "find", "loaded"]
