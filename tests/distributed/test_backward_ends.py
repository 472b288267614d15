"""Units whose backward no hook ends keep their weights until it is over."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.runtime.module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.reference.models import Formula


def _inner(self: Any, x: torch.Tensor) -> torch.Tensor:
    x.mul_(0.9)  # So that no hook marks the end of the unit's backward.
    self.hidden = torch.tanh(self.up(x))
    return self.down(self.hidden)


def _outer(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return self.inner(x * self.scale), self.inner.hidden


def _root(self: Any, x: torch.Tensor) -> torch.Tensor:
    # Inputs of the outer unit need no gradients.
    outputs = (*self.outer(x), *self.outer(x + 1))
    return torch.stack([(y * self.scale).square().mean() for y in outputs]).sum()


def _model() -> Any:
    torch.manual_seed(0)
    inner = Formula(_inner, up=nn.Linear(8, 8), down=nn.Linear(8, 8))
    outer = Formula(_outer, inner=inner, scale=nn.Parameter(torch.ones(8)))
    return Formula(_root, outer=outer, scale=nn.Parameter(torch.ones(8)))


@on_ranks(2, strategy=["optim_grads", "optim_grads_params"])
def test_outer_unit_that_runs_twice_may_return_what_an_inner_unit_computed(strategy: str) -> None:
    """A gradient of an intermediate of the inner unit once ended the backward of that unit."""
    plain, model = _model(), _model()
    for unit in (model.outer.inner, model.outer, model):
        fully_shard(unit, sharding_strategy=strategy)
    x = torch.randn(3, 8)
    plain(x).backward()
    model(x).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    found = [(mine.grad.full_tensor(), full.grad) for mine, full in pairs]
    for mine, full in found:
        torch.testing.assert_close(mine, full)


@on_ranks(2)
def test_one_backward_through_two_forwards_leaves_none_pending() -> None:
    model = fully_shard(nn.Linear(4, 4))
    x = torch.randn(3, 4)
    (model(x) + model(x)).sum().backward()
    assert not unit_of(model).state.expects_backward
