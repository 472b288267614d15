"""Parameters and gradients that are neither dense nor of a dtype that every backend knows."""

from __future__ import annotations

from typing import Any, override

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import MixedPrecisionPolicy
from tests.distributed.wrapping import STRATEGIES, held_error, mesh_of, said, wrap
from tests.ranks import RankPools


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


def trained(dtype: torch.dtype, casts: bool, shape: tuple[int, ...]) -> dict[str, list[Any]]:
    """By strategy: errors of outputs, weights, and whether a frozen weight came back bit by bit."""
    found = {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if casts else None)
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        plain = Quantized(dtype)
        torch.manual_seed(0)
        model = wrap(
            Quantized(dtype), [], sharding_strategy=strategy, mp_policy=policy, mesh=mesh_of(*shape)
        )
        frozen = plain.weight.detach()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
        x = torch.linspace(-1, 1, 20).view(4, 5)
        for _ in range(3):
            (plain(x).square().mean()).backward()
            model(x).float().square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        error = held_error(model.layer.weight, plain.layer.weight)
        with torch.no_grad():
            model(x)
        full = model.weight.full_tensor()
        same = bool((full.view(torch.uint8) == frozen.view(torch.uint8)).all())
        found[strategy] = [error, same, model.seen]
    return found


FROZEN = [
    (torch.float8_e4m3fn, False, (2,)),
    (torch.float8_e5m2, True, (2,)),
    (torch.float8_e4m3fn, True, (2, 2)),
    (torch.complex64, False, (2,)),
    (torch.complex128, False, (2, 2)),
]


@pytest.mark.parametrize(("dtype", "casts", "shape"), FROZEN)
def test_a_frozen_weight_of_any_dtype_is_gathered_bit_by_bit(
    pools: RankPools, dtype: torch.dtype, casts: bool, shape: tuple[int, ...]
) -> None:
    for found in pools(2 * len(shape)).run(trained, dtype, casts, shape):
        for strategy, (error, same, seen) in found.items():
            assert error < (0.05 if casts else 1e-6), strategy
            assert same, strategy
            assert seen == dtype, strategy


def refusals() -> list[str]:
    """What is said of trained parameters that cannot be."""
    found = []
    for dtype in (torch.complex64, torch.float8_e4m3fn):
        model = Quantized(dtype)
        model.weight = nn.Parameter(model.weight.detach())
        found.append(said(ValueError, lambda model=model: wrap(model, [])))
    return found


def test_trained_complex_and_8_bit_weights_are_rejected_by_name(pools: RankPools) -> None:
    for complex_one, small in pools(2).run(refusals):
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


def sparse_gradients() -> dict[str, float]:
    """By strategy: largest error of weights after three steps of two micro-batches."""
    found = {}
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        plain = Sparse().double()
        torch.manual_seed(0)
        built = Sparse().double()
        model = wrap(built, [built.table], sharding_strategy=strategy)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
        size = dist.get_world_size()
        for step in range(6):
            tokens = [torch.arange(4) * (step + rank + 1) % 11 for rank in range(size)]
            for own in tokens:
                (plain(own).square().mean() / size).backward()
            model(tokens[dist.get_rank()]).square().mean().backward()
            if step % 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        found[strategy] = max(held_error(mine, theirs) for mine, theirs in pairs)
    return found


def test_sparse_gradients_train_as_in_a_plain_model(pools: RankPools) -> None:
    for found in pools(2).run(sparse_gradients):
        assert max(found.values()) < 1e-12, found
