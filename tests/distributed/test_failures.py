"""After an exception, or a forward whose backward never came, nothing stale is used or trained."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_v2 import checkpoint
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    fp64_pair,
    gradient_error,
    loss_of,
    own_loss,
    pair,
    plain_loss,
    said,
    step_all,
    train_both,
    weight_error,
)
from tests.reference.failing import PlannedFailure, fail, fail_when_it_comes_back, failing
from tests.reference.models import Skipping

EXACT = 1e-12


def _fail_in_forward(model: Any) -> None:
    with failing(model.blocks[1].register_forward_pre_hook(fail)):
        own_loss(model, 7)


def _fail_in_backward(model: Any, block: int = 1) -> None:
    with failing(model.blocks[block].register_forward_hook(fail_when_it_comes_back)):
        own_loss(model, 7).backward()


def _leave_a_forward(model: Any) -> None:
    own_loss(model, 7)


INTERRUPTIONS = {
    "exception in a forward": _fail_in_forward,
    "exception in a backward": _fail_in_backward,
    "forward without backward": _leave_a_forward,
}


def _adamw(*models: Any) -> list[Any]:
    return [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]


def _trained(strategy: str) -> tuple[Any, Any, list[Any]]:
    """A plain and a sharded model and their optimizers after two steps."""
    plain, model = fp64_pair(strategy)
    optimizers = _adamw(plain, model)
    train_both(plain, model, optimizers, range(2))
    return plain, model, optimizers


@pytest.mark.parametrize("options", [{}, {"enable_trace_pool": True}], ids=["", "pool"])
@on_ranks(2, strategy=STRATEGIES)
def test_the_backward_of_another_graph_after_a_failed_one_is_right(
    strategy: str, options: dict[str, Any]
) -> None:
    """Two graphs; the backward of one fails, the other's is right."""
    plain, model = fp64_pair(strategy, **options)
    handle = model.blocks[1].register_forward_hook(fail_when_it_comes_back)
    fails = own_loss(model, 0)
    handle.remove()
    works = own_loss(model, 1)
    with contextlib.suppress(PlannedFailure):
        fails.backward()
    model.zero_grad()
    works.backward()
    plain_loss(plain, 1).backward()
    assert gradient_error(model, plain) < EXACT


@on_ranks(2, strategy=STRATEGIES, kind=INTERRUPTIONS)
def test_loaded_weights_count_whatever_was_interrupted(
    tmp_path: Path, strategy: str, kind: str
) -> None:
    folder = str(tmp_path / "saved")
    plain, model, optimizers = _trained(strategy)
    checkpoint.save(folder, model, optimizers[1])
    weights, state = copy.deepcopy((plain.state_dict(), optimizers[0].state_dict()))
    train_both(plain, model, optimizers, range(2, 4))
    INTERRUPTIONS[kind](model)
    checkpoint.load(folder, model, optimizers[1])
    plain.load_state_dict(weights)
    optimizers[0].load_state_dict(state)
    with torch.no_grad():
        evaluation = float((own_loss(model, 9) - own_loss(plain, 9)).abs())
    loaded = weight_error(model, plain)
    train_both(plain, model, optimizers, range(4, 6))
    errors = evaluation, loaded, weight_error(model, plain)
    assert max(errors) < EXACT, errors


@on_ranks(2, strategy=["optim", "optim_grads_params"], kind=INTERRUPTIONS)
def test_a_save_after_an_interruption_holds_weights_and_optimizer(
    tmp_path: Path, strategy: str, kind: str
) -> None:
    folder = str(tmp_path / "saved")
    plain, model, optimizers = _trained(strategy)
    INTERRUPTIONS[kind](model)
    optimizers[1].zero_grad()
    checkpoint.save(folder, model, optimizers[1])
    train_both(plain, model, optimizers, range(2, 4))
    checkpoint.load(folder, model, optimizers[1])
    again, _ = fp64_pair("no_shard")
    other = _adamw(again)[0]
    checkpoint.load(folder, again, other)
    assert weight_error(model, again) == 0.0


