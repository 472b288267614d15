"""Weights that a forward and a backward compute with in different forms, gathered one by one."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_v2.params.formats import register_format
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    held_error,
    listen,
    mesh_of,
    step_all,
    wrap,
)
from tests.reference.models import INPUT
from tests.reference.two_way import TwoWay, TwoWayFormat, TwoWayLinear, in_two_ways

WIDTH = 12
NUMBERS = INPUT * WIDTH + 2 * WIDTH * WIDTH


class Layers(nn.Module):
    """Three layers with weights in two forms; the last one's input is an output twice over."""

    def __init__(self, *, recompute: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = [(WIDTH, INPUT), (WIDTH, WIDTH), (WIDTH, WIDTH)]
        self.blocks = nn.ModuleList(TwoWayLinear(torch.randn(shape) / 2) for shape in shapes)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                reentrant = self.recompute == "reentrant"
                x = checkpoint(block, x, use_reentrant=reentrant)
            else:
                x = block(x)
            x = torch.tanh(x)
        return x


def _gradients(model: Layers, mains: list[torch.Tensor], step: int) -> list[torch.Tensor]:
    """Of the mean loss of all ranks, with whole weights in two forms, made of main weights."""
    total = [torch.zeros_like(main) for main in mains]
    for rank in range(dist.get_world_size()):
        x = batch(rank, step).requires_grad_()
        weights = []
        for block, main in zip(model.blocks, mains, strict=True):
            block.weight = nn.Parameter(in_two_ways(main))
            weights.append(block.weight)
            x = torch.tanh(block(x))
        (x.square().mean() / dist.get_world_size()).backward()
        for summed, weight in zip(total, weights, strict=True):
            summed.add_(weight.grad)
    return total


def train(strategy: str, shape: tuple[int, ...], recompute: str, options: dict[str, Any]) -> Any:
    """Errors of gradients and weights over three steps; 16-bit bytes of the last one's gathers."""
    register_format(TwoWayFormat)
    plain, model = Layers(), Layers(recompute=recompute)
    mains = [block.weight.numbers(0) for block in plain.blocks]
    wrap(model, mesh=mesh_of(*shape), sharding_strategy=strategy, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    wire = listen(model)
    errors, gathered = [], []
    for step in range(3):
        wire.sent.clear()
        x = batch(dist.get_rank(), step).requires_grad_()
        loss = model(x).square().mean()
        forward = [sent.numel for sent in wire.sent if sent.dtype == torch.int16]
        loss.backward()
        both = [sent.numel for sent in wire.sent if sent.dtype == torch.int16]
        gathered = [sum(forward), sum(both) - sum(forward)]
        for param, grad in zip(model.parameters(), _gradients(plain, mains, step), strict=True):
            if param.grad is not None:
                errors.append(held_error(param.grad, grad))
        step_all(optimizer)
        for param, main, grad in zip(
            model.parameters(), mains, _gradients(plain, mains, step), strict=True
        ):
            main.sub_(grad, alpha=0.5)
            errors.append(held_error(param, main))
            main.copy_(param.full_tensor().detach())
        with torch.no_grad():
            model(batch(dist.get_rank(), step))
    return max(errors), gathered


NOT_AHEAD = {"enable_unshard_prefetch": False}
CASES: list[tuple[str, tuple[int, ...], str, dict[str, Any]]] = [
    *((strategy, (2,), "", {}) for strategy in STRATEGIES),
    ("optim_grads_params", (3,), "", {}),
    ("optim_grads_params", (2,), "reentrant", {}),
    ("optim_grads_params", (2,), "not reentrant", {}),
    ("optim_grads_params", (2,), "", {"reshard_after_forward": False}),
    ("optim_grads_params", (2,), "", NOT_AHEAD),
    ("optim_grads_params", (2,), "not reentrant", {"enable_trace_pool": True}),
    ("optim_grads_params", (2, 2), "", {}),
    ("optim", (2,), "", {"check_ranks": "always"}),
    ("optim_grads_params", (2,), "", {"check_ranks": "always"}),
]


@pytest.mark.parametrize(("strategy", "shape", "recompute", "options"), CASES, ids=str)
@on_ranks("shape")
def test_each_form_is_there_for_its_use(
    strategy: str, shape: tuple[int, ...], recompute: str, options: dict[str, Any]
) -> None:
    error, _ = train(strategy, shape, recompute, options)
    assert error < 2e-6


@on_ranks(2, recompute=["", "reentrant", "not reentrant"])
def test_a_use_gathers_its_own_form_and_no_other(recompute: str) -> None:
    _, (forward, backward) = train("optim_grads_params", (2,), recompute, {})
    # Padding is at most one line of 128 bytes for each weight and rank.
    padding = 3 * 2 * 64
    assert NUMBERS <= forward <= NUMBERS + padding
    times = 2 if recompute else 1
    assert times * NUMBERS <= backward <= times * (NUMBERS + padding)


def _sharded(**options: Any) -> Any:
    register_format(TwoWayFormat)
    return wrap(Layers(), **options)


@on_ranks(2)
def test_one_form_has_memory_at_a_time() -> None:
    model = _sharded()
    # For a forward (0) and a backward (1), which forms had memory while one was computed with.
    seen: dict[int, set[tuple[bool, ...]]] = {0: set(), 1: set()}
    numbers = TwoWay.numbers

    def watched(weight: Any, way: int) -> torch.Tensor:
        payloads = weight._owner_slot[0]().weights.payloads
        seen[way].add(tuple(payload.is_whole for payload in payloads))
        return numbers(weight, way)

    with mock.patch.object(TwoWay, "numbers", watched):
        model(batch(dist.get_rank()).requires_grad_()).square().mean().backward()
    assert seen == {0: {(True, False)}, 1: {(False, True)}}


def gathered_ahead(options: dict[str, Any]) -> list[int]:
    """How many gathers of a backward were issued when each layer of it, the last first, ran."""
    model = _sharded(**options)
    wire, numbers = listen(model), TwoWay.numbers
    issued: list[int] = []

    def watched(weight: Any, way: int) -> torch.Tensor:
        if way == 1:
            issued.append(sum(sent.dtype == torch.int16 for sent in wire.sent))
        return numbers(weight, way)

    for step in range(2):
        loss = model(batch(dist.get_rank(), step).requires_grad_()).square().mean()
        issued.clear()
        wire.sent.clear()
        with mock.patch.object(TwoWay, "numbers", watched):
            loss.backward()
    return issued


@on_ranks(2, kept=[{}, {"reshard_after_forward": False}])
def test_the_form_of_a_backward_is_gathered_ahead(kept: dict[str, Any]) -> None:
    """Also where weights are kept after the forward, in the other form."""
    ahead, not_ahead = gathered_ahead(kept), gathered_ahead({**kept, **NOT_AHEAD})
    assert ahead == [2, 3, 3]
    assert not_ahead == [1, 2, 3]


@on_ranks(1)
def test_the_same_object_is_computed_with_all_the_time() -> None:
    model = _sharded()
    seen: list[Any] = []
    model.blocks[0].register_forward_pre_hook(lambda module, _args: seen.append(module.weight))
    for _ in range(2):
        model(batch(0).requires_grad_()).square().mean().backward()
    assert seen[0] is seen[1]
    assert isinstance(seen[0], TwoWay) and isinstance(seen[0], nn.Parameter)
