"""Places in Transformer Engine that no CPU gets past, patched one by one, each with its reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_cpu_rehearsal.patching import Patch

__all__ = ["BEFORE_IMPORT"]

_PACKAGE = "transformer_engine"


def _patch(target: str, reason: str, replace: Callable[[Any], Any]) -> Patch:
    return Patch(target.partition(":")[2], target, reason, (), replace)


def _load_nothing(load: Callable[[str], None]) -> Callable[[str], None]:
    del load

    def load_nothing(framework: str) -> None:
        del framework

    return load_nothing


def _true_within_transformer_engine(is_cuda: Any) -> property:
    def answer(self: torch.Tensor) -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return caller.split(".")[0] == _PACKAGE or bool(is_cuda.__get__(self))

    return property(answer)


BEFORE_IMPORT: tuple[Patch, ...] = (
    _patch(
        "transformer_engine.common:load_framework_extension",
        "the reference kernels are in the place of the compiled extension it would load",
        _load_nothing,
    ),
    _patch(
        "torch:Tensor.is_cuda",
        "Transformer Engine's modules refuse tensors that are not on a GPU; what calls from other "
        "packages see does not change",
        _true_within_transformer_engine,
    ),
)
"""In place before Transformer Engine's PyTorch package is imported."""
