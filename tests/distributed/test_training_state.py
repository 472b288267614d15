"""A training goes on where it was: schedulers, state dicts, torch's distributed checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.utils.checkpoint import checkpoint

from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    fp64_pair,
    held_error,
    train_both,
    weight_error,
    wrap,
)
from tests.ranks import RankPool, RankPools
from tests.reference.models import Block, Stack

RANKS = 3
EXACT = 1e-12
"""Tolerance in fp64: far above its rounding, far below any mistake."""


# -- schedulers and state -------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: optim.lr_scheduler.StepLR(o, 2, gamma=0.5),
    "CosineAnnealingLR": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "LambdaLR": lambda o: optim.lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
}


def scheduler_errors() -> dict[str, tuple[float, bool, int]]:
    """By scheduler: error of the weights, whether rates are equal, how many rates there were."""
    found = {}
    for name, make in SCHEDULERS.items():
        plain, sharded = fp64_pair()
        pair = [optim.SGD(m.parameters(), lr=0.02, momentum=0.9) for m in (plain, sharded)]
        schedulers = [make(optimizer) for optimizer in pair]
        rates: list[list[float]] = [[], []]

        def advance(schedulers: list[Any] = schedulers, rates: list[list[float]] = rates) -> None:
            for scheduler, seen in zip(schedulers, rates, strict=True):
                scheduler.step()
                seen.extend(scheduler.get_last_lr())

        train_both(plain, sharded, (pair[0], pair[1]), range(5), advance)
        found[name] = (weight_error(sharded, plain), rates[0] == rates[1], len(set(rates[1])))
    return found


def test_learning_rate_schedulers_work(pools: RankPools) -> None:
    for found in pools(RANKS).run(scheduler_errors):
        assert found.keys() == SCHEDULERS.keys()
        for name, (error, equal, distinct) in found.items():
            assert error < EXACT, name
            assert equal, name
            assert distinct > 1, name


def _interrupted(strategy: str, hand_over: Callable[[Any, Any, Any, Any], None]) -> float:
    """Error of a training that goes on in a fresh model and optimizer after two steps of four."""
    plain, first = fp64_pair(strategy)

    def adamw(model: Any) -> Any:
        return optim.AdamW(model.parameters(), lr=0.01)

    reference, optimizer = adamw(plain), adamw(first)
    train_both(plain, first, (reference, optimizer), range(2))
    fresh = Stack().double()
    for param in fresh.parameters():
        nn.init.constant_(param, 0.1)
    wrap(fresh, sharding_strategy=strategy)
    resumed = adamw(fresh)
    hand_over(first, optimizer, fresh, resumed)
    train_both(plain, fresh, (reference, resumed), range(2, 4))
    return weight_error(fresh, plain)


def _through_state_dicts(model: Any, optimizer: Any, fresh: Any, resumed: Any) -> None:
    fresh.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def through_state_dicts() -> dict[str, float]:
    """Error after `state_dict()` and `load_state_dict()`, by strategy."""
    return {strategy: _interrupted(strategy, _through_state_dicts) for strategy in STRATEGIES}


def test_a_training_goes_on_through_state_dicts(pools: RankPools) -> None:
    for found in pools(RANKS).run(through_state_dicts):
        for strategy, error in found.items():
            assert error < EXACT, strategy


def through_a_checkpoint(folder: str) -> dict[str, float]:
    """Error after torch's distributed checkpoint of model and optimizer, by strategy."""

    def errors_at(strategy: str) -> float:
        def hand_over(model: Any, optimizer: Any, fresh: Any, resumed: Any) -> None:
            path = f"{folder}/{strategy}"
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
            weights, state = get_state_dict(fresh, resumed)
            loaded = {"model": weights, "optimizer": state}
            dcp.load(loaded, checkpoint_id=path)
            set_state_dict(
                fresh,
                resumed,
                model_state_dict=loaded["model"],
                optim_state_dict=loaded["optimizer"],
            )

        return _interrupted(strategy, hand_over)

    return {strategy: errors_at(strategy) for strategy in ("optim_grads_params", "optim")}


