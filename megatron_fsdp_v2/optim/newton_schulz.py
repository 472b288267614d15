"""Newton-Schulz iterations, which move the singular values of matrices towards 1."""

from __future__ import annotations

from collections.abc import Iterator

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic `a x + b x^3 + c x^5` by Keller Jordan, as in `torch.optim.Muon`."""
STEPS = 5
EPS = 1e-7
METHODS = ("standard", "gram")

_GRAM_STEPS = 3
"""Iterations on one Gram matrix. Rounding errors of more would make its eigenvalues negative."""


def newton_schulz(
    matrices: torch.Tensor,
    *,
    steps: int = STEPS,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
    dtype: torch.dtype = torch.bfloat16,
    method: str = "standard",
) -> torch.Tensor:
    """Move all singular values of each matrix towards 1, and keep its singular vectors.

    Args:
        matrices: A stack `(count, m, n)` of independent matrices.
        steps: Number of iterations.
        coefficients: Coefficients `(a, b, c)` of the quintic.
        eps: Smallest Frobenius norm that a matrix is divided by.
        dtype: Dtype of the products and of the result.
        method: `"standard"` iterates on the matrix. `"gram"` iterates on its Gram matrix, which is
            smaller, where that takes fewer operations (`newton_schulz_flops`).

    Returns:
        A stack of the same shape, in `dtype`.
    """
    x = matrices.to(dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        # Transposed, so that the Gram matrix is that of the shorter side.
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    short, long = x.shape[-2:]
    if newton_schulz_flops(short, long, steps, method) < _flops(short, long, steps):
        x = _iterate_on_gram(x, steps, coefficients)
    else:
        a, b, c = coefficients
        for _ in range(steps):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _iterate_on_gram(
    x: torch.Tensor, steps: int, coefficients: tuple[float, float, float]
) -> torch.Tensor:
    """Iterate on `x x^T`.

    An iteration multiplies `x` from the left by `p = a + b g + c g^2` of its Gram matrix `g`, so
    that the next one is `p g p`. Products of polynomials of one matrix commute. `x` itself is
    needed only where a Gram matrix is computed anew, and at the end.
    """
    a, b, c = coefficients
    for length in _lengths(steps):
        gram = x @ x.mT
        factor: torch.Tensor | None = None
        for number in range(1, length + 1):
            # p without a, whose product is added in the precision of the accumulation.
            partial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            if factor is None:
                factor = partial.clone()
                factor.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                factor = torch.baddbmm(factor, partial, factor, beta=a)
            if number < length:
                gram = torch.baddbmm(gram, partial, gram, beta=a)
                gram = torch.baddbmm(gram, gram, partial, beta=a)
        assert factor is not None
        x = factor @ x
    return x


def newton_schulz_flops(m: int, n: int, steps: int = STEPS, method: str = "standard") -> int:
    """Return the floating-point operations for one `m x n` matrix, counting a multiply-add as two.

    Args:
        m: Number of rows.
        n: Number of columns.
        steps: See `newton_schulz`.
        method: See `newton_schulz`.
    """
    short, long = min(m, n), max(m, n)
    standard = _flops(short, long, steps)
    return min(standard, _gram_flops(short, long, steps)) if method == "gram" else standard


def _flops(short: int, long: int, steps: int) -> int:
    """A step multiplies short x long by long x short, the result by itself and by short x long."""
    return steps * (4 * short * short * long + 2 * short**3)


def _gram_flops(short: int, long: int, steps: int) -> int:
    """Two products with the long side per Gram matrix; otherwise squares of the short side."""
    return sum(
        4 * short * short * long + 2 * short**3 * (length + 3 * (length - 1))
        for length in _lengths(steps)
    )


def _lengths(steps: int) -> Iterator[int]:
    """Yield the number of iterations on each Gram matrix."""
    for first in range(0, steps, _GRAM_STEPS):
        yield min(_GRAM_STEPS, steps - first)
