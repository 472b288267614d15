"""A module below a root that was sharded later, as a root of its own: a layer that was replaced.

Methods of the outer root apply to the inner root's units too, and its training is that of a model
whose layer was in place before it was sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2.checkpoint import restore, snapshot
from megatron_fsdp_v2.comm.backends import CpuCommunicator
from megatron_fsdp_v2.runtime.context import Context
from megatron_fsdp_v2.runtime.module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    check_error_messages,
    mesh_of,
    train_losses,
    wrap,
)
from tests.reference.failing import PlannedFailure, fail
from tests.reference.models import WIDTH, Block, Stack
from tests.sharding import shard


def _made(strategy: str, *, is_inner: bool, mesh: Any = None) -> tuple[Any, Any]:
    """Shard a model; if `is_inner`, its middle block is replaced by one that is sharded alone."""
    torch.manual_seed(0)
    model: Any = Stack()
    options = {"mesh": mesh or mesh_of(2), "sharding_strategy": strategy}
    layer = Block()
    if is_inner:
        model = wrap(model, **options)
        model.blocks[1] = shard(layer, **options)
    else:
        model.blocks[1] = layer
        model = wrap(model, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _units(model: Any) -> list[Any]:
    return [unit_of(module) for module in (model, *model.blocks)]


def _backward(model: Any, step: int = 0) -> None:
    model(batch(dist.get_rank(), step)).square().sum().backward()


def _grads(model: Any) -> dict[str, Any]:
    # Gathered parameters may be registered.
    model.reshard()
    for block in model.blocks:
        block.reshard()
    return {name: param.grad.to_local().tolist() for name, param in model.named_parameters()}


def _zeroed(model: Any, optimizer: Any) -> None:
    with model.no_sync():
        _backward(model)
    model.zero_grad()
    _backward(model, 1)


def _zeroed_while_gathered(model: Any, optimizer: Any) -> None:
    model.set_reshard_after_backward(False)
    _backward(model)
    model.zero_grad()
    _backward(model, 1)


def _reduced(model: Any, optimizer: Any) -> None:
    with model.no_sync():
        _backward(model)
        _backward(model, 1)
    model.reduce_grad()


def _reduced_twice(model: Any, optimizer: Any) -> None:
    _reduced(model, optimizer)
    model.reduce_grad()
    _backward(model, 2)


def _finalized(model: Any, optimizer: Any) -> None:
    model.set_manual_backward_finalization(True)
    _backward(model)
    _backward(model, 1)
    model.finalize_backward()


def _reset(model: Any, optimizer: Any) -> None:
    """A backward fails on one rank, before it reaches a unit."""
    loss = model(batch(dist.get_rank())).square().sum()
    if dist.get_rank() == 0:
        loss = loss * 1.0
        loss.register_hook(fail)
    with contextlib.suppress(PlannedFailure):
        loss.backward()
    model.reset_iter_state()
    model.zero_grad()
    _backward(model, 1)


def _restored(model: Any, optimizer: Any) -> None:
    with model.no_sync():
        _backward(model)
    restore(snapshot(model, optimizer), model, optimizer)
    _backward(model, 1)


CALLS: dict[str, tuple[Callable[[Any, Any], None], tuple[str, ...]]] = {
    "zero_grad() after no_sync()": (_zeroed, STRATEGIES),
    "zero_grad() while gathered": (_zeroed_while_gathered, STRATEGIES),
    "reduce_grad()": (_reduced, STRATEGIES),
    "reduce_grad() twice": (_reduced_twice, STRATEGIES),
    "finalize_backward()": (_finalized, STRATEGIES),
    "restore()": (_restored, STRATEGIES),
    # With ZeRO-3, the other rank waits for gathers.
    "reset_iter_state()": (_reset, STRATEGIES[:3]),
}


@pytest.mark.parametrize(
    ("strategy", "call"),
    [(strategy, call) for call, (_, strategies) in CALLS.items() for strategy in strategies],
)
@on_ranks(2)
def test_a_call_on_the_outer_root_reaches_the_inner_one(strategy: str, call: str) -> None:
    found = []
    for is_inner in (False, True):
        model, optimizer = _made(strategy, is_inner=is_inner)
        CALLS[call][0](model, optimizer)
        grads = _grads(model)
        optimizer.step()
        found.append((grads, train_losses(model, optimizer, range(3, 5))))
    assert found[0] == found[1]


@on_ranks(2, strategy=STRATEGIES)
def test_memory_of_the_inner_root_moves_too(strategy: str) -> None:
    nbytes, losses = [], []
    for is_inner in (False, True):
        model, optimizer = _made(strategy, is_inner=is_inner)
        before = train_losses(model, optimizer, range(2))
        nbytes.append(model.offload(optimizer, pin_memory=False))
        assert model.offload() == nbytes[-1]
        for parts in (model, model.blocks[1]):
            check_error_messages(RuntimeError, {"call reload()": parts.unshard})
        model.reload()
        losses.append(before + train_losses(model, optimizer, range(2, 4)))
        layer = model.blocks[1]
        if is_inner:
            layer.offload(pin_memory=False)
            check_error_messages(RuntimeError, {"call reload() on it first": model.offload})
            model.reload()
            layer.offload(pin_memory=False)
            layer.reload()
        losses[-1] += train_losses(model, optimizer, range(4, 5))
    # Paddings differ.
    assert abs(nbytes[0] - nbytes[1]) < 512
    assert losses[0] == losses[1]


@on_ranks(2, strategy=STRATEGIES, keep=[True, False])
def test_the_inner_root_is_aborted_and_rebuilt_too(strategy: str, keep: bool) -> None:
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model, optimizer = _made(strategy, is_inner=True)
    expected = train_losses(model, optimizer, range(4))
    model, optimizer = _made(strategy, is_inner=True)
    model.blocks[0].without_parameters = shard(nn.Identity(), mesh=mesh_of(2))
    losses = train_losses(model, optimizer, range(2))
    taken = snapshot(model, optimizer)
    loss = model(batch(dist.get_rank())).sum()
    model.abort()
    del loss
    check_error_messages(RuntimeError, {"call rebuild(mesh)": model.blocks[1].unshard})
    assert model.rebuild(mesh, optimizer, keep=keep or dist.get_rank() == 1) == keep
    meshes = {group.spec.mesh for unit in _units(model) for group in unit.groups}
    assert meshes == {mesh}
    if not keep:
        assert not optimizer.state
        restore(taken, model, optimizer)
    assert losses + train_losses(model, optimizer, range(2, 4)) == expected


@on_ranks(2, strategy=STRATEGIES)
def test_a_unit_may_prefetch_units_of_another_root(strategy: str) -> None:
    """Also the root whose forward it is part of, which was once freed when the unit's had ended."""
    losses = []
    for is_inner in (False, True):
        model, optimizer = _made(strategy, is_inner=is_inner)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model])
        model.blocks[1].set_modules_to_forward_prefetch([model, model.blocks[2]])
        model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0], model])
        losses.append(train_losses(model, optimizer, range(3)))
        _backward(model)
        assert not any(unit.is_unsharded for unit in _units(model))
    assert losses[0] == losses[1]


