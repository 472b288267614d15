"""Norms of sharded tensors that are reduced once, when they have been put together.

`torch.nn.utils.clip_grad_norm_` takes a norm per gradient, stacks them and takes the norm of that.
Ranks with empty shards may have fewer gradients, so reducing norms one by one, or the stack as it
is, would pair up different tensors or hang. A `ShardedNorm` stays local through the stack; the norm
of the stack is one number per rank and is reduced then: by `clip_grad_norm_`, which sees gradients
of empty shards as well, among all ranks, and otherwise among those that hold rows of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, override

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from megatron_fsdp_v2.comm.errors import naming_failures
from megatron_fsdp_v2.comm.local_groups import new_local_group
from megatron_fsdp_v2.dtensor.attributes import is_shown_to_all

__all__ = ["ShardedNorm", "cut_axes", "local_norms", "order_of"]


class ShardedNorm(torch.Tensor):
    """Norms of this rank's parts of sharded tensors, still to be reduced.

    Anything but `.to()`, `torch.stack` and the norm of the stack reduces it first (a collective)
    and continues with the global value.
    """

    local: torch.Tensor
    mesh: DeviceMesh
    axes: tuple[int, ...]
    order: float
    empty: frozenset[tuple[int, ...]]

    @staticmethod
    def of(
        local: torch.Tensor,
        mesh: DeviceMesh,
        axes: tuple[int, ...],
        order: float,
        empty: frozenset[tuple[int, ...]],
    ) -> ShardedNorm:
        """Wrap local norms.

        Args:
            local: Norms of local parts, 0-dim or a stack of them.
            mesh: Mesh of the tensors.
            axes: Mesh axes the tensors are sharded along.
            order: The p of the p-norm.
            empty: Mesh coordinates of ranks that hold no gradient and so never come here.
        """
        local = local.detach() if local.requires_grad else local
        norm = local.as_subclass(ShardedNorm)
        # Also as a plain attribute: the tensor itself is asked for in Python dispatch.
        norm.local = local
        norm.mesh, norm.axes, norm.order, norm.empty = mesh, axes, order, empty
        return norm

    @override
    def to(self, *args: Any, **kwargs: Any) -> ShardedNorm:
        """The same elsewhere; clipping asks this of every norm, which is there mostly."""
        if args == (self.local.device,) and not kwargs:
            return self
        return self.like(self.local.to(*args, **kwargs))

    def over(self, axes: tuple[int, ...]) -> ShardedNorm:
        """The same, to be reduced over more axes, along which it is replicated."""
        local = self.local
        if not _is_first_along(self.mesh, set(axes) - set(self.axes)):
            local = torch.zeros_like(local)
        return ShardedNorm.of(local, self.mesh, axes, self.order, self.empty)

    def like(self, local: torch.Tensor) -> ShardedNorm:
        """Wrap other local norms of the same tensors."""
        return ShardedNorm.of(local, self.mesh, self.axes, self.order, self.empty)

    def reduced(self) -> DTensor:
        """The global norm, equal on every rank of the mesh. Collective."""
        local = self.local
        is_max = self.order == float("inf")
        # Ranks may hold gradients of different dtypes, and one dtype has to be communicated.
        total = local.double() if is_max else local.double() ** self.order
        # Norms of offloaded gradients are in host memory, where NCCL does not look.
        total = total.to(self.mesh.device_type)
        op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
        if self.empty:
            _reduce_among(tuple(self._peers()), total, op)
        else:
            for axis in self.axes:
                group = self.mesh.get_group(axis)
                with naming_failures("all-reduce of the norm of sharded tensors", group):
                    dist.all_reduce(total, op=op, group=group)
        total = (total if is_max else total ** (1.0 / self.order)).to(local)
        return DTensor.from_local(total, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)

    def _peers(self) -> list[int]:
        """Global ranks that share these tensors with this one and hold some rows."""
        here = self.mesh.get_coordinate()
        assert here is not None
        ranges = [
            range(self.mesh.size(axis)) if axis in self.axes else [here[axis]]
            for axis in range(self.mesh.ndim)
        ]
        # A tensor-parallel axis, which comes last, changes nothing of who is empty.
        ndim = len(next(iter(self.empty)))
        coordinates = [c for c in itertools.product(*ranges) if c[:ndim] not in self.empty]
        return [int(self.mesh.mesh[coordinate]) for coordinate in coordinates]

    def full_tensor(self) -> torch.Tensor:
        """The global norm as a plain tensor, as a DTensor gives it. Collective."""
        return self.reduced().full_tensor()

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Stay local where that is enough; reduce first everywhere else."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.stack and _are_alike(args[0]):
                _check_meshes(args[0])
                axes = tuple(sorted(set().union(*(norm.axes for norm in args[0]))))
                norms = [norm if norm.axes == axes else norm.over(axes) for norm in args[0]]
                stacked = torch.stack([norm.local for norm in norms])
                return norms[0].like(stacked)
            if func is torch.linalg.vector_norm and order_of(args, kwargs) == args[0].order:
                local = torch.linalg.vector_norm(args[0].local, args[0].order)
                return args[0].like(local).reduced()
            if name in ("as_subclass", "detach", "__get__", "__set__", "dim", "size"):
                return func(*args, **kwargs)
            whole = _all_reduced(args)
        # Other operands may be sharded, and have rules of their own.
        return func(*whole, **kwargs)


def _are_alike(norms: Any) -> bool:
    return all(isinstance(norm, ShardedNorm) and norm.order == norms[0].order for norm in norms)


def _check_meshes(norms: Sequence[ShardedNorm]) -> None:
    """Reject norms that have no common sum: along an axis that one lacks, nobody knows it."""
    for norm in norms:
        if norm.mesh is not norms[0].mesh and norm.mesh != norms[0].mesh:
            raise ValueError(
                f"gradients over two meshes, {norms[0].mesh} and {norm.mesh}, have no common norm "
                "here. Clip the parameters of each mesh apart; or, where some are plain tensors "
                "beside DTensors of a tensor-parallel mesh, tell fully_shard that they are "
                "replicated over it: tensor_shards=tensor_parallel.tensor_shards(module, "
                "mesh=mesh, rules=[TensorParallelRule(torch.nn.Module, REPLICATED)])"
            )


def _all_reduced(value: Any) -> Any:
    if isinstance(value, ShardedNorm):
        return value.reduced()
    if isinstance(value, list | tuple):
        return type(value)(_all_reduced(item) for item in value)
    return value


def order_of(args: Any, kwargs: dict[str, Any]) -> float:
    """The p of the p-norm that a call of a norm asks for."""
    return float(args[1] if len(args) > 1 else kwargs.get("ord", 2.0))


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""By their ranks, of which this one is one."""


