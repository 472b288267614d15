"""Stubs for `torch.cuda.FloatTensor` and similar types: constructors and `isinstance` checks."""

from __future__ import annotations

from typing import Any, override

import torch

__all__ = ["tensor_type"]


class _TensorType(type):
    """A class whose instances are the tensors of one dtype."""

    dtype: torch.dtype

    @override
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.dtype == cls.dtype

    @override
    def __call__(cls, data: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=cls.dtype)


def tensor_type(name: str, dtype: torch.dtype) -> type:
    """Make the stub for `torch.cuda.<name>`."""
    return _TensorType(name, (), {"dtype": dtype})
