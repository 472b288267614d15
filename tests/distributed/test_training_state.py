"""A training goes on where it was: schedulers, state dicts, torch's distributed checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.utils.checkpoint import checkpoint

from tests.distributed.checkpoint_trainings import torch_loads, torch_saves
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    backward_both,
    fp64_pair,
    gradient_error,
    held_error,
    pair,
    train_both,
    weight_error,
    wrap,
)
from tests.ranks import RankPool
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


@on_ranks(RANKS, name=SCHEDULERS)
def test_learning_rate_schedulers_work(name: str) -> None:
    plain, sharded = fp64_pair()
    first, second = (optim.SGD(m.parameters(), lr=0.02, momentum=0.9) for m in (plain, sharded))
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (first, second)]
    rates: list[list[float]] = [[], []]

    def advance() -> None:
        for scheduler, seen in zip(schedulers, rates, strict=True):
            scheduler.step()
            seen.extend(scheduler.get_last_lr())

    train_both(plain, sharded, (first, second), range(5), advance)
    assert weight_error(sharded, plain) < EXACT
    assert rates[0] == rates[1]
    assert len(set(rates[1])) > 1


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


@on_ranks(RANKS, strategy=STRATEGIES)
def test_a_training_goes_on_through_state_dicts(strategy: str) -> None:
    def hand_over(model: Any, optimizer: Any, fresh: Any, resumed: Any) -> None:
        fresh.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    assert _interrupted(strategy, hand_over) < EXACT


@on_ranks(RANKS, strategy=["optim_grads_params", "optim"])
def test_a_training_goes_on_through_torchs_distributed_checkpoint(
    tmp_path: Path, strategy: str
) -> None:
    def hand_over(model: Any, optimizer: Any, fresh: Any, resumed: Any) -> None:
        torch_saves(str(tmp_path), model, optimizer)
        torch_loads(str(tmp_path), fresh, resumed)

    assert _interrupted(strategy, hand_over) < EXACT


FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def full_weights(from_rank_0: bool) -> tuple[bool, bool, float]:
    """Whether all are plain, whether all are right, and error after loading them afresh.

    They are given on rank 0 and spread from there, or on every rank.
    """
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


@pytest.mark.parametrize("from_rank_0", [False, True], ids=["every rank", "rank 0"])
def test_weights_are_gathered_in_full_and_loaded_from_full_ones(from_rank_0: bool) -> None:
    pool = RankPool(2)
    try:
        for are_plain, right, error in pool.run(full_weights, from_rank_0, timeout_s=15):
            assert are_plain
            assert right
            assert error == 0.0
    finally:
        pool.close()


@on_ranks(2)
def test_weights_spread_from_rank_0_are_not_wrong_in_silence() -> None:
    torch.manual_seed(0)
    layer: Any = nn.Linear(5, 2)
    full = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    for param in layer.parameters():
        nn.init.zeros_(param)
    wrap(layer, units=())
    given = dict(full) if dist.get_rank() == 0 else {}
    set_model_state_dict(layer, given, options=FROM_RANK_0)
    assert max(held_error(param, full[name]) for name, param in layer.named_parameters()) == 0.0


class SharedInRegion(Stack):
    """A recomputed region that runs a unit with a unit inside three times."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
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


def _error_of_steps(build: Any, units: Any = None) -> float:
    """Of gradients at ZeRO-3, after two backwards."""
    plain, model = pair(build, units)
    for _ in range(2):
        backward_both(plain, model)
    return gradient_error(model, plain)


@on_ranks(2, reentrant=[False, True])
def test_no_unit_is_dropped_while_it_is_recomputed_again(reentrant: bool) -> None:
    def units(model: Any) -> list[Any]:
        return [model.blocks[1][2], *model.blocks]

    assert _error_of_steps(lambda: SharedInRegion(reentrant), units) < 1e-6


@on_ranks(2)
def test_a_module_inside_two_units_is_tied_between_them() -> None:
    assert _error_of_steps(SharedByUnits) < 1e-6
