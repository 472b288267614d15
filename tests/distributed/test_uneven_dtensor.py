"""Uneven DTensors answer for all ranks' rows, and hand that on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.dtensor.row_shards import RowShards
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    gradient_error,
    mesh_of,
    of_all_ranks,
    pair,
    said,
    wrap,
)


def _uneven(full: torch.Tensor, ranges: tuple[tuple[int, int], ...]) -> UnevenDTensor:
    start, end = ranges[dist.get_rank()]
    return UnevenDTensor.from_rows(
        full[start:end].clone(),
        mesh_of(dist.get_world_size()),
        RowShards(ranges, (1,)),
        tuple(full.shape),
    )


@on_ranks(3)
def test_rows_are_gathered_and_handed_on_also_from_empty_shards() -> None:
    full = torch.arange(20.0).view(5, 4)
    param = torch.nn.Parameter(_uneven(full, ((0, 0), (0, 4), (4, 5))))
    other = _uneven(full * 3, ((0, 2), (2, 3), (3, 5)))
    norm = float(torch.linalg.vector_norm(param.detach()).full_tensor())
    assert type(param) is UnevenDTensor
    assert torch.equal(param.full_tensor(), full)
    assert torch.equal((param.detach() * 2).full_tensor(), full * 2)
    assert torch.equal(torch.zeros_like(param).full_tensor(), torch.zeros(5, 4))
    assert norm == pytest.approx(float(full.norm()), rel=1e-6)
    for source, copied in ((full + 1, full + 1), (other, full * 3)):
        with torch.no_grad():
            param.copy_(source)
        assert torch.equal(param.full_tensor(), copied)
    assert "sharded differently" in said(ValueError, lambda: param.detach() + other)


# -- sums and means outside of a forward, such as regularization losses ---------------------------

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


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("granularity", "num_holders"), [("row", 2), ("tensor", 1)])
@on_ranks(2, timeout_s=30)
def test_a_loss_of_a_sharded_parameter_and_its_gradient_are_those_of_the_whole(
    granularity: str, num_holders: int, name: str
) -> None:
    options = {"shard_granularity": granularity}
    plain, model = pair(lambda: nn.Linear(3, 5, bias=False), **options)
    losses = []
    for either in (plain, model):
        either(torch.ones(2, 3)).square().sum().backward()
        losses.append(LOSSES[name](either.weight))
        losses[-1].backward()
    expected, found = losses[0], losses[1].full_tensor()
    assert sum(of_all_ranks(bool(model.weight.to_local().numel()))) == num_holders
    assert abs(found.item() - expected.item()) < 1e-5
    assert gradient_error(model, plain) < 1e-5


REJECTED: dict[str, Callable[[Any], Any]] = {
    "mse_loss": lambda p: nn.functional.mse_loss(p, torch.zeros_like(p)),
    "l1_loss": lambda p: nn.functional.l1_loss(p, torch.zeros_like(p)),
    "cumsum": lambda p: p.cumsum(0),
    "std": lambda p: torch.std(p),
}


@on_ranks(2, name=REJECTED)
def test_a_function_that_would_be_wrong_for_uneven_shards_is_rejected(name: str) -> None:
    weight = wrap(nn.Linear(3, 5, bias=False)).weight.detach()
    text = said(RuntimeError, lambda: REJECTED[name](weight))
    assert f"{name} of a sharded tensor of shape (5, 3) would be wrong" in text


@on_ranks(2)
def test_it_is_torchs_own_where_shards_are_even() -> None:
    weight = wrap(nn.Linear(8, 4, bias=False)).weight.detach()
    loss = nn.functional.mse_loss(weight, torch.zeros_like(weight)).full_tensor()
    assert abs(loss.item() - weight.full_tensor().square().mean().item()) < 1e-6
