"""An exception at any call of this package in a step: training goes on as if it had not begun."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim

import megatron_fsdp_v2
from megatron_fsdp_v2 import RuntimeOptions
from megatron_fsdp_v2.params.gradients import GroupGrads
from tests.cases import quick_strategies
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    on_mesh,
    own_loss,
    pair,
    plain_loss,
    strategies_on,
    train_both,
    weight_error,
)
from tests.reference.models import Checkpointed, Stack

PACKAGE = str(Path(megatron_fsdp_v2.__file__).parent)
COMM = f"{PACKAGE}/comm/"
EXACT = 1e-12
CALLS = 1300
"""About the number of calls of this package in a step of the models here."""


@contextlib.contextmanager
def interrupting(number: int, error: type[BaseException]) -> Iterator[None]:
    """Raise an error at the call of this package with this number, if there are as many.

    Not between the issue of a collective and the wait for it: gloo would write to freed memory.
    """
    left = number

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE) and not path.startswith(COMM):
            left -= 1
            if not left:
                sys.setprofile(None)
                raise error("planned")

    threading.setprofile_all_threads(count)
    try:
        yield
    except (KeyboardInterrupt, RuntimeError) as raised:
        # Errors of collectives have another type, and name the unit.
        assert "planned" in str(raised)
    finally:
        threading.setprofile_all_threads(None)  # type: ignore[arg-type]


def _build(chance: random.Random) -> Any:
    use_reentrant = chance.choice([None, False, True])
    if use_reentrant is None:
        return Stack().double()
    return Checkpointed(use_reentrant=use_reentrant).double()


def _check(strategy: str, number: int, error: type[BaseException]) -> None:
    """Interrupt a step, and train on; all ranks are interrupted at the same call."""
    chance = random.Random(number)
    state = chance.getstate()

    def build() -> Any:
        chance.setstate(state)
        return _build(chance)

    options = RuntimeOptions(
        enable_trace_pool=chance.random() < 0.3,
        enable_async_reduce_grad=chance.random() < 0.7,
        unshard_prefetch_depth=chance.choice([None, 1, 2]),
    )
    kept = chance.random() < 0.3
    plain, model = pair(
        build, sharding_strategy=strategy, options=options, reshard_after_forward=not kept
    )
    optimizers = optim.AdamW(plain.parameters()), optim.AdamW(model.parameters())
    train_both(plain, model, optimizers, range(2))
    if chance.random() < 0.3:
        with model.no_sync():
            own_loss(model, 7).backward()
    with interrupting(number, error):
        own_loss(model, 8).backward()
    # A checkpoint of torch that raised pops its hooks on saved tensors when it is deleted.
    gc.collect()
    if chance.random() < 0.5:
        with torch.no_grad():
            output = own_loss(model)
        assert torch.isfinite(output)
    model.zero_grad()
    train_both(plain, model, optimizers, range(2, 4))
    assert weight_error(model, plain) < EXACT, (strategy, number, options, kept)


@on_ranks(
    2, strategy=quick_strategies(STRATEGIES), error=[KeyboardInterrupt, torch.OutOfMemoryError]
)
def test_training_goes_on_after_an_exception_anywhere(
    strategy: str, error: type[BaseException]
) -> None:
    for number in range(1 + STRATEGIES.index(strategy), CALLS, 137):
        _check(strategy, number, error)


@pytest.mark.slow
@on_ranks(2, strategy=STRATEGIES, error=[KeyboardInterrupt, torch.OutOfMemoryError])
def test_training_goes_on_after_an_exception_at_more_places(
    strategy: str, error: type[BaseException]
) -> None:
    for number in range(7 + STRATEGIES.index(strategy), CALLS, 11):
        _check(strategy, number, error)


@on_ranks(2, strategy=STRATEGIES, error=[KeyboardInterrupt, torch.OutOfMemoryError])
def test_parameter_assigned_after_an_exception_is_used(
    strategy: str, error: type[BaseException]
) -> None:
    plain, model = pair(sharding_strategy=strategy)
    with interrupting(200, error):
        own_loss(model, 8).backward()
    for each in (plain, model):
        weight = torch.full_like(each.blocks[2].down.weight, 0.25)
        each.blocks[2].down.weight = nn.Parameter(weight)
    optimizers = optim.SGD(plain.parameters(), lr=0.1), optim.SGD(model.parameters(), lr=0.1)
    train_both(plain, model, optimizers, range(2))
    assert weight_error(model, plain) < 1e-6


def _fail(self: GroupGrads) -> None:
    raise torch.OutOfMemoryError("planned")


# The gradient stayed on the gathered parameter, and the next backward added to it.
@on_ranks(2, strategy=STRATEGIES)
def test_gradient_that_could_not_be_collected_is_not_part_of_the_next_one(strategy: str) -> None:
    plain, model = pair(sharding_strategy=strategy)
    optimizers = optim.SGD(plain.parameters(), lr=0.1), optim.SGD(model.parameters(), lr=0.1)
    loss = own_loss(model, 7)
    with (
        mock.patch.object(GroupGrads, "begin", _fail),
        pytest.raises(torch.OutOfMemoryError),
    ):
        loss.backward()
    with torch.no_grad():
        own_loss(model)
    model.zero_grad()
    train_both(plain, model, optimizers, range(1))
    assert weight_error(model, plain) < 1e-6


# As with an unsharded model: these gradients are not in `param.grad` yet.
@on_ranks("mesh", mesh=["2", "HSDP 2x2", "HFSDP 2x2"], strategy=STRATEGIES)
def test_zero_grad_discards_gradients_that_are_not_synchronized(mesh: str, strategy: str) -> None:
    if strategy not in strategies_on(mesh):
        return  # `no_shard` excludes sharding along the outer axis.
    plain, model = pair(sharding_strategy=strategy, **on_mesh(mesh))
    with model.no_sync():
        own_loss(model, 7).backward()
        model.zero_grad()
        own_loss(model, 1).backward()
    own_loss(model, 2).backward()
    for step in (1, 2):
        plain_loss(plain, step).backward()
    for each in (plain, model):
        optim.SGD(each.parameters(), lr=0.1).step()
    assert weight_error(model, plain) < 1e-6


@on_ranks(2)
def test_zero_grad_of_a_unit_discards_its_own_gradients_alone() -> None:
    plain, model = pair(sharding_strategy="optim")
    with model.no_sync():
        own_loss(model, 7).backward()
    block: nn.Module = model.blocks[1]
    block.zero_grad()
    model.reduce_grad()
    plain_loss(plain, 7).backward()
    plain.blocks[1].zero_grad()
    for each in (plain, model):
        optim.SGD(each.parameters(), lr=0.1).step()
    assert weight_error(model, plain) < 1e-6
