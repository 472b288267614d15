"""Modules that torch's `parallelize_module` made into DTensors, sharded over data parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megatron_fsdp_v2 import checkpoint
from tests.distributed.test_checkpoint import _digests
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


# -- checkpoints ---------------------------------------------------------------------------------


def _saved(folder: str, shape: tuple[int, ...]) -> dict[str, str]:
    model = sharded(*shape)
    optimizer = _optimizer("adamw", model)
    train(model, optimizer, [data_rank_of(mesh_with_tp(*shape))], range(2))
    checkpoint.save(f"{folder}/ours", model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/torch")
    if dist.get_rank() == 0:
        checkpoint.export(f"{folder}/ours", f"{folder}/plain.pt")
    dist.barrier()
    loaded = torch.load(f"{folder}/plain.pt", weights_only=True)
    for name, param in model.named_parameters():
        assert torch.equal(loaded[name], param.full_tensor()), name
    return _digests(model, optimizer)


def _loaded(folder: str, shape: tuple[int, ...], strategy: str) -> list[dict[str, str]]:
    found = []
    for kind in ("ours", "torch"):
        model = sharded(*shape, model=plain(seed=1), sharding_strategy=strategy)
        optimizer = _optimizer("adamw", model)
        if kind == "ours":
            checkpoint.load(f"{folder}/{kind}", model, optimizer)
        else:
            weights, states = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/{kind}")
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        found.append(_digests(model, optimizer))
    return found


def test_a_checkpoint_loads_bit_equal_at_other_data_and_tensor_parallel_sizes(
    pools: RankPools, tmp_path: Path
) -> None:
    saved = pools(4).run(_saved, str(tmp_path), (2, 2))[0]
    assert saved.keys() > {"embedding.weight", "blocks.1.down.weight.exp_avg_sq"}
    shapes = [(2, 1), (1, 2), (4, 1), (1, 1), (2, 2)]
    for number, shape in enumerate(shapes):
        strategy = STRATEGIES[number % len(STRATEGIES)]
        for ours, torchs in pools(shape[0] * shape[1]).run(_loaded, str(tmp_path), shape, strategy):
            assert ours == saved, shape
            assert torchs == saved, shape
