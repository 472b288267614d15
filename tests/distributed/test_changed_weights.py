"""Weights that change between a forward and its backward."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.runtime.module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    BF16,
    STRATEGIES,
    backward_both,
    batch,
    error_message,
    gradient_error,
    loss_of,
    own_loss,
    pair,
    plain_loss,
    train_both,
    train_losses,
    weight_error,
    wrap,
)
from tests.reference.models import WIDTH, Skipping, Stack


def _load(model: nn.Module, params: Sequence[nn.Parameter]) -> None:
    del params
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def _write(model: nn.Module, params: Sequence[nn.Parameter]) -> None:
    del model
    with torch.no_grad():
        for param in params:
            param.mul_(2.0)


def _step(model: nn.Module, params: Sequence[nn.Parameter], **options: Any) -> None:
    del model
    torch.optim.AdamW(params, lr=0.1, **options).step()


CHANGES: dict[str, Callable[[nn.Module, Sequence[nn.Parameter]], None]] = {
    "a load": _load,
    "writes": _write,
    "a step": lambda model, params: _step(model, params, foreach=False),
    "a foreach step": lambda model, params: _step(model, params, foreach=True),
}


RAISED = "modified by an inplace operation"


# At ZeRO-1 and ZeRO-2 the model weights of the forward are kept until the next one.
@on_ranks("size", size=(1, 2), strategy=STRATEGIES, kept=(False, True))
def test_backward_uses_the_weights_of_its_forward_or_raises_as_unsharded(
    size: int, strategy: str, kept: bool
) -> None:
    zero_3 = strategy == "optim_grads_params"
    errors, wrong = [], []
    for name, change in CHANGES.items():
        # Weights that a unit keeps are those of its forward too, unless a load frees them.
        stays = kept and name != "a load" if zero_3 else strategy != "no_shard"
        has_copy = size > 1 and stays
        plain, model = pair(sharding_strategy=strategy, reshard_after_forward=not kept)
        backward_both(plain, model)  # optimizers need gradients
        before = copy.deepcopy(plain)
        params = list(plain.parameters()), list(model.parameters())
        losses = plain_loss(plain), own_loss(model)
        messages = []
        for each, own, loss in zip((plain, model), params, losses, strict=True):
            change(each, own)
            messages.append(error_message(RuntimeError, loss.backward))
        raised = [RAISED in message for message in messages]
        if raised != [True, not has_copy]:
            wrong.append((name, messages))
        elif has_copy:
            for _ in range(2):
                plain_loss(before).backward()
            errors.append(gradient_error(model, before))
        model.load_state_dict(before.state_dict())
        for each in (model, before):
            each.zero_grad()
        backward_both(before, model)
        errors.append(gradient_error(model, before))
    assert not wrong, wrong
    assert max(errors) < 1e-6, errors


@on_ranks(2)
def test_a_parameter_assigned_to_a_unit_gathered_ahead_is_kept_if_the_unit_does_not_run() -> None:
    model = wrap(Skipping())
    skipped = model.blocks[1]
    own_loss(model).backward()  # records the order of units

    def assign(*_: Any) -> None:
        assert unit_of(skipped).is_unsharded
        skipped.up.weight = nn.Parameter(torch.full_like(skipped.up.weight, 3.0))
        model.skip = 1

    handle = model.blocks[0].register_forward_hook(assign)
    with torch.no_grad():
        own_loss(model)
    handle.remove()
    model.skip = None
    assert not unit_of(skipped).is_unsharded
    whole = skipped.up.weight.full_tensor()
    assert whole.eq(3.0).all()
    own_loss(model).backward()
    assert skipped.up.weight.grad is not None


# Such as a bound of weights. The last block is gathered ahead of its use.
@on_ranks(2, strategy=STRATEGIES, kept=(False, True))
def test_a_forward_may_write_weights_of_units_that_run_later(strategy: str, kept: bool) -> None:
    plain, model = pair(sharding_strategy=strategy, reshard_after_forward=not kept)
    for each in (plain, model):
        each.blocks[-2].register_forward_hook(functools.partial(_bound, each.blocks[-1]))
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (plain, model)]
    train_both(plain, model, optimizers, range(3))
    assert weight_error(model, plain) < 1e-6
    with torch.no_grad():
        evaluated = own_loss(model), loss_of(plain, dist.get_rank())
    assert torch.allclose(*evaluated)


def _bound(module: nn.Module, *args: Any) -> None:
    del args
    with torch.no_grad():
        for param in module.parameters():
            param.clamp_(-0.1, 0.1)


@on_ranks(2, strategy=STRATEGIES[1::2], change=sorted(CHANGES))
def test_a_unit_gathered_ahead_before_ctrl_c_runs_with_new_weights(
    strategy: str, change: str
) -> None:
    plain, model = pair(sharding_strategy=strategy)
    outputs = []
    for each in (plain, model):
        params = list(each.parameters())
        plain_loss(each).backward()
        handle = each.blocks[0].register_forward_hook(_interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            own_loss(each)
        handle.remove()
        CHANGES[change](each, params)
        outputs.append(each.blocks[1](torch.ones(2, WIDTH)))
    assert torch.allclose(*outputs)


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


# Otherwise the writes would be lost without a word.
@on_ranks(2, in_backward=(False, True))
def test_a_write_of_weights_that_an_exception_left_gathered_is_rejected(in_backward: bool) -> None:
    plain, model = pair()
    if in_backward:
        _interrupt_backward(model)
    else:
        handle = model.blocks[0].register_forward_hook(_interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            own_loss(model)
        handle.remove()
    _write(model, list(model.parameters()))
    message = error_message(RuntimeError, lambda: own_loss(model))
    assert "was changed in place while it was gathered" in message
    model.load_state_dict(plain.state_dict())
    model.zero_grad()
    backward_both(plain, model)
    assert gradient_error(model, plain) < 1e-6


def _interrupt_backward(model: nn.Module) -> None:
    def watch(*args: Any) -> None:
        args[-1].register_hook(_interrupt)

    handle = model.blocks[0].register_forward_hook(watch)
    with contextlib.suppress(KeyboardInterrupt):
        own_loss(model).backward()
    handle.remove()


@on_ranks(2, was_used=[False, True])
def test_a_load_that_assigns_keeps_the_parameters_of_nested_modules(was_used: bool) -> None:
    """A module and one below it, in one unit: the first is assigned before the second loads."""
    model = wrap(nn.MultiheadAttention(6, 2), [])
    if was_used:
        model(*[torch.ones(2, 3, 6)] * 3)
        model.reshard()
    before = dict(model.named_parameters())
    model.load_state_dict(model.state_dict(), assign=True)
    assert all(param is before[name] for name, param in model.named_parameters())
    sum(param.square().sum().full_tensor() for param in before.values()).backward()
    assert all(param.grad is not None for param in before.values())


# -- unshard() after a step ------------------------------------------------------------------------


def _keep_after_backward(model: Any, loss: torch.Tensor) -> None:
    model.set_reshard_after_backward(False)
    loss.backward()


def _keep_for_another_backward(model: Any, loss: torch.Tensor) -> None:
    model(batch(dist.get_rank()))
    loss.backward()


def _unshard_after_backward(model: Any, loss: torch.Tensor) -> None:
    loss.backward()
    for unit in (model, *model.blocks):
        unit.unshard()


STAYS_GATHERED: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "kept after a backward": _keep_after_backward,
    "kept for a backward": _keep_for_another_backward,
    "unsharded": _unshard_after_backward,
}


@on_ranks(2, strategy=STRATEGIES, stays=STAYS_GATHERED, options=[{}, {"mp_policy": BF16}])
def test_unshard_gathers_weights_that_stayed_gathered_during_a_step(
    strategy: str, stays: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = wrap(Stack(), sharding_strategy=strategy, **options)
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=0.5)
    STAYS_GATHERED[stays](model, model(batch(dist.get_rank())).square().sum())
    optimizer.step()
    for unit in (model, *model.blocks):
        unit.unshard()
    found = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in params.items():
        expected = param.full_tensor().detach().to(found[name].dtype)
        assert torch.equal(found[name], expected), name


@on_ranks(2, strategy=STRATEGIES[:3])
def test_ranks_that_ran_other_units_before_unshard_refresh_in_one_order(strategy: str) -> None:
    torch.manual_seed(0)
    model = wrap(Stack(), sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train_losses(model, optimizer, range(1))
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.blocks[0](torch.ones(2, WIDTH))
    model.blocks[2].unshard()
    found = model.blocks[2].down.weight.detach().clone()
    model.blocks[2].reshard()
    assert torch.equal(found, model.blocks[2].down.weight.full_tensor())
