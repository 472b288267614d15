"""What `torch.amp.GradScaler` asks of sharded gradients: to be unscaled, and whether one is finite.

DTensor's own rule reduces the answer over the placements of the first gradient in a list, which
need not be those of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.comm.errors import naming_failures
from megatron_fsdp_v2.dtensor.norms import cut_axes

__all__ = ["unscale_and_check"]


def unscale_and_check(
    grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Multiply gradients, in place, and tell all ranks that hold parts of them of an inf or nan.

    Collective over every mesh axis that one of them is sharded along.

    Args:
        grads: Sharded and other tensors, of the same parameters on all ranks.
        found_inf: One element, set to 1 where some rank has a gradient that is not finite.
        inv_scale: One element, the factor.
    """
    local = [grad._local_tensor if isinstance(grad, DTensor) else grad for grad in grads]
    held = [tensor for tensor in local if tensor.numel()]
    if held:
        torch._amp_foreach_non_finite_check_and_unscale_(held, found_inf, inv_scale)
        torch.autograd.graph.increment_version(grads)
    axes: dict[DeviceMesh, set[int]] = {}
    for grad in grads:
        if isinstance(grad, DTensor):
            axes.setdefault(grad.device_mesh, set()).update(cut_axes(grad))
    for mesh, sharded in axes.items():
        for axis in sorted(sharded):
            group = mesh.get_group(axis)
            with naming_failures("all-reduce of whether a gradient is not finite", group):
                # Of offloaded gradients it may be in host memory, where NCCL does not look.
                found = found_inf.to(mesh.device_type)
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
                found_inf.copy_(found)
