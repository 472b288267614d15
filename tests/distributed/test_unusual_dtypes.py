"""Parameters and gradients that are neither dense nor of a dtype that every backend knows."""

from __future__ import annotations

from typing import Any, override

import pytest
import torch
from torch import nn

from megatron_fsdp_v2 import MixedPrecisionPolicy
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    backward_both,
    held_error,
    mesh_of,
    pair,
    said,
    step_all,
    weight_error,
    wrap,
)


class Quantized(nn.Module):
    """A frozen weight of another dtype, its scale, and a trained layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.linspace(-2, 2, 35).view(7, 5)
        values = torch.complex(values, 2 * values) if dtype.is_complex else values
        self.weight = nn.Parameter(values.to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor([0.5]), requires_grad=False)
        self.layer = nn.Linear(7, 3)

    @override
    def forward(self, x: torch.Tensor) -> Any:
        weight = self.weight.abs() if self.weight.is_complex() else self.weight
        self.seen = self.weight.dtype
        # Only as wide as what it is multiplied with.
        return self.layer(x @ weight.to(x.dtype).t() * self.scale.to(x.dtype))


FROZEN = [
    (torch.float8_e4m3fn, False, (2,)),
    (torch.float8_e5m2, True, (2,)),
    (torch.float8_e4m3fn, True, (2, 2)),
    (torch.complex64, False, (2,)),
    (torch.complex128, False, (2, 2)),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("dtype", "casts", "shape"), FROZEN)
@on_ranks("shape")
def test_a_frozen_weight_of_any_dtype_is_gathered_bit_by_bit(
    dtype: torch.dtype, casts: bool, shape: tuple[int, ...], strategy: str
) -> None:
    options: dict[str, Any] = {"sharding_strategy": strategy, "mesh": mesh_of(*shape)}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if casts else None)
    plain, model = pair(lambda: Quantized(dtype), lambda m: [], mp_policy=policy, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    x = torch.linspace(-1, 1, 20).view(4, 5)
    for _ in range(3):
        for either in (plain, model):
            either(x).float().square().mean().backward()
        step_all(*optimizers)
    with torch.no_grad():
        model(x)
    full, frozen = model.weight.full_tensor(), plain.weight.detach()
    assert held_error(model.layer.weight, plain.layer.weight) < (0.05 if casts else 1e-6)
    assert bool((full.view(torch.uint8) == frozen.view(torch.uint8)).all())
    assert model.seen == dtype


@on_ranks(2)
def test_trained_complex_and_8_bit_weights_are_rejected_by_name() -> None:
    found = []
    for dtype in (torch.complex64, torch.float8_e4m3fn):
        model = Quantized(dtype)
        model.weight = nn.Parameter(model.weight.detach())
        found.append(said(ValueError, lambda model=model: wrap(model, [])))
    complex_one, small = found
    assert "parameter weight is complex (torch.complex64) and trained" in complex_one
    assert "parameter weight is of 8 bits (torch.float8_e4m3fn) and trained" in small


class Sparse(nn.Module):
    """An embedding with sparse gradients, used twice, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4, sparse=True)
        self.layer = nn.Linear(4, 4)

    @override
    def forward(self, tokens: torch.Tensor) -> Any:
        return self.layer(self.table(tokens)) + self.table(tokens.flip(0))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_sparse_gradients_train_as_in_a_plain_model(strategy: str) -> None:
    options = {"sharding_strategy": strategy}
    plain, model = pair(lambda: Sparse().double(), lambda m: [m.table], **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        return model(torch.arange(4) * (step + rank + 1) % 11).square().mean()

    for step in range(6):
        backward_both(plain, model, step, loss)
        if step % 2:
            step_all(*optimizers)
    assert weight_error(model, plain) < 1e-12
