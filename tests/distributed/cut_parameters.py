"""Full tensors that are identical across ranks, and parameters sharded from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2 import UnitOptions, fully_shard
from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from tests.distributed.wrapping import mesh_of


@dataclass(frozen=True)
class Spec:
    """A parameter.

    Attributes:
        shape: Shape of the full parameter.
        dim: Dimension that tensor parallelism shards, if any.
        num_pieces: Number of fused sub-tensors along `dim`, each sharded separately.
        is_frozen: Whether the parameter is not trained.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    num_pieces: int = 1
    is_frozen: bool = False


@dataclass(frozen=True)
class Place:
    """Where parameters are sharded.

    Attributes:
        mesh: Sizes of the mesh: data-parallel axes, then the tensor-parallel axis, if any.
        strategy: Sharding strategy along the inner data-parallel axis.
        outer: Sharding strategy along the outer data-parallel axis.
        has_tensor_axis: Whether the last axis is tensor-parallel.
        granularity: See `fully_shard`.
    """

    mesh: tuple[int, ...]
    strategy: str = "optim_grads_params"
    outer: str = "no_shard"
    has_tensor_axis: bool = False
    granularity: str = "row"


def full(seed: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A random tensor, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def part(whole: torch.Tensor, spec: Spec, rank: int, size: int) -> torch.Tensor:
    """The TP-local shard of a full tensor on a rank."""
    if spec.dim is None or size == 1:
        return whole
    pieces = torch.chunk(whole, spec.num_pieces, spec.dim)
    return torch.cat([torch.chunk(p, size, spec.dim)[rank] for p in pieces], spec.dim)


def tensor_shard(param: torch.Tensor, spec: Spec, mesh: DeviceMesh) -> TensorShard:
    """The `TensorShard` of a TP-local parameter along the last axis of a mesh."""
    if spec.num_pieces == 1 or spec.dim is None:
        return TensorShard(mesh, spec.dim)
    pieces = (param.shape[spec.dim] // spec.num_pieces,) * spec.num_pieces
    return TensorShard(mesh, spec.dim, pieces)


class Bag(nn.Module):
    """A module that holds parameters and returns its input."""

    def __init__(self, tensors: Sequence[torch.Tensor], specs: Sequence[Spec]) -> None:
        super().__init__()
        for number, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
            param = nn.Parameter(tensor.clone(), requires_grad=not spec.is_frozen)
            self.register_parameter(f"p{number}", param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def initial(specs: Sequence[Spec], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Full initial values, which are small, so that updates dominate the weights."""
    return [0.01 * full(50 + number, spec.shape, dtype) for number, spec in enumerate(specs)]


def gradients(
    specs: Sequence[Spec], step: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Full gradients of a step."""
    return [full(1000 * step + number, spec.shape, dtype) for number, spec in enumerate(specs)]


def plain(specs: Sequence[Spec], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Unsharded parameters."""
    return list(Bag(initial(specs, dtype), specs).parameters())


def sharded(
    specs: Sequence[Spec], place: Place, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """Sharded parameters, alternately in an outer and in a nested unit. Collective."""
    both = mesh_of(*place.mesh)
    data, size, rank = both, 1, 0
    if place.has_tensor_axis:
        names = both.mesh_dim_names
        data = both[names[0]] if len(names) == 2 else both[names[:-1]]
        size, rank = place.mesh[-1], both.get_local_rank(len(names) - 1)
    parts = [
        part(value, spec, rank, size)
        for value, spec in zip(initial(specs, dtype), specs, strict=True)
    ]
    bags: list[Any] = [Bag(parts[start::2], specs[start::2]) for start in (0, 1)]
    bags[0].inner = bags[1]
    for start in (1, 0):
        shards = {}
        if place.has_tensor_axis:
            own = zip(bags[start].parameters(recurse=False), specs[start::2], strict=True)
            for param, spec in own:
                shards[param] = tensor_shard(param, spec, both)
        fully_shard(
            bags[start],
            mesh=data,
            sharding_strategy=place.strategy,
            outer_dp_sharding_strategy=place.outer,
            shard_granularity=place.granularity,
            options=UnitOptions(tensor_shards=shards),
        )
    found = [list(bag.parameters(recurse=False)) for bag in bags]
    # Parameters hold weak references to their unit.
    found[0][0].keeps_alive = bags[0]
    return [found[number % 2][number // 2] for number in range(len(specs))]


def set_gradients(params: Sequence[nn.Parameter], grads: Sequence[torch.Tensor]) -> None:
    """Set gradients from full tensors, or to None for frozen parameters."""
    for param, whole in zip(params, grads, strict=True):
        param.grad = None
        if not param.requires_grad:
            continue
        if not hasattr(param, "row_shards"):
            param.grad = whole.clone()
        else:
            grad = torch.zeros_like(param)
            grad.copy_(whole)
            param.grad = grad


def relative_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Largest relative error over the tensors: norm of the difference over the norm."""
    return max(
        float((mine.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-30))
        for mine, theirs in zip(found, expected, strict=True)
    )
