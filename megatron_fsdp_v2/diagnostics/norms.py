"""Norms of every parameter and gradient over the whole tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.diagnostics.walk import chunks, parameters_below, reduce_rows


@dataclass(frozen=True, slots=True)
class ParameterNorm:
    """Norms of one parameter.

    Attributes:
        param: Norm of the main weight.
        grad: Norm of `param.grad`; None if no rank has a gradient.
    """

    param: float
    grad: float | None


def parameter_norms(module: nn.Module, order: float = 2.0) -> dict[str, ParameterNorm]:
    """Norms of all parameters and gradients over the whole tensors. Collective.

    Issues one collective for each mesh axis along which parameters are sharded. Ignored parameters
    count with the values of this rank; gradients that are not reduced yet (`no_sync`) are not
    included. Norms are computed in fp64, so that neither
    large gradients nor small dtypes overflow. A NaN makes a norm NaN, for every order.

    Args:
        module: A sharded module, or one that contains some.
        order: The p of the p-norm, above 0; `math.inf` for the largest absolute value.

    Returns:
        Norms by name relative to `module`, tied parameters once; equal on all ranks of the mesh.

    Raises:
        ValueError: The order is not above 0, or nothing in the module is sharded.
    """
    if not order > 0:
        raise ValueError(f"the order of a norm must be above 0, got {order}")
    params = parameters_below(module)
    if not params:
        return {}
    device = next((p.local.device for p in params if p.is_sharded), params[0].local.device)
    rows = []
    for param in params:
        grad = param.local_grad
        own = _summand(param.local, order, device)
        other = own.new_zeros(()) if grad is None else _summand(grad, order, device)
        rows.append(torch.stack([own, other, own.new_full((), float(grad is not None))]))
    values = torch.stack(rows)
    axes = [param.axes(sharded=True) for param in params]
    if math.isinf(order):
        # A maximum over ranks may drop NaNs, so NaNs are reduced as separate numbers.
        nans = values.isnan()
        table = torch.cat([values.masked_fill(nans, 0.0), nans.double()], dim=1)
        reduce_rows(table, axes, dist.ReduceOp.MAX)
        values = table[:, :3].masked_fill(table[:, 3:] > 0, math.nan)
    else:
        reduce_rows(values, axes, dist.ReduceOp.SUM)
        values[:, :2] **= 1.0 / order
    return {
        param.name: ParameterNorm(own, other if present else None)
        for param, (own, other, present) in zip(params, values.tolist(), strict=True)
    }


def _summand(local: torch.Tensor, order: float, device: torch.device) -> torch.Tensor:
    """Return this rank's term of the p-th power of a norm, or its largest value. 0-dim, fp64."""
    norms = [torch.linalg.vector_norm(chunk.double(), order) for chunk in chunks(local)]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack(norms)
    total = stacked.amax() if math.isinf(order) else (stacked**order).sum()
    return total.to(device)
