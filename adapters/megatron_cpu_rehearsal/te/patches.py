"""Patches of Transformer Engine for a CPU, each with its reason."""

from __future__ import annotations

import sys
from typing import Any

import torch

from megatron_fsdp_v2_patching import Patch

__all__ = ["BEFORE_IMPORT"]

_PACKAGE = "transformer_engine"


def _true_within_transformer_engine(is_cuda: Any) -> property:
    def answer(self: torch.Tensor) -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return caller.split(".")[0] == _PACKAGE or bool(is_cuda.__get__(self))

    return property(answer)


BEFORE_IMPORT: tuple[Patch, ...] = (
    Patch(
        "transformer_engine.common:load_framework_extension",
        "the function would load the compiled extension, which reference kernels replace",
        replace="megatron_cpu_rehearsal.output:nothing",
    ),
    Patch(
        "torch:Tensor.is_cuda",
        "Transformer Engine's modules reject tensors that are not on a GPU; other packages get the "
        "original value",
        wrap="megatron_cpu_rehearsal.te.patches:_true_within_transformer_engine",
    ),
)
"""Patches that are applied before Transformer Engine's PyTorch package is imported."""