def test_a_training_goes_on_through_torchs_distributed_checkpoint(
    pools: RankPools, tmp_path: Path
) -> None:
    for found in pools(RANKS).run(through_a_checkpoint, str(tmp_path)):
        for strategy, error in found.items():
            assert error < EXACT, strategy


FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def full_weights(from_rank_0: bool) -> tuple[bool, bool, float]:
    """Whether all are plain, whether all are right, and error after loading them afresh."""
    plain, model = fp64_pair()
    weights = get_model_state_dict(model, options=FULL)
    are_plain = all(type(value) is torch.Tensor for value in weights.values())
    right = all(torch.equal(weights[n], value) for n, value in plain.state_dict().items())
    fresh = wrap(Stack().double())
    for param in fresh.parameters():
        nn.init.constant_(param, 0.1)
    given = {} if from_rank_0 and dist.get_rank() > 0 else weights
    set_model_state_dict(fresh, given, options=FROM_RANK_0 if from_rank_0 else FULL)
    return are_plain, right, weight_error(fresh, plain)


def full_weights_of_every_rank() -> tuple[bool, bool, float]:
    """`full_weights`, given on every rank."""
    return full_weights(False)


def full_weights_of_rank_0() -> tuple[bool, bool, float]:
    """`full_weights`, given on rank 0 and spread from there."""
    return full_weights(True)


@pytest.mark.parametrize("load", [full_weights_of_every_rank, full_weights_of_rank_0])
def test_weights_are_gathered_in_full_and_loaded_from_full_ones(load: Any) -> None:
    pool = RankPool(2)
    try:
        for are_plain, right, error in pool.run(load, timeout_s=15):
            assert are_plain
            assert right
            assert error == 0.0
    finally:
        pool.close()


def small_weights_of_rank_0() -> float:
    """Error of a layer whose two-row bias one rank holds alone, spread from rank 0."""
    torch.manual_seed(0)
    layer: Any = nn.Linear(5, 2)
    full = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    for param in layer.parameters():
        nn.init.zeros_(param)
    wrap(layer, units=())
    given = dict(full) if dist.get_rank() == 0 else {}
    set_model_state_dict(layer, given, options=FROM_RANK_0)
    return max(held_error(param, full[name]) for name, param in layer.named_parameters())


def test_weights_spread_from_rank_0_are_not_wrong_in_silence(pools: RankPools) -> None:
    assert pools(2).run(small_weights_of_rank_0) == [0.0, 0.0]


class SharedInRegion(Stack):
    """A recomputed region that runs a unit with a unit inside three times."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), Block())

    def _region(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.blocks[1](torch.tanh(self.blocks[0](x)))
        return self.blocks[2](x)

    def run_blocks(self, x: torch.Tensor) -> Any:
        return checkpoint(self._region, x, use_reentrant=self.reentrant)


class SharedByUnits(Stack):
    """One module object inside two units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up = self.blocks[0].up


def _error_of_a_step(build: Any, units: Any, reentrant: bool = False) -> float:
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    model = build()
    wrap(model, units(model))
    plain.reentrant = model.reentrant = reentrant
    size, rank = dist.get_world_size(), dist.get_rank()
    for _ in range(2):
        for other in range(size):
            (plain(batch(other)).square().mean() / size).backward()
        model(batch(rank)).square().mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(held_error(a.grad, b.grad) for a, b in pairs if a.grad is not None)


def error_of_shared_in_region(reentrant: bool) -> float:
    """Of gradients at ZeRO-3."""

    def units(model: Any) -> list[Any]:
        return [model.blocks[1][2], *model.blocks]

    return _error_of_a_step(SharedInRegion, units, reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_no_unit_is_dropped_while_it_is_recomputed_again(pools: RankPools, reentrant: bool) -> None:
    assert max(pools(2).run(error_of_shared_in_region, reentrant)) < 1e-6


def error_of_shared_by_units() -> float:
    """Of gradients at ZeRO-3."""
    return _error_of_a_step(SharedByUnits, lambda model: list(model.blocks))


def test_a_module_inside_two_units_is_tied_between_them(pools: RankPools) -> None:
    assert max(pools(2).run(error_of_shared_by_units)) < 1e-6
