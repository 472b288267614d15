"""The orthogonal factor of a matrix, by a polynomial iteration of matrix products."""

from __future__ import annotations

import torch

__all__ = ["COEFFICIENTS", "EPS", "STEPS", "newton_schulz", "newton_schulz_flops"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic `a x + b x^3 + c x^5`, as Keller Jordan tuned them and `torch.optim.Muon` has."""
STEPS = 5
EPS = 1e-7


def newton_schulz(
    matrices: torch.Tensor,
    *,
    steps: int = STEPS,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Push all singular values of each matrix towards 1, and keep its singular vectors.

    Args:
        matrices: A stack `(count, m, n)`; matrices do not mix.
        steps: Iterations, each of `newton_schulz_flops(m, n, 1)` operations.
        coefficients: `(a, b, c)` of the quintic.
        eps: Smallest Frobenius norm a matrix is divided by.
        dtype: Of the products and of the result.

    Returns:
        A stack of the same shape, of `dtype`.
    """
    a, b, c = coefficients
    x = matrices.to(dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        # The Gram matrix of the shorter side is the smaller one.
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def newton_schulz_flops(m: int, n: int, steps: int = STEPS) -> int:
    """Floating-point operations for one `m x n` matrix, a multiplication and an addition each one.

    A step multiplies short x long by long x short, short x short by itself, and that by
    short x long.
    """
    short, long = min(m, n), max(m, n)
    return steps * (4 * short * short * long + 2 * short**3)
