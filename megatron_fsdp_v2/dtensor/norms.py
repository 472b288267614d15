"""Norms of sharded tensors that are reduced once, when they have been put together.

`torch.nn.utils.clip_grad_norm_` takes a norm per gradient, stacks them and takes the norm of that.
Ranks with empty shards have fewer gradients, so reducing norms one by one, or the stack as it is,
would pair up different tensors or hang. A `ShardedNorm` stays local through the stack; the norm of
the stack is one number per rank and is reduced then.
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

__all__ = ["NORMS", "ShardedNorm", "local_norms", "order_of"]

NORMS = (torch._foreach_norm, torch.linalg.vector_norm)
"""Functions whose results on sharded tensors are `ShardedNorm`s."""


class ShardedNorm(torch.Tensor):
    """Norms of this rank's parts of sharded tensors, still to be reduced.

    Anything but `.to()`, `torch.stack` and the norm of the stack reduces it first (a collective)
    and continues with the global value.
    """

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
        norm = local.detach().as_subclass(ShardedNorm)
        norm.mesh, norm.axes, norm.order, norm.empty = mesh, axes, order, empty
        return norm

    def over(self, axes: tuple[int, ...]) -> ShardedNorm:
        """The same, to be reduced over more axes, along which it is replicated."""
        local = self.as_subclass(torch.Tensor)
        if not _is_first_along(self.mesh, set(axes) - set(self.axes)):
            local = torch.zeros_like(local)
        return ShardedNorm.of(local, self.mesh, axes, self.order, self.empty)

    def like(self, local: torch.Tensor) -> ShardedNorm:
        """Wrap other local norms of the same tensors."""
        return ShardedNorm.of(local, self.mesh, self.axes, self.order, self.empty)

    def reduced(self) -> DTensor:
        """The global norm, equal on every rank of the mesh. Collective."""
        local = self.as_subclass(torch.Tensor)
        is_max = self.order == float("inf")
        # Ranks may hold gradients of different dtypes, and one dtype has to go over the wire.
        total = local.double() if is_max else local.double() ** self.order
        op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
        if self.empty:
            _reduce_among(self._peers(), total, torch.maximum if is_max else torch.add)
        else:
            for axis in self.axes:
                group = self.mesh.get_group(axis)
                with naming_failures("all-reduce of the norm of sharded tensors", group):
                    dist.all_reduce(total, op=op, group=group)
        total = (total if is_max else total ** (1.0 / self.order)).to(local.dtype)
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
            if func is torch.Tensor.to:
                moved = func(args[0].as_subclass(torch.Tensor), *args[1:], **kwargs)
                return args[0].like(moved)
            if func is torch.stack and _are_alike(args[0]):
                _check_meshes(args[0])
                axes = tuple(sorted(set().union(*(norm.axes for norm in args[0]))))
                norms = [norm if norm.axes == axes else norm.over(axes) for norm in args[0]]
                stacked = torch.stack([norm.as_subclass(torch.Tensor) for norm in norms])
                return norms[0].like(stacked)
            if func is torch.linalg.vector_norm and order_of(args, kwargs) == args[0].order:
                local = torch.linalg.vector_norm(args[0].as_subclass(torch.Tensor), args[0].order)
                return args[0].like(local).reduced()
            if name in ("as_subclass", "detach", "__get__", "__set__", "dim", "size"):
                return func(*args, **kwargs)
            return func(*_all_reduced(args), **kwargs)


def _are_alike(norms: Any) -> bool:
    return all(type(norm) is ShardedNorm and norm.order == norms[0].order for norm in norms)


def _check_meshes(norms: Sequence[ShardedNorm]) -> None:
    """Reject norms that have no common sum: along an axis that one lacks, nobody knows it."""
    for norm in norms:
        if norm.mesh != norms[0].mesh:
            raise ValueError(
                f"gradients over two meshes, {norms[0].mesh} and {norm.mesh}, have no common norm "
                "here. Clip the parameters of each mesh apart; or, where some are plain tensors "
                "beside DTensors of a tensor-parallel mesh, tell fully_shard that they are "
                "replicated over it: tensor_shards=tensor_parallel.tensor_shards(module, "
                "mesh=mesh, rules=[TensorParallelRule(torch.nn.Module, REPLICATED)])"
            )


def _all_reduced(value: Any) -> Any:
    if type(value) is ShardedNorm:
        return value.reduced()
    if isinstance(value, list | tuple):
        return type(value)(_all_reduced(item) for item in value)
    return value


def order_of(args: Any, kwargs: dict[str, Any]) -> float:
    """The p of the p-norm that a call of one of `NORMS` asks for."""
    return float(args[1] if len(args) > 1 else kwargs.get("ord", 2.0))


def _reduce_among(peers: list[int], total: torch.Tensor, combine: Callable[..., Any]) -> None:
    """Combine one tensor over some ranks, in place: to the first of them, and back."""
    rank = dist.get_rank()
    if rank != peers[0]:
        dist.send(total, peers[0])
        dist.recv(total, peers[0])
        return
    received = torch.empty_like(total)
    for peer in peers[1:]:
        dist.recv(received, peer)
        combine(total, received, out=total)
    for peer in peers[1:]:
        dist.send(total, peer)


def local_norms(tensors: Sequence[Any], order: float) -> list[ShardedNorm]:
    """Norms of the local parts of sharded tensors.

    Those of one mesh are reduced over the same axes, so that they can be put together: what is
    replicated along one of them counts on its first rank only.

    Args:
        tensors: `UnevenDTensor`s.
        order: The p of the p-norm.
    """
    axes: dict[DeviceMesh, set[int]] = {}
    for tensor in tensors:
        axes.setdefault(tensor.device_mesh, set()).update(_cut_axes(tensor))
    return [_local_norm(tensor, order, axes[tensor.device_mesh]) for tensor in tensors]


def _local_norm(tensor: Any, order: float, axes: set[int]) -> ShardedNorm:
    mesh, local = tensor.device_mesh, tensor._local_tensor
    counts = _is_first_along(mesh, axes - _cut_axes(tensor))
    # The largest of no elements is not defined; for a norm it is 0.
    norm = (
        torch.linalg.vector_norm(local, order) if counts and local.numel() else local.new_zeros(())
    )
    empty = tensor.row_shards.holders.empty
    return ShardedNorm.of(norm, mesh, tuple(sorted(axes)), order, empty)


def _cut_axes(tensor: Any) -> set[int]:
    placements = tensor.row_shards.placements
    return {axis for axis, placement in enumerate(placements) if placement.is_shard()}


def _is_first_along(mesh: DeviceMesh, axes: Collection[int]) -> bool:
    return all(mesh.get_local_rank(axis) == 0 for axis in axes)
