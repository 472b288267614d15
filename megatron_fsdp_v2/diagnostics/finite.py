"""Which parameters and gradients hold NaN or Inf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, override

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.diagnostics.walk import chunks, parameters_below, reduce_rows
from megatron_fsdp_v2.dtensor.sharded_rows import plain_attributes, plain_of, raw_grad

_NAMED_AT_MOST = 20
"""Tensors an error message names."""


@dataclass(frozen=True, slots=True)
class Nonfinite:
    """A tensor that is not finite.

    Attributes:
        name: The parameter's name.
        kind: Whether it is the parameter or its gradient.
        num_nan: NaNs in the whole tensor.
        num_inf: Infinities of either sign in the whole tensor.
    """

    name: str
    kind: Literal["param", "grad"]
    num_nan: int
    num_inf: int

    @override
    def __str__(self) -> str:
        what = self.name if self.kind == "param" else f"gradient of {self.name}"
        return f"{what}: {self.num_nan} NaN, {self.num_inf} Inf"


def find_nonfinite(module: nn.Module) -> list[Nonfinite]:
    """Find parameters and gradients that hold NaN or Inf. Collective.

    Counts are summed over the ranks a tensor is sharded along. Along an axis that replicates it,
    replicas count as one tensor and the largest count is reported, so that all ranks find NaN or
    Inf of a single replica. Parameters that `fully_shard` was told to ignore count as replicas. One
    collective for each mesh axis, where all tensors have the same kind of placement along it, and
    one for each kind otherwise. Gradients that are not reduced yet (`no_sync`) are not seen.

    Args:
        module: A sharded module, or one that contains some.

    Returns:
        Tensors that are not finite, in the order of `named_parameters()`; equal on all ranks of the
        mesh.

    Raises:
        ValueError: Nothing in the module is sharded.
    """
    params = parameters_below(module)
    if not params:
        return []
    first = next((p for p in params if p.is_sharded), params[0])
    device = first.local.device
    rows = [
        torch.cat([_counts(param.local, device), _counts(param.local_grad, device)])
        for param in params
    ]
    values = torch.stack(rows)
    reduce_rows(values, [p.axes(sharded=True) for p in params], dist.ReduceOp.SUM)
    whole_mesh = first.axes(sharded=True) + first.axes(sharded=False)
    replicas = [p.axes(sharded=False) if p.is_sharded else whole_mesh for p in params]
    reduce_rows(values, replicas, dist.ReduceOp.MAX)
    found = []
    for param, (nan, inf, grad_nan, grad_inf) in zip(params, values.tolist(), strict=True):
        if nan or inf:
            found.append(Nonfinite(param.name, "param", nan, inf))
        if grad_nan or grad_inf:
            found.append(Nonfinite(param.name, "grad", grad_nan, grad_inf))
    return found


def check_finite(module: nn.Module) -> None:
    """Raise an error unless all parameters and gradients are finite. Collective.

    Args:
        module: A sharded module, or one that contains some.

    Raises:
        RuntimeError: A parameter or gradient is not finite; on every rank of the mesh, with names
            and counts.
        ValueError: Nothing in the module is sharded.
    """
    found = find_nonfinite(module)
    if not found:
        return
    named = listed(found, _NAMED_AT_MOST, separator="; ")
    raise RuntimeError(
        f"{type(module).__name__} holds numbers that are not finite: {named}. "
        "torch.autograd.detect_anomaly() finds the operation that made the first of them"
    )


def _counts(local: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """NaNs and infinities of a local tensor: `(2,)`, int64."""
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    if local is None or not local.is_floating_point():
        return counts
    for chunk in chunks(local):
        # Dtypes of one byte have few operations of their own.
        values = chunk.float() if chunk.element_size() == 1 else chunk
        counts += torch.stack([values.isnan().sum(), values.isinf().sum()]).to(device)
    return counts


def not_finite(module: nn.Module) -> list[str]:
    """Names of parameters whose gradient, as far as this rank has it, holds NaN or Inf.

    Reads every gradient once, and waits for the device once unless a gradient is not finite.

    Args:
        module: A module in which some or all are sharded.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    named = list(module.named_parameters())
    with plain_attributes():
        found_grads = [raw_grad(param) for _, param in named]
    for (name, _), grad in zip(named, found_grads, strict=True):
        if grad is not None:
            here = plain_of(grad)
            if here.numel():
                by_kind.setdefault((here.device, here.dtype), {})[name] = here
    found: list[str] = []
    with torch.no_grad():
        for grads in by_kind.values():
            # All elements are finite where the norm is, and the squares may add up to infinity
            # where they are, too. The largest absolute value takes eight times as long on a CPU.
            norms = torch.stack(torch._foreach_norm(list(grads.values()))).isfinite().tolist()
            found += [
                name
                for (name, grad), is_finite in zip(grads.items(), norms, strict=True)
                if not is_finite and not grad.isfinite().all()
            ]
    return found
