"""Modules that torch's `parallelize_module` made into DTensors, sharded over data parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.tensor_parallel_models import (
    data_rank_of,
    mesh_with_tp,
    plain,
    sharded,
    train,
)
from tests.distributed.wrapping import STRATEGIES
from tests.ranks import RankPools

STEPS = 3


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)


def _clip(model: nn.Module) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def _parity(shape: tuple[int, ...], kinds: list[tuple[str, str]]) -> dict[str, float]:
    """Largest difference to one rank's training, of weights and of the norm of gradients."""
    mesh = mesh_with_tp(*shape)
    found = {}
    for strategy, kind in kinds:
        model, reference = sharded(*shape, sharding_strategy=strategy), plain()
        norms: tuple[list[float], list[float]] = ([], [])
        for mine, seen, ranks in (
            (model, norms[0], [data_rank_of(mesh)]),
            (reference, norms[1], list(range(mesh.size() // shape[-1]))),
        ):
            clip = lambda mine=mine, seen=seen: seen.append(_clip(mine).item())
            train(mine, _optimizer(kind, mine), ranks, range(STEPS), clip)
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        errors = [float((p.full_tensor() - q).abs().max()) for p, q in pairs]
        errors += [abs(a - b) for a, b in zip(*norms, strict=True)]
        found[f"{strategy} {kind}"] = max(errors)
    return found


CASES = [(strategy, "sgd") for strategy in STRATEGIES] + [("optim_grads_params", "adamw")]


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2), (1, 2, 2)], ids=str)
def test_training_equals_the_unsharded_loop(pools: RankPools, shape: tuple[int, ...]) -> None:
    for found in pools(torch.Size(shape).numel()).run(_parity, shape, CASES):
        assert len(found) == len(CASES)
        for case, error in found.items():
            assert error < 1e-6, case
