"""Ranks that shard or run different things: found and named, or made no difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    backward_both,
    gradient_error,
    loss_of,
    of_all_ranks,
    pair,
    said,
    step_all,
    weight_error,
    wrap,
)
from tests.reference.models import Skipping, Stack


@on_ranks(2)
def test_ranks_that_shard_different_things_say_so_at_the_first_use() -> None:
    rank, model = dist.get_rank(), Stack()

    def told(model: Any) -> str:
        return said(RuntimeError, lambda: model(torch.ones(2, 5)))

    fewer = told(wrap(model, list(model.blocks)[: 2 + rank]))
    options = told(wrap(Stack(), shard_granularity="row" if rank else "tensor"))
    torch.manual_seed(rank)
    weights = told(wrap(Stack(), sharding_strategy="no_shard"))
    torch.manual_seed(rank)
    never = told(wrap(Stack(), sharding_strategy="no_shard", check_ranks="never"))
    assert "ranks differ" in fewer and "blocks.2" in fewer
    assert "ranks differ at unit" in options
    assert "copies of one weight must be identical across ranks" in weights
    assert "ranks differ at unit" in weights
    assert never == "no error"


@on_ranks(2)
def test_the_comparison_is_one_small_collective_once() -> None:
    model = wrap(Stack(), sharding_strategy="no_shard")
    counts = []
    for _ in range(2):
        with torch.profiler.profile() as profile:
            model(torch.ones(2, 5))
        names = [event.name for event in profile.events()]
        counts.append(sum(name == "gloo:all_gather" for name in names))
    assert counts == [1, 0]


@on_ranks(2)
def test_a_unit_skipped_on_one_rank_at_zero_3_is_named() -> None:
    rank, model = dist.get_rank(), wrap(Skipping(), check_ranks="always")
    model.skip = 1 if rank == 1 else None
    text = said(RuntimeError, lambda: model(torch.ones(2, 5)))
    does = [
        f"rank {r} is about to gather {unit}" for r, unit in enumerate(("blocks.1", "blocks.2"))
    ]
    assert text.startswith(f"{does[rank]} (Block) where {does[1 - rank]}")
    assert "must run on every rank" in text


def _losses(model: Any, num_evaluations: int = 0) -> list[float]:
    """Losses of three steps, with evaluations after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 5)).square().mean()
        loss.backward()
        step_all(optimizer)
        for _ in range(num_evaluations):
            with torch.no_grad():
                model(torch.ones(3, 5))
        losses.append(float(loss))
    return losses


@on_ranks(2, strategy=["no_shard", "optim_grads", "optim_grads_params"])
def test_the_check_before_every_collective_passes_where_ranks_agree(strategy: str) -> None:
    losses = _losses(wrap(Stack(), sharding_strategy=strategy, check_ranks="always"))
    assert losses[0] > losses[1] > losses[2]


@on_ranks(2, strategy=["no_shard", "optim", "optim_grads"])
def test_a_unit_left_out_everywhere_has_no_gradient_and_one_left_out_somewhere_has(
    strategy: str,
) -> None:
    model = wrap(Skipping(), sharding_strategy=strategy)
    found = []
    for skips in (True, dist.get_rank() == 0):
        model.zero_grad()
        model.skip = 1 if skips else None
        model(torch.ones(2, 5)).square().mean().backward()
        block = model.blocks[1]
        found.append([p.grad is not None for p in block.parameters() if p.to_local().numel()])
    nowhere, somewhere = found
    assert nowhere
    assert not any(nowhere)
    assert all(somewhere)


@on_ranks(2, strategy=["no_shard", "optim", "optim_grads"])
def test_unequal_numbers_of_evaluations_need_no_partner_below_zero_3(strategy: str) -> None:
    losses = _losses(wrap(Stack(), sharding_strategy=strategy), 1 + 2 * dist.get_rank())
    assert of_all_ranks(losses) == [losses] * 2
    assert losses[0] > losses[2]


def _check_gradients(plain: Any, model: Any, arrange: Callable[..., None], steps: int = 1) -> None:
    """See that they are right where `arrange(model, rank, step)` has ranks run other things."""

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        arrange(model, rank, step)
        return loss_of(model, rank, step)

    for step in range(steps):
        backward_both(plain, model, step, loss)
    assert gradient_error(model, plain) < 1e-6


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
    first, second = (loss_of(model, rank, step) * factor for step in range(2))
    if backwards == "together":
        (first + second).backward()
    else:
        first.backward(retain_graph=backwards == "kept")
        (first if backwards == "kept" else second).backward()


@pytest.mark.parametrize("backwards", ["kept", "in turn", "together"])
@on_ranks(3, strategy=["no_shard", "optim", "optim_grads"])
def test_units_that_ranks_run_a_different_number_of_times_train_like_one_process(
    strategy: str, backwards: str
) -> None:
    checks = "always" if backwards == "kept" else "once"
    plain, model = pair(Uneven, sharding_strategy=strategy, check_ranks=checks)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, model)]
    for _ in range(2):
        for rank in range(3):
            _backward(plain, backwards, rank, 1 / 3)
        _backward(model, backwards, dist.get_rank(), 1.0)
        step_all(*optimizers)
    assert weight_error(model, plain) < 1e-6


def _frozen_in_part() -> Skipping:
    model = Skipping()
    model.blocks[1].requires_grad_(False)
    return model


@on_ranks(2, strategy=["no_shard", "optim", "optim_grads"])
def test_a_unit_that_is_trained_from_now_on_may_be_left_out_by_a_rank(strategy: str) -> None:
    """A block that was frozen when it was sharded is trained, and rank 1 leaves it out at first."""
    plain, model = pair(_frozen_in_part, sharding_strategy=strategy)
    for both in (plain, model):
        both.blocks[1].requires_grad_(True)

    def skip(model: Any, rank: int, step: int) -> None:
        model.skip = 1 if rank == 1 and step == 0 else None

    _check_gradients(plain, model, skip, steps=2)


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


@on_ranks(2)
def test_a_tied_weight_that_one_rank_uses_twice_is_reduced_once_at_zero_3() -> None:
    """At ZeRO-3, rank 0 alone computes with a weight in a second place."""
    plain, model = pair(TiedOnSomeRanks)
    _check_gradients(plain, model, lambda model, rank, _: setattr(model, "uses", rank == 0))


class RegionWithBranch(torch.nn.Module):
    """A unit that is one recomputed region; it ends with its inner unit, or on one rank not."""

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


@on_ranks(2)
def test_an_output_handed_on_from_an_inner_unit_starts_the_outer_backward_first() -> None:
    """At ZeRO-3, rank 1 alone has one more layer at the end of a recomputed region."""
    plain, model = pair(
        lambda: Stack(1, block=lambda _: RegionWithBranch()),
        lambda m: [m.blocks[0].inner, m.blocks[0]],
    )
    _check_gradients(
        plain, model, lambda model, rank, _: setattr(model.blocks[0], "branches", rank == 1)
    )


@on_ranks(2, strategy=["no_shard", "optim", "optim_grads"])
def test_a_gradient_that_waits_in_a_bucket_is_reduced_once(strategy: str) -> None:
    """Also where one rank has it and the other does not: both compare what they are about to do."""
    options = {"sharding_strategy": strategy, "check_ranks": "always", "bucket_bytes": 1 << 20}
    plain, model = pair(Skipping, **options)

    def skip(model: Any, rank: int, step: int) -> None:
        model.skip = 1 if rank == step else None

    _check_gradients(plain, model, skip, steps=2)
