"""Kernels that write weight gradients straight into the flat buffer, and gradients left alone."""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import fully_shard
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, gradient_error, mesh_of, said, wrap
from tests.reference.late_product import LateProduct
from tests.reference.models import Formula


class _FusedLinear(torch.autograd.Function):
    """What Megatron's and Transformer Engine's fused linear layers do.

    The kind `add` is Megatron's; `overwrite` asks whether to overwrite in the forward and does so
    in the backward, as Transformer Engine does from 2.15 on, and `late` in the backward, as before.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, kind: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.kind = weight, kind
        ctx.overwrites = weight.overwrite_main_grad if kind == "overwrite" else None
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        product = grad.t() @ x
        if ctx.kind == "add":
            ctx.weight.get_main_grad().add_(product)
        else:
            overwrites = ctx.overwrites
            if overwrites is None:
                overwrites = ctx.weight.overwrite_main_grad
            target = ctx.weight.main_grad
            target.copy_(product) if overwrites else target.add_(product)
        ctx.weight.grad_added_to_main_grad = True
        # A placeholder of rubbish, to be dropped; `none` returns no gradient at all.
        dummy = None if ctx.kind == "none" else torch.full_like(weight, float("nan"))
        if getattr(weight, "zero_out_wgrad", False):
            dummy = torch.zeros_like(weight)
        return grad @ weight, dummy, None


class Linear(nn.Module):
    """A linear layer with a bias, fused or not, used twice in a forward if asked to."""

    def __init__(self, kind: str, twice: bool, tied: bool = False) -> None:
        super().__init__()
        self.tied = tied
        self.weight = nn.Parameter(torch.randn(6, 6) * 0.3)
        self.bias = nn.Parameter(torch.randn(6))
        self.kind, self.twice = kind, twice
        if tied:
            # Megatron marks a weight so that has a use which no kernel fuses.
            self.weight.zero_out_wgrad = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tied:
            x = x @ self.weight.t().cos()
        for _ in range(2 if self.twice else 1):
            if self.kind == "plain":
                x = x @ self.weight.t() + self.bias
            else:
                x = _FusedLinear.apply(x, self.weight, self.kind) + self.bias
        return x


def gradients(
    kind: str, strategy: str, twice: bool, tied: bool = False, warm_up: int = 0
) -> list[torch.Tensor]:
    """Gradients after three micro-batches, over two steps; the first forwards run ahead."""
    torch.manual_seed(0)
    model = nn.Sequential(Linear(kind, twice, tied), Linear(kind, False))
    wrap(model, model, sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(2):
        optimizer.zero_grad()
        waiting: collections.deque[torch.Tensor] = collections.deque()
        for micro in range(3 + warm_up):
            if micro < 3:
                generator = torch.Generator().manual_seed(10 * step + 3 * micro + dist.get_rank())
                waiting.append(model(torch.randn(5, 6, generator=generator)).square().mean())
            if micro >= warm_up:
                model.set_requires_gradient_sync(len(waiting) == 1 and micro >= 2)
                waiting.popleft().backward()
        found += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found


def check_gradients(kind: str, *how: Any) -> None:
    """See that a kind of kernel leaves the gradients of the plain one."""
    found, expected = gradients(kind, *how), gradients("plain", *how)
    assert len(found) > 2
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["add", "overwrite", "late", "none"])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@on_ranks(2, strategy=STRATEGIES)
def test_fused_weight_gradients_are_neither_doubled_nor_lost(
    strategy: str, twice: bool, kind: str
) -> None:
    check_gradients(kind, strategy, twice)


@on_ranks(2, strategy=STRATEGIES, warm_up=[1, 2])
def test_a_kernel_that_asked_in_a_warm_up_forward_erases_no_earlier_micro_batch(
    strategy: str, warm_up: int
) -> None:
    check_gradients("overwrite", strategy, True, False, warm_up)


@on_ranks(2, strategy=["no_shard", "optim_grads_params"])
def test_a_tied_weight_keeps_the_gradient_of_the_use_that_is_not_fused(strategy: str) -> None:
    check_gradients("add", strategy, False, True)


@on_ranks(1)
def test_main_grad_exists_in_a_backward_only() -> None:
    model = fully_shard(nn.Linear(3, 3))
    model.unshard()
    assert not hasattr(model.weight, "main_grad")
    text = said(AttributeError, lambda: setattr(model.weight, "main_grad", torch.ones(3, 3)))
    assert "main_grad exists in the backward of a trained parameter only" in text


@on_ranks("sizes", sizes=[(2,), (3,), (2, 2)], strategy=STRATEGIES)
def test_parameters_and_modules_opt_out_of_gradient_reduction(
    sizes: tuple[int, ...], strategy: str
) -> None:
    """Those that opt out have this rank's own gradient, and the others the mean."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model: Any = copy.deepcopy(plain)
    model[0].bias.requires_gradient_reduction = False
    wrap(model, model, mesh=mesh_of(*sizes), sharding_strategy=strategy)
    model[2].set_requires_gradient_reduction(False)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for either in (plain, model, plain, model):
        either(x).square().mean().backward()
    for number, param in enumerate(plain.parameters()):
        if number in (0, 2, 3):
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())
    assert gradient_error(model, plain) < 1e-6


@on_ranks(2, strategy=["no_shard", "optim_grads_params"])
def test_a_weight_gradient_that_is_made_after_the_backward_is_an_error(strategy: str) -> None:
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
    message = said(RuntimeError, optimizer.step)
    assert message.startswith("a gradient was assigned to the gathered weight of weight of 0/0")
    assert "delay_wgrad_compute" in message and "ScheduledUnits" in message
