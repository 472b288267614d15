"""Attributes of a DTensor subclass that has a `__torch_function__`, at about DTensor's cost.

With one, PyTorch hands every read of `grad`, `dtype` or `requires_grad` to it: some microseconds,
where a DTensor, which has none, takes a tenth of one. Optimizers, gradient clipping and `zero_grad`
read several of them per parameter. Here each is a property that calls what PyTorch would have
called in the end.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.dtensor.optimizer_kinds import stepped_by_all

__all__ = [
    "PLAIN_FUNCTIONS",
    "AttributesAtOnce",
    "ShownGradient",
    "grad_at_once",
    "hooks_at_once",
    "is_shown_to_all",
    "post_hooks_at_once",
    "requires_grad_at_once",
    "set_grad_at_once",
    "version_at_once",
    "without_torch_function",
]

without_torch_function: Callable[..., Any] = torch._C._disabled_torch_function_impl
"""`(function, types, args, kwargs)`: call it as for a DTensor, in C all the way."""

_BASE: Any = torch._C.TensorBase
grad_at_once: Callable[[torch.Tensor], Any] = _BASE.grad.__get__
set_grad_at_once: Callable[[torch.Tensor, torch.Tensor | None], None] = _BASE.grad.__set__
post_hooks_at_once: Callable[[torch.Tensor], Any] = _BASE._post_accumulate_grad_hooks.__get__
requires_grad_at_once: Callable[[torch.Tensor], bool] = _BASE.requires_grad.__get__
hooks_at_once: Callable[[torch.Tensor], Any] = _BASE._backward_hooks.__get__
version_at_once: Callable[[torch.Tensor], int] = _BASE._version.__get__
"""Attributes of any tensor, in C; to be called where `torch._C.DisableTorchFunctionSubclass()` is
in force, and else much slower than the attributes themselves."""

PLAIN_FUNCTIONS = frozenset({torch.is_complex, torch.is_floating_point, torch.numel})
"""Functions of one tensor that return no tensor."""


def _codes_that_read_grad(*functions: Callable[..., Any]) -> frozenset[CodeType]:
    codes = [inspect.unwrap(function).__code__ for function in functions]
    return frozenset(code for code in codes if "grad" in code.co_names)


_CLIPS = _codes_that_read_grad(torch.nn.utils.clip_grad_norm_)
_PAIRED = _CLIPS | _codes_that_read_grad(
    GradScaler._unscale_grads_, torch.nn.Module.zero_grad, torch.optim.Optimizer.zero_grad
)
"""Functions of torch that communicate what they find in the gradients of some parameters.

