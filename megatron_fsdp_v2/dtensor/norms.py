"""Norms of sharded tensors, all-reduced once per list of tensors, and inf checks.

`torch.nn.utils.clip_grad_norm_` computes a norm per gradient, stacks them and computes the norm of
the stack. A `ShardedNorm` stays local through the stack; the norm of the stack is one number per
rank and is all-reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, override

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from megatron_fsdp_v2.comm.interface import naming_failures
from megatron_fsdp_v2.dtensor.sharded_rows import plain_of, sharded_axes


class ShardedNorm(torch.Tensor):
    """Norms of this rank's parts of sharded tensors, not reduced over ranks yet.

    `.to()`, `detach()` and `torch.stack` keep it local. A norm of the same order is computed
    locally, then reduced. Other computations reduce it first, and so does a norm of order 0: it
    counts norms that are not zero over all ranks. A reduction is collective.

    Attributes:
        local: The same tensor without this class: 0-dim, or a stack of norms.
        mesh: Mesh of the tensors.
        axes: Mesh axes the tensors are sharded along.
        order: The p of the p-norm.
        is_data: Whether all axes of the mesh are data-parallel.
    """

    local: torch.Tensor
    mesh: DeviceMesh
    axes: frozenset[int]
    order: float
    is_data: bool

    def like(self, local: torch.Tensor) -> ShardedNorm:
        """Wrap other local norms of the same tensors."""
        return _sharded_norm(local, self.mesh, self.axes, self.order, self.is_data)

    def reduced(self) -> DTensor:
        """Return the global norm, equal on every rank of the mesh. Collective."""
        order, is_extreme = self.order, math.isinf(self.order)
        sign = math.copysign(1.0, order)
        # Ranks may hold gradients of different dtypes; all communicate float64.
        total = self.local.double()
        if is_extreme:
            # A maximum over ranks may drop NaNs, so they are reduced as separate numbers.
            nans = total.isnan()
            total = torch.stack([(sign * total).masked_fill(nans, -math.inf), nans.double()])
        elif order:
            total = total**order
        groups = [self.mesh.get_group(axis) for axis in sorted(self.axes)]
        op = dist.ReduceOp.MAX if is_extreme else dist.ReduceOp.SUM
        # Norms of offloaded gradients are in host memory, which NCCL cannot reduce.
        total = total.to(self.mesh.device_type)
        for group in groups:
            with naming_failures("all-reduce of the norm of sharded tensors", group):
                dist.all_reduce(total, op=op, group=group)
        if is_extreme:
            total = (sign * total[0]).masked_fill(total[1] > 0, math.nan)
        elif order:
            total = total ** (1.0 / order)
        total = total.to(self.local)
        return DTensor.from_local(total, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)

    def full_tensor(self) -> torch.Tensor:
        """Return the global norm as a plain tensor. Collective."""
        return self.reduced().full_tensor()

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        """Show this rank's norm without a reduction, which one rank alone cannot run."""
        return f"ShardedNorm(local={self.local}, order={self.order}, axes={set(self.axes)})"

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Stay local for `.to()` and a stack; reduce after the norm of a stack, else before."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.stack and _are_alike(args[0]):
                return _stacked(args[0])
            if func is torch.linalg.vector_norm and order_of(args, kwargs) == args[0].order:
                norm, order = args[0], args[0].order
                if not order:
                    return torch.linalg.vector_norm(norm.reduced(), order)
                return norm.like(torch.linalg.vector_norm(norm.local, order)).reduced()
            if name == "to":
                return args[0].like(args[0].local.to(*args[1:], **kwargs))
            if name in ("as_subclass", "detach", "__get__", "__set__", "dim", "size"):
                return func(*args, **kwargs)
            whole = tree_map_only(ShardedNorm, ShardedNorm.reduced, args)
        # Other operands may be sharded, with their own dispatch.
        return func(*whole, **kwargs)


def _sharded_norm(local: torch.Tensor, *about: Any) -> ShardedNorm:
    norm = local.as_subclass(ShardedNorm)
    norm.local, (norm.mesh, norm.axes, norm.order, norm.is_data) = local, about
    return norm


def _are_alike(norms: Any) -> bool:
    return all(isinstance(norm, ShardedNorm) and norm.order == norms[0].order for norm in norms)


