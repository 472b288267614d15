"""All-gathers after an optimizer's step, and weight changes between the step and the forward."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_v2.diagnostics import Role, memory_tracker
from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from megatron_fsdp_v2.runtime.module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    BF16,
    error_message,
    record_collectives,
    shards_of,
    step_all,
    wrap,
)
from tests.reference.models import INPUT, Stack
from tests.sharding import shard

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
def test_step_gathers_the_first_units_of_the_next_forward_once(policy: Any) -> None:
    model, optimizer = _made(policy, **AHEAD)
    recorded = record_collectives(model)
    _step(model, optimizer)
    # The root, and the unit that is prefetched with it.
    assert _gathered(model) == [True, True, False, False]
    assert all(type(param).__name__ == "UnevenDTensor" for param in model.parameters())
    before = recorded.count("all_gather")
    _step(model, optimizer)
    # Forward and backward of three blocks, and the root, once each.
    assert recorded.count("all_gather") == before + 2 * 3 + 1
    assert not any(_gathered(_made(policy)[0]))


def _change_untracked(model: Any, optimizer: Any) -> None:
    for module in (model, *model.blocks):
        for group in unit_of(module).held_groups:
            # Otherwise a late gather may read the changed weights of one rank without an error.
            for work in group._gathering or ():
                work.wait()
    for param in model.parameters():
        local_of(param).data.mul_(0.5)


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_untracked_weight_change_after_a_step_raises(policy: Any) -> None:
    model, optimizer = _made(policy, **AHEAD)
    _step(model, optimizer)
    _change_untracked(model, optimizer)
    text = error_message(RuntimeError, lambda: model(torch.ones(2, INPUT)))
    assert "were changed after the optimizer's step" in text
    assert "Call reshard() on the model after such a change" in text
    # The next forward gathers the current weights, and so does a forward after reshard().
    model(torch.ones(2, INPUT)).sum().backward()
    _step(model, optimizer)
    _change_untracked(model, optimizer)
    for module in (model, *model.blocks):
        module.reshard()
    model(torch.ones(2, INPUT)).sum().backward()


@on_ranks(2)
def test_manual_unshard_gathers_untracked_changes() -> None:
    model, optimizer = _made(**AHEAD)
    _step(model, optimizer)
    recorded = record_collectives(model)
    _change_untracked(model, optimizer)
    half = model.input.weight.full_tensor()
    model.unshard()
    assert torch.equal(model.input.weight, half)
    assert recorded.count("all_gather") == 1


@on_ranks(2, split=["by dimension", "by unit"])
def test_a_unit_is_gathered_once_after_all_optimizers_of_its_parameters(split: str) -> None:
    model, plain = _made(**AHEAD)[0], _made()[0]
    recorded = record_collectives(model)
    optimizers = []
    for made in (model, plain):
        is_first = {
            "by dimension": lambda name, param: param.dim() == 1,
            "by unit": lambda name, param: not name.startswith("blocks."),
        }[split]
        groups: dict[bool, list[Any]] = {True: [], False: []}
        for name, param in made.named_parameters():
            groups[is_first(name, param)].append(param)
        optimizers.append([torch.optim.SGD(params, lr=0.1) for params in groups.values()])
    for _ in range(2):
        before = recorded.count("all_gather")
        for made, both in zip((model, plain), optimizers, strict=True):
            _backward(made)
            both[0].step()
            # The first optimizer steps the root alone, or no unit as a whole.
            assert _gathered(made) == [made is model and split == "by unit", False, False, False]
            both[1].step()
            assert _gathered(made) == [made is model, made is model, False, False]
            made.zero_grad()
    # Forward and backward of three blocks, and the root, once each.
    assert recorded.count("all_gather") == before + 2 * 3 + 1
    assert all(map(torch.equal, shards_of(model), shards_of(plain)))


@on_ranks(2)
def test_roots_of_one_optimizer_are_gathered_in_the_order_of_sharding() -> None:
    roots = [wrap(nn.Linear(4, 4), [], **AHEAD) for _ in range(16)]
    gathered: list[int] = []
    for index, root in enumerate(roots):
        record_collectives(root, functools.partial(gathered.append, index))
    optimizer = torch.optim.SGD((p for root in roots for p in root.parameters()), lr=0.1)
    for root in roots:
        root(torch.ones(2, 4)).sum().backward()
    gathered.clear()
    step_all(optimizer)
    # Ranks issue these gathers in one order, since collectives of a process group pair by order.
    assert gathered == list(range(16))


@on_ranks(2)
def test_weights_gathered_after_a_step_are_bounded_and_released() -> None:
    model, optimizer = _made(**AHEAD)
    _step(model, optimizer)
    with memory_tracker(model, optimizer) as memory:
        _step(model, optimizer)
    held = [unit_of(module).gathered_nbytes for module in (model, model.blocks[0])]
    assert memory.live[Role.GATHERED] == sum(held) > 0
    # A unit that runs alone drops the weights that were gathered for another forward.
    model.blocks[1](torch.ones(1, 7))
    assert not any(_gathered(model))


@on_ranks(2)
def test_weights_gathered_after_a_step_are_gathered_again_after_a_load() -> None:
    """With nested units, where a mispredicted prefetch may be in use when it is dropped."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 4)
    )
    for unit in (model[1][0], model[1], model):
        shard(unit, **AHEAD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        expected = model(torch.ones(2, 4))
    optimizer.step()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    found = model(torch.ones(2, 4))
    assert torch.equal(found, expected)
    found.sum().backward()
