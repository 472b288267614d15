"""Gradients of losses that use sharded parameters themselves, with data that differs on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate
from torch.nn import functional as F

from megatron_fsdp_v2 import UnitOptions, fully_shard
from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from tests.distributed.on_ranks import on_ranks
from tests.distributed.test_tensor_parallel import mesh_with_tp
from tests.distributed.wrapping import (
    STRATEGIES,
    error_message,
    of_all_ranks,
    on_mesh,
    record_collectives,
    whole,
)


def _layer(mesh_name: str, strategy: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return fully_shard(
        nn.Linear(3, 5, bias=False),
        **{**on_mesh(mesh_name), "sharding_strategy": strategy, **options},
    )


def _data(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def _own() -> torch.Tensor:
    return _data(dist.get_rank())


def _gradients() -> list[torch.Tensor]:
    """The gradient of the loss of each rank."""
    torch.manual_seed(0)
    weight = nn.Linear(3, 5, bias=False).weight
    found = []
    for rank in range(dist.get_world_size()):
        loss = F.linear(_data(rank), weight).square().mean()
        found.append(torch.autograd.grad(loss, weight)[0])
    return found


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() < 1e-6 * expected.norm())


@pytest.mark.parametrize("mesh_name", ["3", "HSDP 2x2"])
@on_ranks("mesh_name")
def test_gradient_of_a_whole_weight_is_reduced_as_documented(mesh_name: str) -> None:
    gradients, rank = _gradients(), dist.get_rank()
    mean, total = sum(gradients) / len(gradients), sum(gradients)
    for strategy in STRATEGIES:
        for scale, placements, expected in (
            (None, None, mean),
            (1.0, None, total),
            (None, Replicate(), None),
            (None, Partial(), total),
        ):
            layer = _layer(mesh_name, strategy, gradient_scaling_factor=scale)
            ndim = layer.weight.device_mesh.ndim
            given = None if placements is None else [placements] * ndim
            weight = layer.weight.full_tensor(grad_placements=given)
            F.linear(_own(), weight).square().mean().backward()
            if expected is not None:
                assert _is_close(whole(layer.weight.grad), expected), (strategy, placements)
                continue
            first, last = layer.weight.local_rows
            assert torch.equal(layer.weight.grad.to_local(), gradients[rank][first:last])


@pytest.mark.parametrize(("mesh_name", "strategy"), [("2", "no_shard"), ("HSDP 2x2", "optim")])
@on_ranks("mesh_name")
def test_gradient_of_rows_is_averaged_over_the_ranks_that_hold_them(
    mesh_name: str, strategy: str
) -> None:
    gradients = _gradients()
    for scale in (None, 0.25):
        layer = _layer(mesh_name, strategy, gradient_scaling_factor=scale)
        rows = layer.weight.to_local()
        first, last = layer.weight.local_rows
        loss = F.linear(_own(), rows).square().sum() / (4 * 5)
        loss.backward()
        # Along HSDP's outer axis, ranks r and r + 2 hold equal rows.
        same = gradients if mesh_name == "2" else gradients[dist.get_rank() % 2 :: 2]
        expected = sum(same)[first:last] / len(same)
        assert _is_close(layer.weight.grad.to_local(), expected)


@on_ranks(2)
def test_losses_that_are_equal_on_ranks_keep_their_gradient() -> None:
    for strategy in STRATEGIES:
        found = []
        for placements in (None, [Replicate()]):
            layer = _layer("2", strategy)
            weight = layer.weight.full_tensor(grad_placements=placements)
            F.linear(_data(0), weight).square().mean().backward()
            found.append(layer.weight.grad.to_local())
        assert torch.equal(*found)


@on_ranks(2)
def test_autograd_grad_and_backward_of_inputs_with_a_sharded_weight() -> None:
    gradients, rank = _gradients(), dist.get_rank()
    layer = _layer("2", "optim_grads_params")

    def loss() -> torch.Tensor:
        made: torch.Tensor = F.linear(_own(), layer.weight.full_tensor()).square().mean()
        return made

    (grad,) = torch.autograd.grad(loss(), layer.weight)
    first, last = layer.weight.local_rows
    assert torch.equal(grad.to_local(), gradients[rank][first:last])
    assert layer.weight.grad is None
    loss().backward(inputs=[layer.weight])
    assert _is_close(whole(layer.weight.grad), sum(gradients) / 2)


@on_ranks(2)
def test_a_weight_outside_its_module_adds_no_collective_to_the_backward() -> None:
    def counts(uses_module: bool) -> tuple[int, int]:
        layer = _layer("2", "optim_grads_params")
        recorder = record_collectives(layer)
        for _ in range(2):
            own = _own()
            hidden = layer(own) if uses_module else F.linear(own, layer.weight.full_tensor())
            hidden.square().mean().backward()
        return recorder.count("reduce_scatter"), recorder.count("all_reduce")

    assert counts(uses_module=True) == counts(uses_module=False)


@on_ranks(2)
def test_a_change_between_an_operation_and_its_whole_result_is_rejected_by_name() -> None:
    layer = _layer("2", "optim_grads_params")
    doubled = layer.weight * 2
    with torch.no_grad():
        layer.weight.add_(1.0)
    text = error_message(RuntimeError, doubled.full_tensor)
    assert "weight of " in text and "was changed in place after an operation on it" in text


@pytest.mark.parametrize("dim", [0, 1, None])
@on_ranks(4)
def test_gradient_of_a_tensor_parallel_weight_as_a_whole(dim: int | None) -> None:
    mesh = mesh_with_tp(2, 2)
    torch.manual_seed(0)
    full = nn.Linear(4, 6, bias=False)
    part = nn.Linear(*((4, 6) if dim is None else (4, 3) if dim == 0 else (2, 6)), bias=False)
    tp, dp = mesh.get_local_rank("tp"), mesh.get_local_rank("dp")
    with torch.no_grad():
        part.weight.copy_(full.weight if dim is None else full.weight.chunk(2, dim)[tp])
    options = UnitOptions(tensor_shards={part.weight: TensorShard(mesh, dim)})
    layer: Any = fully_shard(part, mesh=mesh["dp"], options=options)

    def loss(weight: torch.Tensor, rank: int) -> torch.Tensor:
        data = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
        return F.linear(data, weight).square().mean()

    loss(layer.weight.full_tensor(), dp).backward()
    expected = sum(torch.autograd.grad(loss(full.weight, r), full.weight)[0] for r in range(2)) / 2
    assert _is_close(layer.weight.grad.full_tensor(), expected)


class Branches(nn.Module):
    """Runs a layer on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5, bias=False), nn.Linear(3, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) if dist.get_rank() else self.second(x)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@on_ranks(2)
def test_a_unit_frozen_while_one_rank_has_it_gathered_is_frozen_on_all(strategy: str) -> None:
    torch.manual_seed(0)
    model: Any = Branches()
    for layer in (model.first, model.second, model):
        fully_shard(layer, sharding_strategy=strategy, reshard_after_forward=False)
    frozen, weight = model.first.weight, model.second.weight
    model(_own()).sum()  # without a backward, one of the layers stays gathered
    model.first.requires_grad_(False)
    recorded = record_collectives(model)
    F.linear(_own(), weight.full_tensor()).square().mean().backward()
    first, second = of_all_ranks(len(recorded.sent))
    assert first == second
    assert weight.grad is not None
    assert frozen.grad is None
