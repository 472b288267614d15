"""Ranks that shard or run different things: found and named, or made no difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.wrapping import said, wrap
from tests.ranks import RankPools
from tests.reference.models import Skipping, Stack


def different_units() -> dict[str, str]:
    """What each difference in wrapping leads to at the first forward."""
    rank, x = dist.get_rank(), torch.ones(2, 5)
    found = {}
    torch.manual_seed(0)
    model = Stack()
    model = wrap(model, list(model.blocks)[: 2 + rank])
    found["units"] = said(RuntimeError, lambda: model(x))
    torch.manual_seed(0)
    model = Stack()
    granularity = "row" if rank else "tensor"
    model = wrap(model, list(model.blocks), shard_granularity=granularity)
    found["options"] = said(RuntimeError, lambda: model(x))
    torch.manual_seed(rank)
    model = Stack()
    model = wrap(model, list(model.blocks), sharding_strategy="no_shard")
    found["weights"] = said(RuntimeError, lambda: model(x))
    torch.manual_seed(rank)
    model = Stack()
    model = wrap(model, list(model.blocks), sharding_strategy="no_shard", check_ranks="never")
    found["never"] = said(RuntimeError, lambda: model(x))
    return found


def test_ranks_that_shard_different_things_say_so_at_the_first_use(pools: RankPools) -> None:
    for found in pools(2).run(different_units):
        assert "ranks differ" in found["units"]
        assert "blocks.2" in found["units"]
        assert "ranks differ at unit" in found["options"]
        assert "copies of one weight must start equal" in found["weights"]
        assert "ranks differ at unit" in found["weights"]
        assert found["never"] == "no error"


def first_use_traffic() -> tuple[int, int]:
    """Collectives of the comparison at the first forward, and at the second."""
    torch.manual_seed(0)
    model = Stack()
    model = wrap(model, list(model.blocks), sharding_strategy="no_shard")
    counts = []
    for _ in range(2):
        with torch.profiler.profile() as profile:
            model(torch.ones(2, 5))
        names = [event.name for event in profile.events()]
        counts.append(sum(name == "gloo:all_gather" for name in names))
    return counts[0], counts[1]


def test_the_comparison_is_one_small_collective_once(pools: RankPools) -> None:
    assert set(pools(2).run(first_use_traffic)) == {(1, 0)}


def skipped_on_one_rank() -> str:
    """At ZeRO-3, with the check on, rank 1 leaves out a unit."""
    torch.manual_seed(0)
    model = Skipping()
    model = wrap(model, list(model.blocks), check_ranks="always")
    model.skip = 1 if dist.get_rank() == 1 else None
    return said(RuntimeError, lambda: model(torch.ones(2, 5)))


def test_a_unit_skipped_on_one_rank_at_zero_3_is_named(pools: RankPools) -> None:
    first, second = pools(2).run(skipped_on_one_rank)
    assert first.startswith(
        "rank 0 is about to gather blocks.1 (Block) where rank 1 is about to gather blocks.2"
    )
    assert second.startswith("rank 1 is about to gather blocks.2 (Block) where rank 0 is about to")
    assert "must run on every rank" in first


def _losses(model: Any, num_evaluations: int = 0) -> list[float]:
    """Losses of three steps, with evaluations after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(num_evaluations):
            with torch.no_grad():
                model(torch.ones(3, 5))
        losses.append(float(loss))
    return losses


def steps_with_checks(strategy: str) -> list[float]:
    """Losses with the check before every collective."""
    torch.manual_seed(0)
    model = Stack()
    model = wrap(model, list(model.blocks), sharding_strategy=strategy, check_ranks="always")
    return _losses(model)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads", "optim_grads_params"])
def test_the_check_before_every_collective_passes_where_ranks_agree(
    pools: RankPools, strategy: str
) -> None:
    for losses in pools(2).run(steps_with_checks, strategy):
        assert losses[0] > losses[1] > losses[2]


def unused_everywhere(strategy: str) -> tuple[list[bool], list[bool]]:
    """Which gradients exist where a block was left out on all ranks, and where on one."""
    torch.manual_seed(0)
    model = Skipping()
    model = wrap(model, list(model.blocks), sharding_strategy=strategy)
    found = []
    for skips in (True, dist.get_rank() == 0):
        model.zero_grad()
        model.skip = 1 if skips else None
        model(torch.ones(2, 5)).square().mean().backward()
        block = model.blocks[1]
        found.append([p.grad is not None for p in block.parameters() if p.to_local().numel()])
    return found[0], found[1]


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_a_unit_left_out_everywhere_has_no_gradient_and_one_left_out_somewhere_has(
    pools: RankPools, strategy: str
) -> None:
    for nowhere, somewhere in pools(2).run(unused_everywhere, strategy):
        assert nowhere
        assert not any(nowhere)
        assert all(somewhere)


def evaluations_of_one_rank(strategy: str) -> list[float]:
    """Rank 1 evaluates three times as often as rank 0 in every step."""
    torch.manual_seed(0)
    model = Stack()
    model = wrap(model, list(model.blocks), sharding_strategy=strategy)
    return _losses(model, num_evaluations=1 + 2 * dist.get_rank())


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_unequal_numbers_of_evaluations_need_no_partner_below_zero_3(
    pools: RankPools, strategy: str
) -> None:
    first, second = pools(2).run(evaluations_of_one_rank, strategy)
    assert first == second
    assert first[0] > first[2]