They leave out parameters whose `grad` is None, as that of an empty shard is. A rank that holds no
row of any of them would not communicate at all, and nobody else can know that: it depends on which
parameters these are, of which every rank sees those with gradients only. And what sets gradients
to None where there are some, so that ranks agree.
"""


def is_shown_to_all() -> bool:
    """Whether gradients without rows are found by whoever computes now, so that all ranks do.

    That is `clip_grad_norm_`, and optimizers that are not known to step rows alone.
    """
    frame: FrameType | None = sys._getframe(1)
    if stepped_by_all(frame) is not None:
        return True
    while frame is not None:
        if frame.f_code in _CLIPS:
            return True
        frame = frame.f_back
    return False


_PRIVATE = ("_grad_fn", "_has_symbolic_sizes_strides", "_python_dispatch", "_version")
_READ = (
    "device dtype grad_fn is_cpu is_cuda is_leaf is_meta is_mps is_mtia is_nested is_quantized "
    "is_sparse is_sparse_csr is_xla is_xpu itemsize layout name nbytes ndim output_nr retains_grad "
    "shape"
)
_GRAD = "grad"
_WRITTEN = ("_backward_hooks", "_post_accumulate_grad_hooks", "grad_dtype", "requires_grad")


class ShownGradient(Protocol):
    """Whoever made a tensor to be `param.grad`, and may use it again."""

    def retire(self, index: int, held: list[Any]) -> None:
        """It was `param.grad`, which was set to None.

        Args:
            index: What it was made for.
            held: The tensor, alone, which nobody else on the way here refers to.
        """
        ...


class AttributesAtOnce(DTensor):
    """A DTensor whose attributes and questions of size go past `__torch_function__`.

    `data` and what is computed (`T`, `real`, ...) are left to it.

    Attributes:
        empty_grad: Of a parameter without rows here, a gradient without rows, where other ranks
            have one. It is `grad` for functions of torch that communicate about gradients and for
            optimizers that need all ranks, and goes where `grad` is set.
        shown_by: Of a tensor that is shown as a parameter's `grad`, whose memory it is, which
            lives for as long as the tensor does, and for what.
    """

    empty_grad: torch.Tensor | None = None
    shown_by: tuple[ShownGradient, int] | None = None

    def _with_rows(self, grad: torch.Tensor) -> torch.Tensor:
        """What `grad` answers where it is a plain DTensor."""
        return grad

    @property
    def decoupled_grad(self) -> torch.Tensor | None:
        """Another name of `grad`, which may be of another dtype than the parameter here.

        Fused optimizers that are told to step such gradients (Transformer Engine's
        `use_decoupled_grad`) look for them here, and take a parameter without for one that has
        no gradient.
        """
        return self.grad

    @decoupled_grad.setter
    def decoupled_grad(self, value: torch.Tensor | None) -> None:
        self.grad = value


def _attribute(name: str, *, is_written: bool) -> property:
    descriptor = getattr(_BASE, name)
    get, put, delete = descriptor.__get__, descriptor.__set__, descriptor.__delete__

    def read(self: DTensor) -> Any:
        return without_torch_function(get, None, (self,))

    def write(self: DTensor, value: Any) -> None:
        without_torch_function(put, None, (self, value))

    def remove(self: DTensor) -> None:
        without_torch_function(delete, None, (self,))

    return property(read, write, remove) if is_written else property(read)


def _method(name: str) -> Callable[[DTensor], Any]:
    function = getattr(_BASE, name)

    @functools.wraps(function)
    def ask(self: DTensor) -> Any:
        return without_torch_function(function, None, (self,))

    return ask


def _method_of_dimension(name: str) -> Callable[..., Any]:
    function = getattr(_BASE, name)

    # Passing arguments on takes half as long again as the call.
    @functools.wraps(function)
    def ask(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        return without_torch_function(function, None, (self, *args), kwargs)

    return ask


def _finds_empty(frame: FrameType) -> bool:
    """Whether the code that reads `grad` is to find a gradient without rows."""
    return frame.f_code in _PAIRED or stepped_by_all(frame) is not None


def _read_grad(self: AttributesAtOnce) -> torch.Tensor | None:
    grad: torch.Tensor | None = without_torch_function(grad_at_once, None, (self,))
    if grad is None:
        empty = self.empty_grad
        return empty if empty is not None and _finds_empty(sys._getframe(1)) else None
    return self._with_rows(grad) if type(grad) is DTensor else grad


def _write_grad(self: AttributesAtOnce, value: torch.Tensor | None = None) -> None:
    if value is not None:
        without_torch_function(set_grad_at_once, None, (self, value))
    else:
        with torch._C.DisableTorchFunctionSubclass():
            # Referred to from here alone, if nobody keeps it.
            held = [grad_at_once(self)]
            set_grad_at_once(self, None)
            shown_by = getattr(held[0], "shown_by", None)
            if shown_by is not None:
                shown_by[0].retire(shown_by[1], held)
    if self.empty_grad is not None:
        self.empty_grad = None


def _define() -> None:
    # A name that this version of PyTorch lacks costs what it costs.
    for name in filter(_BASE.__dict__.__contains__, (*_PRIVATE, *_READ.split(), *_WRITTEN)):
        setattr(AttributesAtOnce, name, _attribute(name, is_written=name in _WRITTEN))
    setattr(AttributesAtOnce, _GRAD, property(_read_grad, _write_grad, _write_grad))
    for name in ("dim", "element_size", "is_complex", "is_floating_point", "numel"):
        setattr(AttributesAtOnce, name, _method(name))
    for name in ("size", "stride"):
        setattr(AttributesAtOnce, name, _method_of_dimension(name))


_define()
