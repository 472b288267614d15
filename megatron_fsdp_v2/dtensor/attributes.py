"""Fast attribute access for a DTensor subclass with a `__torch_function__`.

PyTorch passes every read of `grad`, `dtype` or `requires_grad` to `__torch_function__`, which takes
some microseconds; a read from a DTensor takes a tenth of one. Optimizers, gradient clipping and
`zero_grad` read several attributes per parameter. Here each is a property that calls the descriptor
of `TensorBase` directly.
"""

from __future__ import annotations

from collections.abc import Callable
from types import GetSetDescriptorType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = [
    "COMPUTED",
    "FastAttributes",
    "raw_grad",
    "raw_hooks",
    "raw_post_hooks",
    "raw_requires_grad",
    "raw_version",
    "set_raw_grad",
    "without_torch_function",
]

without_torch_function: Callable[..., Any] = torch._C._disabled_torch_function_impl
"""`(function, types, args, kwargs)`: call the function as for a DTensor, entirely in C."""

_BASE: Any = torch._C.TensorBase
raw_grad: Callable[[torch.Tensor], Any] = _BASE.grad.__get__
set_raw_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _BASE.grad.__set__
raw_post_hooks: Callable[[torch.Tensor], Any] = _BASE._post_accumulate_grad_hooks.__get__
raw_requires_grad: Callable[[torch.Tensor], bool] = _BASE.requires_grad.__get__
raw_hooks: Callable[[torch.Tensor], Any] = _BASE._backward_hooks.__get__
raw_version: Callable[[torch.Tensor], int] = _BASE._version.__get__
"""Attributes of any tensor, in C. Call them inside `torch._C.DisableTorchFunctionSubclass()`;
outside, they are much slower than the attributes themselves."""


COMPUTED = ("H", "T", "data", "imag", "mH", "mT", "real")
"""Names of attributes that compute a new tensor; handled by `__torch_function__`."""

_METHODS = "dim element_size is_complex is_floating_point numel size stride"


class FastAttributes(DTensor):
    """A DTensor whose attributes and size methods bypass `__torch_function__`."""


def _directly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of `TensorBase` such that it runs as for a plain DTensor."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return without_torch_function(function, None, args, kwargs)

    return call


for _name, _own in vars(_BASE).items():
    if isinstance(_own, GetSetDescriptorType) and _name not in COMPUTED:
        _access = [_directly(each) for each in (_own.__get__, _own.__set__, _own.__delete__)]
        setattr(FastAttributes, _name, property(_access[0], _access[1], _access[2]))
for _name in _METHODS.split():
    setattr(FastAttributes, _name, _directly(getattr(_BASE, _name)))
