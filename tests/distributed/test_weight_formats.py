"""Weight formats other than the dense one: a format with scales and one with two payloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_v2.params.formats import format_of, register_format
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    gradient_error,
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


MADE_OF: dict[type, Callable[[torch.Tensor], Any]] = {ScaledFloat8: quantized, TwoWay: in_two_ways}
"""Functions that convert full weights, by the class of the result."""


def _pair(kind: type, recompute: str = "") -> tuple[Any, Any]:
    """A plain fp32 model, and the same model with its matrices in a format."""
    torch.manual_seed(0)
    if kind is TwoWay:
        register_format(TwoWayFormat)
        plain, model = Layers(), Layers(recompute=recompute)
    else:
        register_format(ScaledFloat8Format)
        plain = Stack()
        model = Checkpointed(use_reentrant=recompute == "reentrant") if recompute else Stack()
        model.load_state_dict(plain.state_dict())
        quantize_linears(model)
    for name, param in model.named_parameters():
        # Both models begin with values that the format can represent.
        values = format_of(param).values(param.detach())
        owner, _, own_name = name.rpartition(".")
        setattr(plain.get_submodule(owner), own_name, nn.Parameter(values.clone()))
    return plain, model


def _reference_loss(plain: nn.Module, kind: type, step: int) -> torch.Tensor:
    """The mean loss of all ranks with full weights in a format; sets the gradients of `plain`."""
    weights = {
        name: (MADE_OF[kind](param) if param.dim() == 2 else param.detach()).requires_grad_()
        for name, param in plain.named_parameters()
    }
    inputs = [batch(rank, step).requires_grad_() for rank in range(dist.get_world_size())]
    outputs = [torch.func.functional_call(plain, weights, (x,)) for x in inputs]
    loss = torch.stack([output.square().mean() for output in outputs]).mean()
    grads = torch.autograd.grad(loss, list(weights.values()))
    for param, grad in zip(plain.parameters(), grads, strict=True):
        param.grad = grad
    return loss.detach()


ZERO3 = STRATEGIES[-1]
Case = tuple[str, tuple[int, ...], str, dict[str, Any]]
# Strategy, shape of the mesh, kind of recomputation, and options.
OF_BOTH: list[Case] = [
    *((strategy, (2,), "", {}) for strategy in STRATEGIES),
    (ZERO3, (3,), "", {}),
    (ZERO3, (2,), "not reentrant", {"enable_trace_pool": True}),
]
OF_TWO_PAYLOADS: list[Case] = [
    (ZERO3, (2, 2), "", {}),
    (ZERO3, (2,), "not reentrant", {}),
    (ZERO3, (2,), "", {"reshard_after_forward": False}),
    (ZERO3, (2,), "reentrant", {}),
    (ZERO3, (2,), "", {"enable_unshard_prefetch": False}),
    (ZERO3, (2,), "", {"check_ranks": "always"}),
]
CASES = [(kind, *case) for kind in MADE_OF for case in OF_BOTH]
CASES += [(TwoWay, *case) for case in OF_TWO_PAYLOADS]


@pytest.mark.parametrize(("kind", "strategy", "shape", "recompute", "options"), CASES, ids=str)
@on_ranks("shape")
def test_training_equals_that_of_full_weights_in_the_format(
    kind: type, strategy: str, shape: tuple[int, ...], recompute: str, options: dict[str, Any]
) -> None:
    plain, model = _pair(kind, recompute)
    wrap(model, mesh=mesh_of(*shape), sharding_strategy=strategy, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
    recorded = record_collectives(model)

    def num_gathered() -> int:
        return sum(sent.numel for sent in recorded.sent if sent.dtype == torch.int16)

    errors = []
    for step in range(STEPS):
        expected = _reference_loss(plain, kind, step)
        recorded.sent.clear()
        loss = model(batch(dist.get_rank(), step).requires_grad_()).square().mean()
        forward = num_gathered()
        loss.backward()
        backward = num_gathered() - forward
        errors.append(gradient_error(model, plain))
        step_all(*optimizers)
        errors.append(weight_error(model, plain))
        total = loss.detach().clone()
        dist.all_reduce(total)
        errors.append(float((total / dist.get_world_size() - expected).abs()))
        with torch.no_grad():
            # Rounding errors of weights would otherwise change their values in the format.
            for full, param in zip(plain.parameters(), model.parameters(), strict=True):
                full.copy_(param.full_tensor())
            model(batch(dist.get_rank(), step))
    assert max(errors) < 2e-6, errors
    if kind is TwoWay and (strategy, shape, options) == (ZERO3, (2,), {}):
        # A use gathers only its own payload. Padding is at most one line of 128 bytes for each
        # weight and rank.
        padding = 3 * 2 * 64
        assert NUMBERS <= forward <= NUMBERS + padding
        times = 2 if recompute else 1
        assert times * NUMBERS <= backward <= times * (NUMBERS + padding)


@on_ranks(2, strategy=STRATEGIES)
def test_all_weights_changed_by_a_step_are_written_in_one_call(strategy: str) -> None:
    model = wrap(_pair(ScaledFloat8)[1], sharding_strategy=strategy)
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
