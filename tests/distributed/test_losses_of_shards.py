"""Sums and means of sharded parameters, outside of a forward, such as regularization losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.wrapping import held_error, wrap
from tests.ranks import RankPools

LOSSES: dict[str, Callable[[Any], Any]] = {
    "sum of squares": lambda p: p.square().sum(),
    "mean of squares": lambda p: (p * p).mean(),
    "sum of magnitudes": lambda p: p.abs().sum(),
    "sum of columns": lambda p: p.square().sum(0).sum(),
    "mean of columns": lambda p: p.square().mean(0, keepdim=True).sum(),
    "mean of rows": lambda p: p.pow(3).mean(dim=1).sum(),
    "norm": lambda p: p.norm(),
    "two of them": lambda p: 0.1 * p.square().sum() + torch.sum(p),
}


def errors_of_losses(granularity: str) -> tuple[bool, dict[str, tuple[float, float]]]:
    """Whether this rank has rows, and by loss its error and that of the gradient it adds."""
    found = {}
    torch.manual_seed(0)
    model = wrap(nn.Linear(3, 5, bias=False), [], shard_granularity=granularity)
    full = model.weight.full_tensor().detach().requires_grad_(True)
    for name, loss_of in LOSSES.items():
        for one in (model(torch.ones(2, 3)), nn.functional.linear(torch.ones(2, 3), full)):
            one.square().sum().backward()
        loss, expected = loss_of(model.weight), loss_of(full)
        loss.backward()
        expected.backward()
        rows = model.weight.grad
        error = 0.0 if rows is None else held_error(rows, full.grad)
        found[name] = abs(loss.full_tensor().item() - expected.item()), error
        model.zero_grad()
        full.grad = None
    return bool(model.weight.to_local().numel()), found


@pytest.mark.parametrize(("granularity", "num_holders"), [("row", 2), ("tensor", 1)])
def test_a_loss_of_a_sharded_parameter_and_its_gradient_are_those_of_the_whole(
    pools: RankPools, granularity: str, num_holders: int
) -> None:
    ranks = pools(2).run(errors_of_losses, granularity, timeout_s=30)
    assert sum(holds for holds, _ in ranks) == num_holders
    for _, found in ranks:
        assert found.keys() == LOSSES.keys()
        assert all(max(errors) < 1e-5 for errors in found.values()), found


REJECTED: dict[str, Callable[[Any], Any]] = {
    "mse_loss": lambda p: nn.functional.mse_loss(p, torch.zeros_like(p)),
    "l1_loss": lambda p: nn.functional.l1_loss(p, torch.zeros_like(p)),
    "cumsum": lambda p: p.cumsum(0),
    "std": lambda p: torch.std(p),
}


def messages_of_rejected() -> dict[str, str]:
    """What is said of functions that DTensor computes as if shards were even."""
    weight = wrap(nn.Linear(3, 5, bias=False), []).weight.detach()
    found = {}
    for name, function in REJECTED.items():
        with pytest.raises(RuntimeError) as error:
            function(weight)
        found[name] = str(error.value)
    return found


def test_a_function_that_would_be_wrong_for_uneven_shards_is_rejected(pools: RankPools) -> None:
    for found in pools(2).run(messages_of_rejected):
        for name, message in found.items():
            assert f"{name} of a sharded tensor of shape (5, 3) would be wrong" in message


def even_shards() -> float:
    """Error of such a function where shards are even."""
    weight = wrap(nn.Linear(8, 4, bias=False), []).weight.detach()
    loss = nn.functional.mse_loss(weight, torch.zeros_like(weight)).full_tensor()
    return abs(loss.item() - weight.full_tensor().square().mean().item())


def test_it_is_torchs_own_where_shards_are_even(pools: RankPools) -> None:
    assert max(pools(2).run(even_shards)) < 1e-6
