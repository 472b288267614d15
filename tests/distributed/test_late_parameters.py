"""Parameters and modules that are registered, or assigned, after the root was sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint import snapshot
from megatron_fsdp_v2.optim import flat_optimizer
from tests.distributed.on_ranks import on_ranks
from tests.distributed.test_parameters import rebuild
from tests.distributed.wrapping import (
    STRATEGIES,
    backward_both,
    batch,
    error_message,
    gradient_error,
    own_loss,
    pair,
    step_all,
    train_both,
    weight_error,
    wrap,
)
from tests.reference.models import WIDTH, Stack


@on_ranks(2)
def test_parameters_added_after_sharding_may_be_frozen_or_reduced_by_the_program() -> None:
    model: Any = Stack()
    wrap(model, ignored_params=set(model.output.parameters()))
    own_loss(model)
    model.extra = nn.Linear(2, 2).requires_grad_(False)
    model.own = nn.Linear(2, 2)
    for param in model.own.parameters():
        param.requires_gradient_reduction = False
    model.output.bias = nn.Parameter(torch.zeros(3))
    rebuild(model.blocks[0])
    own_loss(model).backward()
    AdamW(model.parameters()).step()
    own_loss(model).backward()
    model.extra.requires_grad_(True)
    with torch.no_grad():
        own_loss(model)
    text = error_message(RuntimeError, lambda: own_loss(model))
    assert "parameter extra.weight was registered after fully_shard" in text


def _rebuild_optimizer(model: Any, optimizer: AdamW) -> None:
    del optimizer
    AdamW(model.parameters()).step()


def _extend_optimizer(model: Any, optimizer: AdamW) -> None:
    optimizer.add_param_group({"params": list(model.extra.parameters())})
    optimizer.step()


def _load(model: Any, optimizer: AdamW) -> None:
    del optimizer
    model.load_state_dict({k: v for k, v in model.state_dict().items() if "extra" not in k}, False)


def _shard_a_part(model: Any, optimizer: AdamW) -> None:
    del optimizer
    model.extra.inside = wrap(nn.Linear(2, 2))


FINDS_LATE_PARAMETERS = {
    each.__name__: each for each in (_rebuild_optimizer, _extend_optimizer, _load, _shard_a_part)
}


@on_ranks(2, event=FINDS_LATE_PARAMETERS)
def test_a_trained_parameter_added_between_steps_is_found_in_the_step_after(event: str) -> None:
    model = wrap(Stack())
    optimizer = AdamW(model.parameters())
    for _ in range(2):
        own_loss(model).backward()
        step_all(optimizer)
    own_loss(model).backward()
    model.extra = nn.Linear(2, 2)
    FINDS_LATE_PARAMETERS[event](model, optimizer)
    errors = [error_message(RuntimeError, lambda: own_loss(model)) for _ in range(2)]
    model.extra.requires_grad_(False)
    own_loss(model).backward()
    assert all("parameter extra.weight was registered after" in error for error in errors)


NAMED_MODULES = nn.Module.named_modules
OPTIMIZERS_OF_STEADY_STEPS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": AdamW,
    "fused": partial(AdamW, fused=True),
    "flat": flat_optimizer(AdamW),
}


@on_ranks(2, build=OPTIMIZERS_OF_STEADY_STEPS)
def test_a_steady_step_searches_no_modules(build: str) -> None:
    model = wrap(Stack())
    optimizer = OPTIMIZERS_OF_STEADY_STEPS[build](model.parameters())
    searches = []
    for step in range(4):
        with mock.patch.object(nn.Module, "named_modules", autospec=True) as named:
            named.side_effect = NAMED_MODULES
            model(batch(dist.get_rank(), step)).square().mean().backward()
            step_all(optimizer)
        searches.append(named.call_count)
    assert searches[2:] == [0, 0]
    assert min(searches[:2]) > 0


@on_ranks(2, strategy=STRATEGIES, was_unit=[False, True], was_used=[False, True])
def test_a_module_sharded_by_itself_in_the_place_of_another_trains(
    strategy: str, was_unit: bool, was_used: bool
) -> None:
    options: Any = {"sharding_strategy": strategy}
    units = (lambda model: [*model.blocks, model.output]) if was_unit else None
    plain, model = pair(units=units, **options)
    if was_used:
        backward_both(plain, model)
    for each in (plain, model):
        torch.manual_seed(1)
        each.output = nn.Linear(WIDTH, 3)
    wrap(model.output, [], **options)
    optimizers = tuple(AdamW(each.parameters(), lr=0.1) for each in (plain, model))
    train_both(plain, model, optimizers, range(3))
    assert weight_error(model, plain) < 1e-5


# What frees the weights of a unit between two steps, and may not lose what was assigned to it.
FREES: dict[str, Callable[[Any, Any, Path], Any]] = {
    "a use of a parameter itself": lambda model, params, folder: params[-1].full_tensor(),
    "reshard": lambda model, params, folder: model.blocks[0].reshard(),
    "state_dict": lambda model, params, folder: model.state_dict(),
    "a saved checkpoint": lambda model, params, folder: checkpoint.save(folder, model),
    "a snapshot": lambda model, params, folder: snapshot(model),
    "conversion": lambda model, params, folder: model.to("cpu"),
    "a forward": lambda model, params, folder: model(batch(0)),
    "a rebuild": lambda model, params, folder: model.rebuild(),
}


@on_ranks(2, strategy=STRATEGIES, freed_by=FREES)
def test_parameters_assigned_to_gathered_units_are_kept(
    strategy: str, freed_by: str, tmp_path: Path
) -> None:
    model = wrap(Stack(), sharding_strategy=strategy)
    params = list(model.parameters())
    model.set_reshard_after_backward(False)
    own_loss(model).backward()
    torch.optim.SGD(params, lr=0.05).step()
    norm = model.blocks[0].norm
    norm.weight = nn.Parameter(torch.full_like(norm.weight, 0.5))
    FREES[freed_by](model, params, tmp_path / "saved")
    if freed_by == "a saved checkpoint":
        model = wrap(Stack(), sharding_strategy=strategy)
        checkpoint.load(tmp_path / "saved", model)
    model(batch(0))  # What was assigned is adopted here at the latest.
    assert (model.state_dict()["blocks.0.norm.weight"].full_tensor() == 0.5).all()


@on_ranks(2, strategy=STRATEGIES)
def test_parameter_assigned_between_a_forward_and_its_backward_is_kept(strategy: str) -> None:
    plain, model = pair(sharding_strategy=strategy)
    optimizers = [AdamW(each.parameters()) for each in (plain, model)]
    loss = own_loss(model)
    down = model.blocks[0].down
    down.weight = nn.Parameter(torch.full(down.weight.shape, 0.25))
    loss.backward()
    model.zero_grad()
    with torch.no_grad():
        plain.blocks[0].down.weight.fill_(0.25)
    train_both(plain, model, optimizers, range(2))
    assert weight_error(model, plain) < 1e-6


@on_ranks(2, strategy=STRATEGIES[::3])
def test_rebuild_keeps_what_was_frozen_while_it_was_gathered(strategy: str) -> None:
    model = wrap(Stack(), sharding_strategy=strategy)
    model.blocks[0].unshard()
    model.blocks[0].requires_grad_(False)
    assert model.rebuild()
    assert not any(param.requires_grad for param in model.blocks[0].parameters())


@on_ranks(2, strategy=STRATEGIES)
def test_zero_grad_discards_gradients_assigned_to_gathered_parameters(strategy: str) -> None:
    plain, model = pair(sharding_strategy=strategy)
    model.blocks[0].unshard()
    for param in model.blocks[0].parameters():
        param.grad = torch.ones_like(param)
    model.blocks[0].reshard()
    model.zero_grad()
    backward_both(plain, model)
    assert gradient_error(model, plain) < 1e-6