def _stacked(norms: Sequence[ShardedNorm]) -> ShardedNorm:
    """Stack norms. The result is reduced along every axis that shards one of them.

    A norm that is replicated along such an axis counts on the first rank of that axis only. Norms
    of several meshes are reduced over the mesh that contains the others. If its axes are
    data-parallel, tensors over a part of its ranks (experts) differ between the parts.
    """
    meshes = list(dict.fromkeys(norm.mesh for norm in norms))
    axes = frozenset[int]().union(*(norm.axes for norm in norms))
    widest = norms[0]
    if len(meshes) > 1:
        widest = max(norms, key=lambda norm: norm.mesh.size())
        ranks, *others = ({*m.mesh.flatten().tolist()} for m in (widest.mesh, *meshes))
        if not all(each == ranks or (widest.is_data and each < ranks) for each in others):
            check_mesh("norm", meshes)
        axes = frozenset(range(widest.mesh.ndim))
    local = []
    for norm in norms:
        among = axes if len(meshes) == 1 else range(norm.mesh.ndim)
        is_first = all(axis in norm.axes or not norm.mesh.get_local_rank(axis) for axis in among)
        local.append(norm.local if is_first else _norm_of_none(norm.local, norm.order))
    return _sharded_norm(torch.stack(local), widest.mesh, axes, norms[0].order, widest.is_data)


def _norm_of_none(like: torch.Tensor, order: float) -> torch.Tensor:
    """Return the norm of no elements, which changes no norm that it is combined with."""
    return like.new_full((), math.inf if order < 0 else 0.0)


def check_mesh(what: str, meshes: Sequence[DeviceMesh]) -> None:
    """Check that the operands of an operation are distributed over one mesh.

    Raises:
        ValueError: They are distributed over different meshes.
    """
    for mesh in meshes:
        if mesh is not meshes[0] and mesh != meshes[0]:
            raise ValueError(
                f"{what} mixes tensors over two meshes, {meshes[0]} and {mesh}. Compute with those "
                "of each mesh apart (clip their gradients apart); or say that plain tensors are "
                "replicated over a tensor-parallel mesh: tensor_parallel.tensor_shards("
                "module, mesh=mesh, rules=[TensorParallelRule(torch.nn.Module, REPLICATED)])"
            )


def order_of(args: Any, kwargs: dict[str, Any]) -> float:
    """Return the p of the p-norm from the arguments of a norm function."""
    return float(args[1] if len(args) > 1 else kwargs.get("ord", 2.0))


def local_norms(tensors: Sequence[Any], order: float) -> list[ShardedNorm]:
    """Compute the norms of the local parts of sharded tensors in one operation.

    Args:
        tensors: `UnevenDTensor`s.
        order: The p of the p-norm.
    """
    # torch does not define some norms of an empty tensor.
    held = [tensor._local_tensor.detach() for tensor in tensors if tensor._local_tensor.numel()]
    norms = iter(torch._foreach_norm(held, order) if held else ())
    found = []
    for tensor in tensors:
        local, axes = tensor._local_tensor, frozenset(sharded_axes(tensor))
        norm = next(norms) if local.numel() else _norm_of_none(local, order)
        is_data = tensor.device_mesh.ndim == len(tensor.row_shards.strides)
        found.append(_sharded_norm(norm, tensor.device_mesh, axes, order, is_data))
    return found


def unscale(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Unscale gradients in place, and all-reduce the flag of an inf or nan.

    Called by `torch.amp.GradScaler`. DTensor's own rule reduces the flag over the placements of the
    first gradient of a list only. Collective over every mesh axis that shards one of the gradients.

    Args:
        func: `torch._amp_foreach_non_finite_check_and_unscale_`.
        args: Gradients of the same parameters on all ranks, sharded or not; a one-element flag, set
            to 1 if a gradient on any rank is not finite; a one-element factor.
        kwargs: Empty.
    """
    grads, found_inf, inv_scale = args
    local = list(map(plain_of, grads))
    held = [tensor for tensor in local if tensor.numel()]
    if held:
        func(held, found_inf, inv_scale, **kwargs)
        torch.autograd.graph.increment_version(grads)
    sharded = [grad for grad in grads if isinstance(grad, DTensor)]
    # In the order of the list, which is the same on all ranks. Tensors over a part of the ranks
    # (experts) may differ between ranks that hold equal rows of others.
    is_one = len({grad.device_mesh for grad in sharded}) < 2
    axes = dict.fromkeys(
        (grad.device_mesh, axis)
        for grad in sharded
        for axis in (sharded_axes(grad) if is_one else range(grad.device_mesh.ndim))
    )
    for mesh, axis in axes:
        found, group = found_inf.to(mesh.device_type), mesh.get_group(axis)
        with naming_failures("all-reduce of whether a gradient is not finite", group):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        found_inf.copy_(found)
