"""Reference Muon: full matrices, one at a time, with plain products; AdamW by torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalized(
    matrix: torch.Tensor,
    *,
    steps: int = 5,
    quintic: tuple[float, float, float] = QUINTIC,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Orthogonalize one matrix by Newton-Schulz iterations in a dtype."""
    a, b, c = quintic
    x = matrix.to(dtype)
    if x.shape[0] > x.shape[1]:
        wide = orthogonalized(x.T, steps=steps, quintic=quintic, eps=eps, dtype=dtype)
        return wide.T
    x = x / max(float(torch.linalg.matrix_norm(x)), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def rate_factor(name: str | None, rows: int, cols: int) -> float:
    """Return the factor of the learning rate for a matrix of this shape."""
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols))


class ReferenceMuon:
    """Steps plain matrices and stacks by Muon, and everything else by `torch.optim.AdamW`.

    Args:
        matrices: 2-D and 3-D parameters.
        others: Parameters of any shape.
        block_rows: Rows of each block that is a matrix of its own; None for whole matrices.
        dtype: Dtype of Newton-Schulz.
    """

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        others: Iterable[torch.nn.Parameter] = (),
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = QUINTIC,
        eps: float = 1e-7,
        adjust_lr_fn: str | None = None,
        block_rows: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.matrices = list(matrices)
        self.momenta = [torch.zeros_like(param) for param in self.matrices]
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.weight_decay, self.adjust_lr_fn = weight_decay, adjust_lr_fn
        self.block_rows = block_rows
        self.newton_schulz = {
            "steps": ns_steps,
            "quintic": ns_coefficients,
            "eps": eps,
            "dtype": dtype,
        }
        rest = list(others)
        self.adamw = torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay) if rest else None

    @torch.no_grad()
    def step(self) -> None:
        """Step every trained parameter."""
        for param, mean in zip(self.matrices, self.momenta, strict=True):
            if not param.requires_grad:
                continue
            grad = param.grad
            assert grad is not None
            if not param.numel():
                continue
            mean.copy_(self.momentum * mean + (1 - self.momentum) * grad)
            ahead = self.momentum * mean + (1 - self.momentum) * grad if self.nesterov else mean
            rows, columns = param.shape[-2:]
            rows = self.block_rows or rows
            blocks = ahead.reshape(-1, rows, columns)
            done = [orthogonalized(block, **self.newton_schulz) for block in blocks]  # type: ignore[arg-type]
            change = torch.stack(done).view(param.shape)
            rate = self.lr * rate_factor(self.adjust_lr_fn, rows, columns)
            param.mul_(1 - self.lr * self.weight_decay)
            param.sub_(rate * change.to(param.dtype))
        if self.adamw is not None:
            self.adamw.step()
