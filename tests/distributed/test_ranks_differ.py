"""Ranks that shard or run different things: found and named, or made no difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from tests.distributed.wrapping import batch, held_error, said, weight_error, wrap
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
        assert "copies of one weight must be identical across ranks" in found["weights"]
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


class Uneven(Stack):
    """Every block runs as often as `times` says, on this rank."""

    times: tuple[int, ...] = (1, 1, 1)

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block, times in zip(self.blocks, self.times, strict=True):
            for _ in range(times):
                x = block(x)
        return x


# How often each rank runs each of three blocks; more ranks begin again.
TIMES = ((0, 2, 1), (1, 1, 3), (2, 0, 0))


def _backward(model: Any, backwards: str, rank: int, factor: float) -> None:
    """One step's backwards: of a loss, of a kept graph once more, or of two forwards at once."""
    model.times = TIMES[rank % len(TIMES)]
    losses = [model(batch(rank, step)).square().mean() * factor for step in range(2)]
    if backwards == "together":
        torch.stack(losses).sum().backward()
    elif backwards == "in turn":
        losses[0].backward()
        losses[1].backward()
    else:
        losses[0].backward(retain_graph=True)
        losses[0].backward()


def error_of_uneven_use(strategy: str, backwards: str, check_ranks: str) -> float:
    """Largest difference of weights to an unsharded model after two steps."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    plain = Uneven()
    torch.manual_seed(0)
    model = Uneven()
    model = wrap(model, list(model.blocks), sharding_strategy=strategy, check_ranks=check_ranks)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, model)]
    for _ in range(2):
        for rank in range(size):
            _backward(plain, backwards, rank, 1 / size)
        _backward(model, backwards, dist.get_rank(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return weight_error(model, plain)


@pytest.mark.parametrize("backwards", ["kept", "in turn", "together"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_units_that_ranks_run_a_different_number_of_times_train_like_one_process(
    pools: RankPools, strategy: str, backwards: str
) -> None:
    checks = "always" if backwards == "kept" else "once"
    assert max(pools(3).run(error_of_uneven_use, strategy, backwards, checks)) < 1e-6


def error_of_unfreezing(strategy: str) -> float:
    """A block that was frozen when it was sharded is trained, and rank 1 leaves it out at first."""
    size, rank = dist.get_world_size(), dist.get_rank()
    pair: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Skipping()
        model.blocks[1].requires_grad_(False)
        pair.append(model)
    plain, model = pair[0], wrap(pair[1], list(pair[1].blocks), sharding_strategy=strategy)
    for both in (plain, model):
        both.blocks[1].requires_grad_(True)
    for step in range(2):
        for other in range(size):
            plain.skip = 1 if other == 1 and step == 0 else None
            (plain(batch(other, step)).square().mean() / size).backward()
        model.skip = 1 if rank == 1 and step == 0 else None
        model(batch(rank, step)).square().mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(held_error(a.grad, b.grad) for a, b in pairs if a.to_local().numel())


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_a_unit_that_is_trained_from_now_on_may_be_left_out_by_a_rank(
    pools: RankPools, strategy: str
) -> None:
    assert max(pools(2).run(error_of_unfreezing, strategy)) < 1e-6


class TiedOnSomeRanks(Stack):
    """The root computes with a block's weight too, where `uses` says so."""

    uses = True

    def __init__(self) -> None:
        super().__init__()
        self.tied = torch.nn.Linear(7, 15)
        self.tied.weight = self.blocks[1].up.weight

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        if self.uses:
            x = x + self.tied(x)[:, :7]
        return super().run_blocks(x)


def error_of_a_tie_used_here() -> float:
    """At ZeRO-3, rank 0 alone computes with a weight in a second place."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    plain = TiedOnSomeRanks()
    torch.manual_seed(0)
    model = TiedOnSomeRanks()
    model = wrap(model, list(model.blocks))
    for other in range(size):
        plain.uses = other == 0
        (plain(batch(other)).square().mean() / size).backward()
    model.uses = rank == 0
    model(batch(rank)).square().mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(held_error(a.grad, b.grad) for a, b in pairs if a.grad is not None)


def test_a_tied_weight_that_one_rank_uses_twice_is_reduced_once_at_zero_3(
    pools: RankPools,
) -> None:
    assert max(pools(2).run(error_of_a_tie_used_here)) < 1e-6


class BranchingRegion(Stack):
    """A unit that is one recomputed region; it ends with its inner unit, or on one rank not."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.blocks[0] = RegionWithBranch()


class RegionWithBranch(torch.nn.Module):
    """See `BranchingRegion`."""

    branches = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(7, 7)
        self.own = torch.nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(self.region, x, use_reentrant=False)

    def region(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(torch.tanh(x))
        return self.own(torch.tanh(x)) if self.branches else x


def error_of_a_branch_in_a_region() -> float:
    """At ZeRO-3, rank 1 alone has one more layer at the end of a recomputed region."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    plain = BranchingRegion()
    torch.manual_seed(0)
    model = BranchingRegion()
    model = wrap(model, [model.blocks[0].inner, model.blocks[0]])
    for other in range(size):
        plain.blocks[0].branches = other == 1
        (plain(batch(other)).square().mean() / size).backward()
    model.blocks[0].branches = rank == 1
    model(batch(rank)).square().mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(held_error(a.grad, b.grad) for a, b in pairs if a.grad is not None)


def test_an_output_handed_on_from_an_inner_unit_starts_the_outer_backward_first(
    pools: RankPools,
) -> None:
    assert max(pools(2).run(error_of_a_branch_in_a_region)) < 1e-6
