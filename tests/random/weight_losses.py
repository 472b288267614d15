"""Losses of parameters themselves, sharded or full."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.distributed.test_operators import OF_ONE_TENSOR
from tests.distributed.wrapping import whole

WEIGHT_TERMS: list[Callable[[Any], Any]] = [
    lambda p: p.square().sum(),
    lambda p: whole(p.abs()).mean(),
    lambda p: p.flatten().norm() + p.mean(),
    lambda p: torch.cat([p, 2 * p]).square().mean(0).sum(),
    lambda p: (p.softmax(0) * whole(p).detach().sum()).square().sum(),
    lambda p: p[:1].sum() * p.norm(),
]
"""Functions that compute a loss of a parameter, sharded or full."""

OPERATORS = OF_ONE_TENSOR.split()
"""Operators of losses of parameters, used where they are smooth."""


def by_operator(name: str) -> Callable[[Any], Any]:
    """Return a function that computes a loss of a parameter by an operator of torch."""
    found = functools.reduce(lambda owner, part: getattr(owner, part, None), name.split("."), torch)
    operator = found or getattr(torch.Tensor, name)

    def term(param: Any) -> Any:
        losses = []
        for found in map(whole, tree_leaves(operator(param))):
            if isinstance(found, torch.Tensor) and found.requires_grad:
                out = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
                # The loss is bounded and not constant; a plain sum of a softmax is constant.
                factors = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
                losses.append((out.tanh() * factors).sum())
        return torch.stack(losses).sum()

    return term


def is_smooth(term: Callable[[Any], Any], param: torch.Tensor, tolerance: float) -> bool:
    """Return whether a loss is defined at a parameter, and its value and gradient are stable."""
    noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(0)).to(param.dtype)
    seen = []
    for scale in (0.0, 0.03 * tolerance):
        at = param.detach() + scale * param.detach().abs().max() * noise
        try:
            loss = term(at.requires_grad_())
            seen.append((loss.detach(), *torch.autograd.grad(loss, at)))
        except (RuntimeError, ValueError, IndexError, TypeError):
            # The operator does not support the shape or the value, or has no gradient.
            return False
    return all(
        bool((b - a).norm() <= 0.3 * tolerance * a.norm() < 1e3) for a, b in zip(*seen, strict=True)
    )


def term_of(seed: int, number: int, param: torch.Tensor, tolerance: float) -> Callable[[Any], Any]:
    """Return a loss of a parameter: an operator's, or a fixed one where that is not smooth."""
    term = by_operator(OPERATORS[(3 * seed + number) % len(OPERATORS)])
    if is_smooth(term, param, tolerance):
        return term
    return WEIGHT_TERMS[(seed + number) % len(WEIGHT_TERMS)]