@on_ranks(2, strategy=STRATEGIES)
def test_an_optimizer_of_gathered_weights_says_so_at_its_first_step(strategy: str) -> None:
    plain, model = fp64_pair(strategy)
    _leave_a_forward(model)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    message = said(RuntimeError, early.step)
    model.reshard()
    optimizers = _adamw(plain, model)
    train_both(plain, model, optimizers, range(2))
    assert message.startswith("the optimizer holds the gathered weights of input.weight")
    assert "reshard()" in message
    assert weight_error(model, plain) < EXACT


@pytest.mark.parametrize("as_parameters", [False, True], ids=["tensors", "parameters"])
@on_ranks(2, strategy=STRATEGIES, before_it=["", "gathered", *INTERRUPTIONS])
def test_weights_for_one_call_are_rejected_and_replace_nothing(
    strategy: str, before_it: str, as_parameters: bool
) -> None:
    plain, model, optimizers = _trained(strategy)
    if before_it == "gathered":
        model.unshard()
    elif before_it:
        INTERRUPTIONS[before_it](model)
        model.zero_grad()
    other = {name: torch.zeros(param.shape).double() for name, param in model.named_parameters()}
    if as_parameters:
        other = {name: torch.nn.Parameter(value) for name, value in other.items()}
    before = dict(other)
    x = torch.ones(2, 5).double()
    message = said(ValueError, lambda: torch.func.functional_call(model, other, (x,)))
    untouched = all(other[name] is before[name] and not other[name].any() for name in other)
    train_both(plain, model, optimizers, range(2, 4))
    assert message.startswith("parameter ")
    assert "functional_call" in message and "load_state_dict" in message
    assert untouched
    assert weight_error(model, plain) < EXACT


@on_ranks(2, strategy=STRATEGIES)
def test_a_failed_forward_costs_no_accumulated_gradient(strategy: str) -> None:
    """A micro-batch, a forward that raises, and the last micro-batch: both gradients are there."""
    plain, model = fp64_pair(strategy)
    with model.no_sync():
        own_loss(model, 0).backward()
    _fail_in_forward(model)
    own_loss(model, 1).backward()
    for step in (0, 1):
        plain_loss(plain, step).backward()
    assert gradient_error(model, plain) < EXACT


@on_ranks(2, strategy=STRATEGIES)
def test_zeros_written_after_a_failed_backward_stay_zeros(strategy: str) -> None:
    plain, model = fp64_pair(strategy)
    own_loss(model, 0).backward()
    model.zero_grad(set_to_none=False)
    with failing(model.input.register_full_backward_hook(fail)):
        own_loss(model, 7).backward()
    model.zero_grad(set_to_none=False)
    own_loss(model, 1).backward()
    plain_loss(plain, 1).backward()
    assert gradient_error(model, plain) < EXACT


@on_ranks(2, strategy=STRATEGIES)
def test_freezing_counts_also_while_weights_are_gathered(strategy: str) -> None:
    _, model = fp64_pair(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = dict(model.named_parameters())["output.weight"]
    changes = []
    for trained in (True, False, True):
        _leave_a_forward(model)
        model.output.requires_grad_(trained)
        assert model.output.weight.requires_grad is trained
        before = weight.full_tensor().clone()
        own_loss(model, 0).backward()
        step_all(optimizer)
        changes.append(not torch.equal(before, weight.full_tensor()))
    assert changes == [True, False, True]


@pytest.mark.parametrize("evaluates", [False, True], ids=["reset", "evaluation"])
@on_ranks(2, strategy=STRATEGIES[:-1])
def test_a_failed_backward_leaves_no_rank_ahead_of_the_others(
    strategy: str, evaluates: bool
) -> None:
    """A backward fails on all ranks, of which one had left out a unit; then comes a step."""
    options = {"sharding_strategy": strategy, "check_ranks": "always"}
    plain, model = pair(lambda: Skipping().double(), **options)
    model.skip = 1 if dist.get_rank() == 1 else None
    _fail_in_backward(model, block=0)
    if evaluates:
        with torch.inference_mode():
            own_loss(model, 3)
    else:
        model.reset_iter_state()
    dist.all_reduce(torch.ones(1))
    model.zero_grad()
    own_loss(model, 1).backward()
    for rank in range(2):
        plain.skip = 1 if rank == 1 else None
        (loss_of(plain, rank, 1) / 2).backward()
    assert gradient_error(model, plain) < EXACT
