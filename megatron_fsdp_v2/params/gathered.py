"""Gathered parameters: the tensors that modules compute with between unshard and reshard."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_fsdp_v2.dtensor.row_shards import GroupInfo
from megatron_fsdp_v2.dtensor.sharded_rows import COMPUTED
from megatron_fsdp_v2.params.autograd import in_backward


@dataclass(frozen=True, slots=True)
class GatheredSlot:
    """The place of a gathered parameter in its group, which the parameter does not keep alive.

    Attributes:
        info: Information about the group.
        index: Index of the parameter in the group.
        name: Name of the parameter in the group.
        kernel_grad: Returns the full gradient of a parameter by index, for a fused kernel, and
            allocates its buffer. None if the group was deleted.
    """

    info: GroupInfo
    index: int
    name: str
    kernel_grad: Callable[[int], torch.Tensor | None]

    @property
    def label(self) -> str:
        """Name of the parameter for error messages."""
        return f"{self.name} of {self.info.name}"


class FusedGradient:
    """Attributes of a parameter through which fused kernels write the full gradient buffer.

    A kernel that accumulates weight gradients itself (`gradient_accumulation_fusion` of Megatron
    and Transformer Engine) adds to `main_grad` in the backward, sets `grad_added_to_main_grad` and
    returns a placeholder gradient, which is dropped. For a parameter with `zero_out_wgrad` (tied,
    with uses outside fused kernels) the kernel returns zeros, so that autograd's gradient is that
    of the other uses, which is added. `main_grad` is zeroed at its first use in a reduction period,
    so kernels must always add: `overwrite_main_grad` is False.
    """

    grad_added_to_main_grad: bool = False
    requires_grad: bool
    _owner_slot: GatheredSlot

    def get_main_grad(self) -> torch.Tensor:
        """Return the full gradient of this parameter, a view of the flat buffer, of `self.shape`.

        Allocates the buffer if it has no memory, after waiting for its earlier reduction.

        Raises:
            AttributeError: Outside a backward, or for a frozen parameter.
        """
        slot, grad = self._owner_slot, None
        if self.requires_grad and in_backward():
            grad = slot.kernel_grad(slot.index)
        if grad is None:
            raise AttributeError(
                "main_grad exists in the backward of a trained parameter only; after it, read "
                "the reduced gradient from the sharded parameter's .grad"
            )
        return grad

    @property
    def main_grad(self) -> torch.Tensor:
        """See `get_main_grad`."""
        return self.get_main_grad()

    @main_grad.setter
    def main_grad(self, value: torch.Tensor | None) -> None:
        # Model code may restore the value it read in the forward: None.
        if value is not None and value.data_ptr() != self.get_main_grad().data_ptr():
            raise AttributeError("main_grad is a view of the flat gradient buffer; write into it")

    @property
    def overwrite_main_grad(self) -> bool:
        """Whether a kernel may overwrite `main_grad` instead of adding to it: always False.

        Transformer Engine reads it in the forward and overwrites in the backward. In between, other
        micro-batches or another use of the module may have added to `main_grad`.
        """
        return False

    @overwrite_main_grad.setter
    def overwrite_main_grad(self, value: bool) -> None:
        # Model code sets it when it has no earlier gradient, but other uses may have one.
        del value


class GatheredParameter(FusedGradient, nn.Parameter):
    """A view of the gathered buffer, with attributes for fused kernels.

    In all other respects an ordinary `nn.Parameter`. Compiled graphs import the class by name.
    """

    def _detached(self) -> torch.Tensor:
        # Torch's `data` has its own version counter, which would hide writes.
        return self.detach()

    def _assign(self, value: torch.Tensor) -> None:
        if value.data_ptr() != self.data_ptr() or value.dtype != self.dtype:
            raise RuntimeError(
                f"{gathered_name(self) or 'a parameter'} is gathered, and data assigned to it "
                "would not reach the sharded parameter; assign it between steps, after reshard()"
            )

    data: Any = property(_detached, _assign)


@functools.cache
def gathered_class(of: type) -> type:
    """Return a subclass of a parameter's class that has the attributes for fused kernels."""
    return type(f"Gathered{of.__name__}", (FusedGradient, of), {"__module__": of.__module__})


class _Freed:
    """Mixin of gathered parameters whose memory is freed: reading values raises an error by name.

    Torch would read freed memory, or crash. Code that looks parameters up on their modules never
    finds such a parameter.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run functions that read no values."""
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
            is_allowed = name not in COMPUTED
        else:
            is_property = name.startswith(("is_", "_is_")) and name != "is_nonzero"
            is_allowed = is_property or name in _READ_NO_VALUES.split() or func in _WRITERS
        if is_allowed:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        found = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Freed))
        raise RuntimeError(
            f"{name} reads {gathered_name(cast('torch.Tensor', found)) or 'a parameter'}, whose "
            "gathered memory was freed when its unit was resharded; look the parameter up on its "
            "module at every use, or copy it (clone()) while it is gathered"
        )


_READ_NO_VALUES = (
    "__hash__ __len__ dim element_size get_device ndimension nelement numel register_hook "
    "register_post_accumulate_grad_hook requires_grad_ size storage_offset stride untyped_storage"
)
_TENSOR: Any = torch.Tensor
_WRITERS = tuple(
    each
    for attribute in (_TENSOR.grad, _TENSOR.requires_grad)
    for each in (attribute.__set__, attribute.__delete__)
)


@functools.cache
def freed_class(of: type) -> type:
    """Return the class of gathered parameters of a class while they have no memory."""
    return type(f"Freed{of.__name__}", (_Freed, of), {"__module__": of.__module__})


def gathered_name(param: torch.Tensor) -> str | None:
    """Return the name of a gathered parameter; None for any other tensor."""
    slot: GatheredSlot | None = getattr(param, "_owner_slot", None)
    return None if slot is None or slot.info.owner() is None else slot.label


def gathered_info(param: torch.Tensor) -> GroupInfo | None:
    """Return the information about the group of a gathered parameter; None for other tensors."""
    slot: GatheredSlot | None = getattr(param, "_owner_slot", None)
    return None if slot is None else slot.info
