"""The module of reference kernels that replaces Transformer Engine's compiled module."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any

from megatron_cpu_rehearsal.te import (
    activations,
    attention,
    enums,
    gemm,
    misc,
    norms,
    nvfp4_weights,
    optim,
    quant,
    sharded,
)

__all__ = ["NAME", "NotEmulatedError", "make"]

NAME = "transformer_engine_torch"
"""Module name under which Transformer Engine imports its kernels."""

_GROUPS = (attention, gemm, misc, norms, nvfp4_weights, optim, quant, sharded)
_NO_KERNELS = ("finished",)


class NotEmulatedError(NotImplementedError):
    """A kernel of Transformer Engine that has no reference kernel."""


class _Absent:
    """Placeholder for a class that Transformer Engine's Python uses only in annotations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        raise NotEmulatedError(_message(type(self).__name__))


def _message(name: str) -> str:
    return (
        f"{NAME}.{name} is not emulated: the CPU rehearsal has reference kernels for Megatron's "
        "default layers and optimizers (docs/rehearsal.md lists missing kernels)"
    )


class CommOverlapCore(_Absent):
    """User buffers need a GPU."""


class CommOverlap(CommOverlapCore):
    """User buffers need a GPU."""


class CommOverlapP2P(CommOverlapCore):
    """User buffers need a GPU."""


class CommOverlapHelper(_Absent):
    """User buffers need a GPU."""


def _absent(name: str) -> Any:
    if name.startswith("__"):
        # The import system and `import *` look up such names and expect an AttributeError.
        raise AttributeError(name)
    raise NotEmulatedError(_message(name))


def bulk_overlap_ag_with_external_gemm(*args: Any, **kwargs: Any) -> None:
    """Stub for a function of user buffers, which Transformer Engine's Python imports by name.

    Raises:
        NotEmulatedError: Always.
    """
    del args, kwargs
    raise NotEmulatedError(_message("bulk_overlap_ag_with_external_gemm"))


def make() -> ModuleType:
    """Make the module; a missing name raises `NotEmulatedError`."""
    module = ModuleType(NAME, __doc__)
    names: dict[str, Any] = dict(activations.KERNELS)
    for group in _GROUPS:
        names |= {n: getattr(group, n) for n in group.__all__ if n not in _NO_KERNELS}
    for name in enums.__all__:
        value = getattr(enums, name)
        if isinstance(value, enum.EnumType) or value is enums.FP8TensorMeta:
            names[name] = value
    for needs_gpu in (CommOverlapCore, CommOverlap, CommOverlapP2P, CommOverlapHelper):
        names[needs_gpu.__name__] = needs_gpu
    names["bulk_overlap_ag_with_external_gemm"] = bulk_overlap_ag_with_external_gemm
    vars(module).update(names, __all__=sorted(names), __getattr__=_absent)
    return module