@on_ranks(2, strategy=STRATEGIES[:3])
def test_a_rank_may_skip_a_unit_that_chooses_to_prefetch_one_of_another_root(strategy: str) -> None:
    losses = []
    for is_inner in (False, True):
        model, optimizer = _made(strategy, is_inner=is_inner)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
        for step in range(3):
            x = torch.ones(2, WIDTH)
            if dist.get_rank() == step % 2:
                with torch.no_grad():
                    model.blocks[0](x)
            # Reduces the units of the outer root alone.
            model.blocks[2](x).sum().backward()
            losses += train_losses(model, optimizer, range(step, step + 1))
    assert losses[:3] == losses[3:]


@on_ranks(1)
def test_settings_that_all_units_share_are_those_of_the_inner_root_too() -> None:
    model, _ = _made(STRATEGIES[3], is_inner=True, mesh=mesh_of(1))
    contexts: set[Context[Any]] = {unit.context for unit in _units(model)}
    model.set_reduce_scatter_max_input_buffers(5)
    with mock.patch.object(CpuCommunicator, "wait_event", autospec=True) as wait:
        model.set_post_optim_event(mock.Mock())
    assert len(contexts) == 2
    assert {context.state.control.max_live for context in contexts} == {5}
    assert {call.args[0] for call in wait.call_args_list} == {c.communicator for c in contexts}
