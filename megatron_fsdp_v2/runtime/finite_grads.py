"""Which gradients are not finite, at the cost of one pass where all are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from megatron_fsdp_v2.runtime.fsdp_module import named_units

__all__ = ["not_finite"]


def not_finite(module: nn.Module) -> list[str]:
    """Names of parameters whose gradient, as far as it is here, has an infinite or no value.

    The device is asked once, after one fused operation over the flat main gradients. Parameters
    are looked at one by one only where that finds something.

    Args:
        module: A module in which some or all are sharded.
    """
    if _are_finite(list(_memory_of_gradients(module))):
        return []
    grads = {
        name: _here(param.grad)
        for name, param in module.named_parameters()
        if param.grad is not None
    }
    if not grads:
        return []
    are_finite = torch.stack([torch.isfinite(grad).all() for grad in grads.values()]).tolist()
    return [name for name, is_finite in zip(grads, are_finite, strict=True) if not is_finite]


def _memory_of_gradients(module: nn.Module) -> Iterator[torch.Tensor]:
    """Few tensors that hold every gradient here, and besides them what gradients have left."""
    sharded: set[int] = set()
    for _, unit in named_units(module):
        sharded.update(id(param) for group in unit.groups for param in group.sharded_params)
        for grads in unit.grads():
            _, flat, others = grads.param_grads.found()
            yield from others if flat is None else (*others, flat)
    for param in module.parameters():
        if id(param) not in sharded and param.grad is not None:
            yield _here(param.grad)


def _here(grad: torch.Tensor) -> torch.Tensor:
    return local_of(grad) if isinstance(grad, DTensor) else grad.detach()


def _are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    # The largest absolute value: unlike a sum it is finite where all of them are.
    largest = [
        norm.float()
        for alike in by_kind.values()
        for norm in torch._foreach_norm(alike, float("inf"))
    ]
    if not largest:
        return True
    device = largest[0].device
    return bool(torch.stack([norm.to(device) for norm in largest]).isfinite().all())
