"""Weight formats other than the dense one: a format with scales and one with two payloads."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_v2.params.formats import DenseFormat, format_of, register_format
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    held_error,
    mesh_of,
    own_loss,
    record_collectives,
    step_all,
    weight_error,
    wrap,
)
from tests.reference.models import INPUT, Checkpointed, Stack
from tests.reference.scaled_float8 import (
    ScaledFloat8,
    ScaledFloat8Format,
    quantize_linears,
    quantized,
)
from tests.reference.two_way import TwoWay, TwoWayFormat, TwoWayLinear, in_two_ways

STEPS = 3


def _pair(shape: tuple[int, ...], **options: Any) -> tuple[Any, Any]:
    """The plain fp32 model, and the same model with 8-bit weights, sharded."""
    register_format(ScaledFloat8Format)
    torch.manual_seed(0)
    plain = Stack()
    eight = Checkpointed(use_reentrant=False) if options.pop("recompute", False) else Stack()
    eight.load_state_dict(plain.state_dict())
    quantize_linears(eight)
    with torch.no_grad():
        # Both models begin with values that 8 bits can represent.
        for name, param in eight.named_parameters():
            if isinstance(param, ScaledFloat8):
                plain.get_parameter(name).copy_(param.numbers())
    return plain, wrap(eight, mesh=mesh_of(*shape), **options)


def _with_quantized(plain: nn.Module, step: int) -> torch.Tensor:
    """The mean loss of all ranks, computed with full weights that are quantized and dequantized."""
    weights = {
        name: param + (quantized(param).numbers() - param).detach()
        for name, param in plain.named_parameters()
        if param.dim() == 2
    }
    losses = [
        torch.func.functional_call(plain, weights, (batch(rank, step),)).square().mean()
        for rank in range(dist.get_world_size())
    ]
    return torch.stack(losses).mean()


CASES = [((2,), strategy, {}) for strategy in STRATEGIES]
CASES += [
    ((3,), "optim_grads_params", {}),
    ((3,), "optim", {}),
    ((2,), "optim_grads_params", {"recompute": True}),
    ((2,), "optim_grads_params", {"enable_trace_pool": True}),
    ((2,), "optim_grads_params", {"reshard_after_forward": False}),
    ((2, 2), "optim_grads_params", {}),
]


@pytest.mark.parametrize(("shape", "strategy", "more"), CASES, ids=str)
@on_ranks("shape")
def test_training_in_8_bits_equals_that_of_full_quantized_weights(
    shape: tuple[int, ...], strategy: str, more: dict[str, Any]
) -> None:
    plain, model = _pair(shape, sharding_strategy=strategy, **more)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (plain, model)]
    worst = [0.0, 0.0]
    for step in range(STEPS):
        expected = _with_quantized(plain, step)
        expected.backward()
        own = own_loss(model, step)
        own.backward()
        step_all(*optimizers)
        total = own.detach().clone()
        dist.all_reduce(total)
        worst[0] = max(worst[0], float((total / dist.get_world_size() - expected).abs()))
        worst[1] = max(worst[1], weight_error(model, plain))
        if step == 0:
            # A forward without gradients writes and gathers the same weights.
            with torch.no_grad():
                model(batch(0, step))
    # Of the mean loss over ranks, and of the main weights.
    assert max(worst) < 2e-6, worst


@on_ranks(2, strategy=STRATEGIES)
def test_all_weights_changed_by_a_step_are_written_in_one_call(strategy: str) -> None:
    _, model = _pair((2,), sharding_strategy=strategy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    calls = []
    for step in range(STEPS):
        with mock.patch.object(
            ScaledFloat8Format, "write", wraps=ScaledFloat8Format.write
        ) as written:
            own_loss(model, step).backward()
            with torch.no_grad():
                model(batch(0, step))
        calls.append(written.call_count)
        step_all(optimizer)
    # Once after a step, and once after a backward, since an untracked optimizer may have stepped.
    assert calls == [2] * STEPS


def test_format_is_found_by_parameter_type() -> None:
    register_format(ScaledFloat8Format)
    register_format(ScaledFloat8Format)
    assert format_of(nn.Parameter(torch.ones(2, 2))) is DenseFormat
    assert format_of(nn.Parameter(quantized(torch.ones(2, 2)))) is ScaledFloat8Format


WIDTH = 12
NUMBERS = INPUT * WIDTH + 2 * WIDTH * WIDTH


class Layers(nn.Module):
    """Three layers in a row with two-payload weights."""

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
    """Gradients of all ranks' mean loss, with full two-payload weights made from main weights."""
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
    """Error of gradients and weights over three steps; 16-bit elements gathered in the last."""
    register_format(TwoWayFormat)
    plain, model = Layers(), Layers(recompute=recompute)
    mains = [block.weight.numbers(0) for block in plain.blocks]
    wrap(model, mesh=mesh_of(*shape), sharding_strategy=strategy, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recorded = record_collectives(model)
    errors, gathered = [], []
    for step in range(3):
        recorded.sent.clear()
        x = batch(dist.get_rank(), step).requires_grad_()
        loss = model(x).square().mean()
        forward = [sent.numel for sent in recorded.sent if sent.dtype == torch.int16]
        loss.backward()
        both = [sent.numel for sent in recorded.sent if sent.dtype == torch.int16]
        gathered = [sum(forward), sum(both) - sum(forward)]
        grads = _gradients(plain, mains, step)
        for param, grad in zip(model.parameters(), grads, strict=True):
            if param.grad is not None:
                errors.append(held_error(param.grad, grad))
        step_all(optimizer)
        for param, main, grad in zip(model.parameters(), mains, grads, strict=True):
            main.sub_(grad, alpha=0.5)
            errors.append(held_error(param, main))
            main.copy_(param.full_tensor().detach())
        with torch.no_grad():
            model(batch(dist.get_rank(), step))
    return max(errors), gathered


CASES_PAYLOAD: list[tuple[str, tuple[int, ...], str, dict[str, Any]]] = [
    *((strategy, (2,), "", {}) for strategy in STRATEGIES),
    ("optim_grads_params", (3,), "", {}),
    ("optim_grads_params", (2,), "reentrant", {}),
    ("optim_grads_params", (2,), "not reentrant", {}),
    ("optim_grads_params", (2,), "", {"reshard_after_forward": False}),
    ("optim_grads_params", (2,), "", {"enable_unshard_prefetch": False}),
    ("optim_grads_params", (2,), "not reentrant", {"enable_trace_pool": True}),
    ("optim_grads_params", (2, 2), "", {}),
    ("optim", (2,), "", {"check_ranks": "always"}),
    ("optim_grads_params", (2,), "", {"check_ranks": "always"}),
]


@pytest.mark.parametrize(("strategy", "shape", "recompute", "options"), CASES_PAYLOAD, ids=str)
@on_ranks("shape")
def test_each_payload_is_gathered_for_its_use(
    strategy: str, shape: tuple[int, ...], recompute: str, options: dict[str, Any]
) -> None:
    error, (forward, backward) = train(strategy, shape, recompute, options)
    assert error < 2e-6
    if (strategy, shape, options) == ("optim_grads_params", (2,), {}):
        # A use gathers only its own payload. Padding is at most one line of 128 bytes for each
        # weight and rank.
        padding = 3 * 2 * 64
        assert NUMBERS <= forward <= NUMBERS + padding
        times = 2 if recompute else 1
        assert times * NUMBERS <= backward <= times * (NUMBERS + padding)


@on_ranks(1)
def test_gathered_parameter_stays_the_same_object() -> None:
    register_format(TwoWayFormat)
    model = wrap(Layers())
    seen: list[Any] = []
    model.blocks[0].register_forward_pre_hook(lambda module, _args: seen.append(module.weight))
    for _ in range(2):
        model(batch(0).requires_grad_()).square().mean().backward()
    assert seen[0] is seen[1]
    assert isinstance(seen[0], TwoWay) and isinstance(seen[0], nn.Parameter)
