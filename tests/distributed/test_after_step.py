"""Gathers that an optimizer's step begins, and changes of weights between it and the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.diagnostics import Role, memory_tracker
from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import BF16, listen, said, shards_of, step_all, wrap
from tests.reference.models import INPUT, Stack

AHEAD: dict[str, Any] = {"enable_unshard_after_step": True}


def _made(policy: Any = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = wrap(Stack(3), mp_policy=policy, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def _backward(model: Any) -> None:
    model(torch.ones(2, INPUT)).square().mean().backward()


def _step(model: Any, optimizer: Any) -> None:
    _backward(model)
    step_all(optimizer)


def _gathered(model: Any) -> list[bool]:
    return [unit_of(module).is_unsharded for module in (model, *model.blocks)]


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_a_step_gathers_what_the_next_forward_begins_with_and_nothing_twice(policy: Any) -> None:
    model, optimizer = _made(policy, **AHEAD)
    wire = listen(model)
    _step(model, optimizer)
    # The root, and the unit that is gathered ahead of it.
    assert _gathered(model) == [True, True, False, False]
    assert all(type(param).__name__ == "UnevenDTensor" for param in model.parameters())
    before = wire.count("all_gather")
    _step(model, optimizer)
    # Forward and backward of three blocks, and the root, once each.
    assert wire.count("all_gather") == before + 2 * 3 + 1
    assert not any(_gathered(_made(policy)[0]))


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_no_bit_of_a_result_depends_on_it(policy: Any) -> None:
    bits = []
    for options in ({}, AHEAD, {**AHEAD, "unshard_prefetch_depth": 3, "enable_trace_pool": True}):
        model, optimizer = _made(policy, **options)
        for number in range(6):
            _step(model, optimizer)
            if number == 3:
                with torch.no_grad():
                    model(torch.ones(1, INPUT))
        bits.append(shards_of(model))
    assert all(map(torch.equal, bits[0], bits[1]))
    assert all(map(torch.equal, bits[0], bits[2]))


def _in_place(model: Any, optimizer: Any) -> None:
    del optimizer
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def _of_locals(model: Any, optimizer: Any) -> None:
    del optimizer
    for param in model.parameters():
        local_of(param).detach().mul_(0.5)


def _loaded(model: Any, optimizer: Any) -> None:
    del optimizer
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


def _assigned(model: Any, optimizer: Any) -> None:
    del optimizer
    halves = {name: 0.5 * value for name, value in model.state_dict().items()}
    model.load_state_dict(halves, assign=True)


def _evaluated(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model(torch.ones(1, INPUT))
    _in_place(model, optimizer)


def _stepped_again(model: Any, optimizer: Any) -> None:
    del optimizer
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.SGD(model.parameters(), lr=0.01, foreach=True).step()
    for param in model.parameters():
        param.grad = None


def _unseen(model: Any, optimizer: Any) -> None:
    del optimizer
    for module in (model, *model.blocks):
        for group in unit_of(module).held_groups:
            # Or a gather that reads late finds the change on one rank, and nothing wrong there.
            for work in group.weights._gathering or ():
                work.wait()
    for param in model.parameters():
        local_of(param).data.mul_(0.5)


def _unseen_and_told(model: Any, optimizer: Any) -> None:
    _unseen(model, optimizer)
    model.reshard()
    for block in model.blocks:
        block.reshard()


CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "in place": _in_place,
    "local tensors in place": _of_locals,
    "a state dict": _loaded,
    "an assigned state dict": _assigned,
    "after an evaluation": _evaluated,
    "another optimizer": _stepped_again,
    "through .data, and told": _unseen_and_told,
}


@on_ranks(2)
def test_weights_that_are_changed_after_the_step_are_those_of_the_next_forward() -> None:
    for name, change in CHANGES.items():
        losses = []
        for options in ({}, AHEAD):
            model, optimizer = _made(**options)
            for _ in range(2):
                _step(model, optimizer)
            assert _gathered(model)[0] is bool(options)
            change(model, optimizer)
            losses.append(model(torch.ones(2, INPUT)).detach())
        assert torch.equal(*losses), name


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_a_change_that_nothing_counts_is_an_error_by_name(policy: Any) -> None:
    model, optimizer = _made(policy, **AHEAD)
    _step(model, optimizer)
    _unseen(model, optimizer)
    text = said(RuntimeError, lambda: model(torch.ones(2, INPUT)))
    assert "were changed after the optimizer's step" in text
    assert "Call reshard() on the model after such a change" in text
    # The forward that follows repairs, and gathers what is there.
    model(torch.ones(2, INPUT)).sum().backward()


@on_ranks(2)
def test_whoever_gathers_by_hand_sees_changes_that_nothing_counts() -> None:
    model, optimizer = _made(**AHEAD)
    _step(model, optimizer)
    wire = listen(model)
    _unseen(model, optimizer)
    half = model.input.weight.full_tensor()
    model.unshard()
    assert torch.equal(model.input.weight, half)
    assert wire.count("all_gather") == 1


@on_ranks(2)
def test_a_unit_waits_for_all_optimizers_of_its_parameters() -> None:
    model, _ = _made(**AHEAD)
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    optimizers = [torch.optim.SGD(params, lr=0.1) for params in (matrices, others)]
    _backward(model)
    wire = listen(model)
    optimizers[0].step()
    assert not any(_gathered(model))
    optimizers[1].step()
    assert _gathered(model) == [True, True, False, False]
    assert wire.count("all_gather") == 2


@on_ranks(2)
def test_what_one_optimizer_has_done_is_not_gathered_again_for_the_next_one() -> None:
    model, _ = _made(**AHEAD)
    plain, _ = _made()
    optimizers = []
    for made in (model, plain):
        blocks = [*made.blocks.parameters()]
        others = [*made.input.parameters(), *made.output.parameters()]
        optimizers.append([torch.optim.SGD(params, lr=0.1) for params in (others, blocks)])
    wire = listen(model)
    for _ in range(2):
        before = wire.count("all_gather")
        for made, both in zip((model, plain), optimizers, strict=True):
            _backward(made)
            both[0].step()
            assert _gathered(made) == [made is model, False, False, False]
            both[1].step()
            made.zero_grad()
    # Forward and backward of three blocks, and the root, once each.
    assert wire.count("all_gather") == before + 2 * 3 + 1
    assert all(map(torch.equal, shards_of(model), shards_of(plain)))


@on_ranks(2)
def test_what_is_held_between_steps_is_bounded_and_given_back() -> None:
    model, optimizer = _made(**AHEAD)
    _step(model, optimizer)
    with memory_tracker(model, optimizer) as memory:
        _step(model, optimizer)
    held = [unit_of(module).gathered_nbytes for module in (model, model.blocks[0])]
    assert memory.live[Role.GATHERED] == sum(held) > 0
    assert memory.peak.total <= memory.bound.total
    # A unit that runs by itself drops what was gathered for another forward.
    model.blocks[1](torch.ones(1, 7))
    assert not any(_gathered(model))


@on_ranks(2, strategy=["no_shard", "optim", "optim_grads"])
def test_below_zero_3_it_changes_nothing(strategy: str) -> None:
    bits = []
    for options in ({}, AHEAD):
        model, optimizer = _made(sharding_strategy=strategy, **options)
        wire = listen(model)
        for _ in range(3):
            _step(model, optimizer)
        bits.append((wire.count("all_gather"), shards_of(model)))
    assert bits[0][0] == bits[1][0]
    assert all(map(torch.equal, bits[0][1], bits[1][1]))


@on_ranks(2)
def test_what_a_step_gathered_and_a_load_dropped_is_gathered_once_more() -> None:
    """In nested units, where what is dropped as mispredicted may be in use."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 4)
    )
    for unit in (model[1][0], model[1], model):
        fully_shard(unit, **AHEAD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        expected = model(torch.ones(2, 4))
    optimizer.step()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    found = model(torch.ones(2, 4))
    assert torch.equal(found, expected)
    found.sum().backward()
