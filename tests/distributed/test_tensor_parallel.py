"""Modules of plain tensor-parallel parts, described by a table of rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import Partial, Shard

from megatron_fsdp_v2 import checkpoint, fully_shard
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.tensor_parallel import (
    COLUMN,
    NORM_RULES,
    REPLICATED,
    FusedShard,
    TensorParallelRule,
    tensor_shards,
)
from tests.distributed.checkpoint_trainings import digests
from tests.distributed.on_ranks import on_ranks
from tests.distributed.plain_parallel_model import CUT, RULES, WORDS, Column, parts, whole
from tests.distributed.tensor_parallel_models import (
    assert_loads_everywhere,
    data_axes,
    data_rank_of,
    mesh_with_tp,
    train,
)
from tests.distributed.wrapping import STRATEGIES, said
from tests.ranks import RankPools

STEPS = 3


def _sharded(shape: tuple[int, ...], strategy: str = "optim_grads_params", seed: int = 0) -> Any:
    mesh = mesh_with_tp(*shape)
    model = parts(mesh, seed)
    for unit in (model.experts_up, model):
        shards = tensor_shards(unit, mesh=mesh, rules=RULES)
        fully_shard(unit, mesh=data_axes(mesh), sharding_strategy=strategy, tensor_shards=shards)
    return model


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def _train(model: Any, optimizer: Any, data_ranks: list[int], steps: int) -> list[float]:
    return train(model, optimizer, data_ranks, range(steps), clips=1.0, loss=_loss)


def _loss(model: Any, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss: torch.Tensor = model(torch.randint(WORDS, (5,), generator=generator)).square().mean()
    return loss


CASES = [*((strategy, "sgd") for strategy in STRATEGIES), ("optim_grads_params", "adamw")]


@pytest.mark.parametrize(("strategy", "kind"), CASES)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2)], ids=str)
@on_ranks("shape")
def test_training_equals_the_unsharded_loop(
    shape: tuple[int, ...], strategy: str, kind: str
) -> None:
    mesh = mesh_with_tp(*shape)
    model, reference = _sharded(shape, strategy), whole()
    mine = _train(model, _optimizer(kind, model), [data_rank_of(mesh)], STEPS)
    ranks = list(range(mesh.size() // shape[-1]))
    theirs = _train(reference, _optimizer(kind, reference), ranks, STEPS)
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert float((param.full_tensor() - expected[name]).abs().max()) < 1e-6, name
    assert mine == pytest.approx(theirs, rel=1e-6)


@on_ranks(2)
def test_every_parameter_is_described_and_stacked_weights_are_cut_one_dimension_on() -> None:
    mesh = mesh_with_tp(1, 2)
    model = parts(mesh)
    shards = tensor_shards(model, mesh=mesh, rules=RULES)
    found = {name: shards[param] for name, param in model.named_parameters()}
    assert found.keys() == {name for name, _ in whole().named_parameters()}
    assert {name: s.dim for name, s in found.items() if s.dim is not None} == CUT
    assert found["experts_up.weight"].dim == 1
    assert len(found["gated.weight"].pieces) == 2
    assert "experts_up.bias" not in found


# -- checkpoints ---------------------------------------------------------------------------------


def _saved(folder: str, shape: tuple[int, ...]) -> dict[str, str]:
    model = _sharded(shape)
    optimizer = _optimizer("adamw", model)
    _train(model, optimizer, [data_rank_of(mesh_with_tp(*shape))], 2)
    checkpoint.save(f"{folder}/ours", model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    weights = {name: value for name, value in weights.items() if "_extra_state" not in name}
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/torch")
    return digests(model, optimizer)


def _loaded(folder: str, shape: tuple[int, ...], strategy: str) -> list[dict[str, str]]:
    found = []
    for kind in ("ours", "torch"):
        model = _sharded(shape, strategy, seed=1)
        optimizer = _optimizer("adamw", model)
        if kind == "ours":
            checkpoint.load(f"{folder}/{kind}", model, optimizer)
        else:
            weights, states = get_state_dict(model, optimizer)
            extra = {n: weights.pop(n) for n in list(weights) if "_extra_state" in n}
            dcp.load({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/{kind}")
            weights |= extra
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        found.append(digests(model, optimizer))
    return found


def test_a_checkpoint_loads_bit_equal_at_other_data_and_tensor_parallel_sizes(
    pools: RankPools, tmp_path: Path
) -> None:
    saved = pools(4).run(_saved, str(tmp_path), (2, 2))[0]
    stored = CheckpointFolder(tmp_path / "ours").metadata.state_dict_metadata
    assert not any("_extra_state" in key for key in stored)
    assert_loads_everywhere(pools, _loaded, tmp_path, saved)


class _WithEmptyParameters(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.none = nn.Parameter(torch.empty(0))
        self.no_rows = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.none.sum() + self.no_rows.sum()


@on_ranks(2)
def test_parameters_without_elements_are_in_a_checkpoint_and_have_no_state(tmp_path: Path) -> None:
    def made() -> tuple[Any, torch.optim.Optimizer]:
        model = fully_shard(_WithEmptyParameters(), mesh=mesh_with_tp(2, 1)["dp"])
        return model, _optimizer("adamw", model)

    model, optimizer = made()
    model(torch.ones(2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert not any(param in optimizer.state for param in (model.none, model.no_rows))
    checkpoint.save(f"{tmp_path}/ours", model, optimizer)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{tmp_path}/torch")
    for kind in ("ours", "torch"):
        fresh, other = made()
        if kind == "ours":
            checkpoint.load(f"{tmp_path}/{kind}", fresh, other)
        else:
            dcp.load({"model": fresh.state_dict()}, checkpoint_id=f"{tmp_path}/{kind}")
        assert torch.equal(fresh.weight.full_tensor(), model.weight.full_tensor())
    stored = CheckpointFolder(tmp_path / "ours").metadata.state_dict_metadata
    assert stored["model.no_rows"].size == (0, 3)
    assert not any(key.startswith("optimizer.state.no") for key in stored)


# -- tables that do not fit ----------------------------------------------------------------------


@on_ranks(2)
def test_a_table_that_does_not_fit_is_rejected_by_name() -> None:
    mesh = mesh_with_tp(1, 2)

    def described(module: nn.Module, *rules: TensorParallelRule, over: Any = mesh) -> str:
        return said(ValueError, lambda: tensor_shards(module, mesh=over, rules=rules))

    tied = nn.ModuleDict({"column": Column(4, 4), "linear": nn.Linear(4, 4, bias=False)})
    tied["linear"].weight = tied["column"].weight
    for text, placements in {
        "has no pattern for it": {"kernel": Shard(0)},
        "has no dimension 2": {"*": Shard(2)},
        "use Shard, Replicate or FusedShard": {"*": Partial()},
        "does not fall into 3 equal pieces": {"*": FusedShard(0, 3)},
    }.items():
        assert text in described(Column(4, 4), TensorParallelRule(Column, placements))
    no_rule = described(nn.Sequential(nn.Linear(4, 4)), *RULES)
    assert "parameter 0.weight of shape (4, 4) of Linear: no rule matches" in no_rule
    linear = TensorParallelRule(nn.Linear, REPLICATED)
    assert "linear.weight is tied" in described(tied, *RULES, linear)
    one_axis = described(nn.LayerNorm(4), *NORM_RULES, over=mesh["tp"])
    assert "then the tensor-parallel one" in one_axis
    for cls in ("Linear", torch.Tensor):
        assert "import path" in said(ValueError, lambda cls=cls: TensorParallelRule(cls, COLUMN))
