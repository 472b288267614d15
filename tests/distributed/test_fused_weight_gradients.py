"""Kernels that write weight gradients into the flat buffer, and gradients without reduction."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import fully_shard
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, error_message, gradient_error, mesh_of, wrap
from tests.reference.late_product import LateProduct
from tests.reference.models import Formula


@on_ranks(1)
def test_main_grad_exists_in_a_backward_only() -> None:
    model = fully_shard(nn.Linear(3, 3))
    model.unshard()
    assert not hasattr(model.weight, "main_grad")
    text = error_message(
        AttributeError, lambda: setattr(model.weight, "main_grad", torch.ones(3, 3))
    )
    assert "main_grad exists in the backward of a trained parameter only" in text


@on_ranks("sizes", sizes=[(3,), (2, 2)], strategy=STRATEGIES)
def test_parameters_and_modules_opt_out_of_gradient_reduction(
    sizes: tuple[int, ...], strategy: str
) -> None:
    """Parameters that opt out keep this rank's gradient; the others get the mean."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model: Any = copy.deepcopy(plain)
    model[0].bias.requires_gradient_reduction = False
    # Sharded as a frozen module, and trained later.
    model[2].requires_grad_(sizes == (3,))
    wrap(model, model, mesh=mesh_of(*sizes), sharding_strategy=strategy)
    model[2].set_requires_gradient_reduction(False)
    model[2].requires_grad_(True)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for either in (plain, model, plain, model):
        either(x).square().mean().backward()
    for number, param in enumerate(plain.parameters()):
        if number in (0, 2, 3):
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())
    assert gradient_error(model, plain) < 1e-6


@on_ranks(2, strategy=["no_shard", "optim_grads_params"])
def test_weight_gradient_computed_after_the_backward_raises(strategy: str) -> None:
    later: list[Any] = []

    def leave(weight: Any, grad: torch.Tensor, x: torch.Tensor) -> None:
        later.append((weight, grad.t() @ x))

    weights = [nn.Parameter(torch.randn(6, 6)) for _ in range(2)]
    layers = (
        Formula(lambda m, x: LateProduct.apply(x, m.weight, leave), weight=w) for w in weights
    )
    model = nn.Sequential(*layers)
    wrap(model, model, sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(3, 6, requires_grad=True)).sum().backward()
    for weight, grad in later:
        weight.grad = grad
    message = error_message(RuntimeError, optimizer.step)
    assert message.startswith("a gradient was assigned to the gathered weight of weight of 0/0")
    assert "delay_wgrad_compute" in message and "ScheduledUnits" in message