def _reduce_among(peers: tuple[int, ...], total: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
    """Combine one number over some ranks, in place. Collective over those."""
    if len(peers) < 2:
        return
    group = _group_of(peers)
    with naming_failures("all-reduce of the norm of sharded tensors", group):
        dist.all_reduce(total, op=op, group=group)


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of some ranks, which is made by those alone, the first time they come."""
    group = _groups.get(ranks)
    if group is None or not _is_registered(group):
        group = new_local_group(ranks, "norms of sharded tensors")
        _groups[ranks] = group
    return group


def _is_registered(group: dist.ProcessGroup) -> bool:
    """Whether nobody has destroyed a group; ranks do that together."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return False


def local_norms(tensors: Sequence[Any], order: float) -> list[ShardedNorm]:
    """Norms of the local parts of sharded tensors, in one operation.

    Those of one mesh are reduced over the same axes, so that they can be put together: what is
    replicated along one of them counts on its first rank only.

    Args:
        tensors: `UnevenDTensor`s.
        order: The p of the p-norm.
    """
    cut = [cut_axes(tensor) for tensor in tensors]
    by_mesh: dict[DeviceMesh, set[int]] = {}
    for tensor, axes in zip(tensors, cut, strict=True):
        by_mesh.setdefault(tensor.device_mesh, set()).update(axes)
    common = {mesh: tuple(sorted(axes)) for mesh, axes in by_mesh.items()}
    counted: list[torch.Tensor] = []
    places: list[int | None] = []
    for tensor, axes in zip(tensors, cut, strict=True):
        local, mesh = tensor._local_tensor, tensor.device_mesh
        # The largest of no elements is not defined; for a norm it is 0.
        counts = local.numel() and _is_first_along(mesh, by_mesh[mesh] - axes)
        places.append(len(counted) if counts else None)
        if counts:
            counted.append(local.detach())
    norms = torch._foreach_norm(counted, order) if counted else ()
    return [
        ShardedNorm.of(
            tensor._local_tensor.new_zeros(()) if place is None else norms[place],
            tensor.device_mesh,
            common[tensor.device_mesh],
            order,
            empty,
        )
        for tensor, place, empty in zip(tensors, places, _absent(tensors), strict=True)
    ]


def _absent(tensors: Sequence[Any]) -> list[frozenset[tuple[int, ...]]]:
    """Mesh coordinates of ranks that take no part in the norm of each tensor."""
    empty: list[frozenset[tuple[int, ...]]] = [t.row_shards.holders.empty for t in tensors]
    # Those find a gradient without rows as well.
    return [frozenset()] * len(tensors) if any(empty) and is_shown_to_all() else empty


def cut_axes(tensor: DTensor) -> set[int]:
    """Mesh axes along which ranks hold different parts of a DTensor."""
    placements = tensor._spec.placements
    return {axis for axis, placement in enumerate(placements) if not placement.is_replicate()}


def _is_first_along(mesh: DeviceMesh, axes: Collection[int]) -> bool:
    return all(mesh.get_local_rank(axis) == 0 for axis in axes)
