"""Linear functions between DTensors and plain tensors, which autograd records.

The backward of each applies its adjoint. No formula therefore mixes rows with a whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, override

import torch
from torch.distributed.tensor import DTensor


def is_tracked(*values: Any) -> bool:
    """Whether autograd records operations on these values."""
    return torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in values
    )


class _Linear(torch.autograd.Function):
    """A linear function between DTensors and plain tensors, with its adjoint for the backward."""

    @staticmethod
    @override
    def forward(ctx: Any, source: Any, function: Any, adjoint: Any, collect: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.adjoint, ctx.collect = function, adjoint, collect
        return function(source if isinstance(source, DTensor) else source.detach())

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        if grad is None:
            return None, None, None, None
        # A gradient of zeros can have no memory, as from `torch.sgn`; `param.grad` needs some.
        if not isinstance(grad, DTensor) and grad._is_zerotensor():
            grad = grad.clone()
        if ctx.collect is not None and _accumulates(ctx.next_functions[0][0]):
            ctx.collect(grad.detach())
            return None, None, None, None
        return linear(grad, ctx.adjoint, ctx.function), None, None, None


def linear(
    source: Any,
    function: Callable[[Any], Any],
    adjoint: Callable[[Any], Any],
    collect: Callable[[torch.Tensor], None] | None = None,
) -> Any:
    """Apply a linear function. Autograd applies its adjoint in the backward.

    Args:
        source: A tensor.
        function: The function.
        adjoint: Returns the gradient of the source for that of the result.
        collect: Takes the gradient of the result instead, where a backward would accumulate the
            gradient of the source, a leaf.
    """
    if not is_tracked(source):
        return function(source)
    return _Linear.apply(source, function, adjoint, collect)  # type: ignore[no-untyped-call]


def local_part(source: Any) -> Any:
    """Return the local tensor of a DTensor or of its gradient, detached, sharing memory."""
    if not isinstance(source, DTensor):
        return source
    if any(placement.is_partial() for placement in source._spec.placements):
        return source.full_tensor().detach()
    return source._local_tensor.detach()


def _accumulates(node: Any) -> bool:
    """Whether the backward under way runs the node that accumulates the gradient of a leaf."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # `torch.autograd.grad` returns the gradient of this leaf.
        return False
