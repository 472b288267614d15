"""The parameters a module computes with while its unit is gathered."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from megatron_fsdp_v2.params.autograd import in_backward

__all__ = [
    "FusedGradient",
    "GatheredParameter",
    "gathered_name",
    "gathered_parameter",
    "is_gathered_weight",
    "mark_gathered",
]


class GradientOwner(Protocol):
    """What a gathered parameter asks of the group it belongs to."""

    def kernel_grad(self, index: int) -> torch.Tensor:
        """The gradient buffer's view of one parameter, ready to be added to."""
        ...

    def label(self, index: int) -> str:
        """What to call that parameter in a message."""
        ...


def mark_gathered(param: torch.Tensor, owner: GradientOwner, index: int) -> None:
    """Note on what a module computes with which group it belongs to, and where in it."""
    # Weak, or parameter -> group -> parameter would outlive the model.
    param._owner_slot = (weakref.ref(owner), index)  # type: ignore[attr-defined]


def gathered_name(param: torch.Tensor) -> str | None:
    """The name of what a parameter is the gathered weights of; None for any other tensor."""
    if not hasattr(param, "_owner_slot"):
        return None
    group, index = param._owner_slot
    owner: GradientOwner | None = group()
    return None if owner is None else owner.label(index)


def is_gathered_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a gathered weight or a view of one, such as a transposed one.

    For hooks on what autograd saves: such a tensor has no memory between forward and backward, in
    which it is filled again, so that there is nothing to move or to copy.
    """
    if hasattr(tensor, "_owner_slot"):
        return True
    base = tensor._base if tensor._is_view() else None
    return base is not None and hasattr(base, "_owner_slot")


class FusedGradient:
    """The way of fused kernels into the flat gradient buffer, as attributes of a parameter.

    A kernel that accumulates weight gradients itself (Megatron's and Transformer Engine's
    `gradient_accumulation_fusion`) writes into `main_grad` in the backward, sets
    `grad_added_to_main_grad` and returns any gradient, which is then dropped; a parameter marked
    `zero_out_wgrad` (tied, with uses that no kernel fuses) is brought zeros instead, so that what
    arrives is the gradient of the other uses, and is added. `main_grad` is
    zeroed on its first use in a reduction period, so a kernel has to add, always:
    `overwrite_main_grad` is False.
    """

    grad_added_to_main_grad: bool = False
    requires_grad: bool
    _owner_slot: tuple[Callable[[], GradientOwner | None], int]

    def get_main_grad(self) -> torch.Tensor:
        """The full gradient of this parameter, a view of the flat buffer, of `self.shape`.

        Gives the buffer memory if it has none, which may wait for older reductions.

        Raises:
            AttributeError: Outside of a backward, or for a frozen parameter: there is none.
        """
        owner = self._owner_slot[0]()
        if owner is None or not self.requires_grad or not in_backward():
            raise AttributeError(
                "main_grad exists in the backward of a trained parameter only; after it, read "
                "the reduced gradient from the sharded parameter's .grad"
            )
        return owner.kernel_grad(self._owner_slot[1])

    @property
    def main_grad(self) -> torch.Tensor:
        """See `get_main_grad`."""
        return self.get_main_grad()

    @main_grad.setter
    def main_grad(self, value: torch.Tensor | None) -> None:
        # Model code puts back what it found in the forward, where there is none yet.
        if value is not None and value.data_ptr() != self.get_main_grad().data_ptr():
            raise AttributeError("main_grad is a view of the flat gradient buffer; write into it")

    @property
    def overwrite_main_grad(self) -> bool:
        """Whether a kernel may overwrite `main_grad` instead of adding to it: never.

        Transformer Engine asks in the forward and overwrites in the backward, and in between other
        micro-batches, or another use of the module, may have added to it.
        """
        return False

    @overwrite_main_grad.setter
    def overwrite_main_grad(self, value: bool) -> None:
        # Model code asks for it where it knows of no earlier gradient; that is not known here.
        del value


class GatheredParameter(FusedGradient, nn.Parameter):
    """A view of the gathered buffer that fused kernels can give a gradient to.

    It is a parameter like any other for everything else.
    """


def gathered_parameter(
    bound: torch.Tensor, requires_grad: bool, owner: GradientOwner, index: int
) -> nn.Parameter:
    """Make the parameter that a module computes with.

    Args:
        bound: What it is over the gathered buffer: a view, or a tensor of a class of its own. That
            class is derived from, so that the parameter is one of it and has a `main_grad` as well.
        requires_grad: Whether it is trained.
        owner: The group it belongs to, which it knows weakly.
        index: Where in it.
    """
    param: nn.Parameter
    if type(bound) is torch.Tensor:
        param = GatheredParameter(bound, requires_grad=requires_grad)
    else:
        param = nn.Parameter(bound, requires_grad=requires_grad)
        param.__class__ = _gathered_class(type(param))
    mark_gathered(param, owner, index)
    return param


@functools.cache
def _gathered_class(of: type) -> type:
    return type(f"Gathered{of.__name__}", (FusedGradient, of), {"__module__": of.__module__})
