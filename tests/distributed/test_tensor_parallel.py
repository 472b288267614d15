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
from tests.distributed.plain_parallel_model import CUT, RULES, WORDS, Column, parts, whole
from tests.distributed.tensor_parallel_models import (
    assert_loads_everywhere,
    data_axes,
    data_rank_of,
    mesh_with_tp,
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
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        losses = []
        for rank in data_ranks:
            generator = torch.Generator().manual_seed(100 * step + rank)
            losses.append(model(torch.randint(WORDS, (5,), generator=generator)).square().mean())
        torch.stack(losses).mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return norms


def _parity(shape: tuple[int, ...]) -> dict[str, float]:
    mesh = mesh_with_tp(*shape)
    num_data = mesh.size() // shape[-1]
    found = {}
    for strategy, kind in [*((s, "sgd") for s in STRATEGIES), ("optim_grads_params", "adamw")]:
        model, reference = _sharded(shape, strategy), whole()
        mine = _train(model, _optimizer(kind, model), [data_rank_of(mesh)], STEPS)
        theirs = _train(reference, _optimizer(kind, reference), list(range(num_data)), STEPS)
        expected = dict(reference.named_parameters())
        errors = [abs(a / b - 1) for a, b in zip(mine, theirs, strict=True)]
        for name, param in model.named_parameters():
            errors.append(float((param.full_tensor() - expected[name]).abs().max()))
        found[f"{strategy} {kind}"] = max(errors)
    return found


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_training_equals_the_unsharded_loop(pools: RankPools, shape: tuple[int, ...]) -> None:
    for found in pools(torch.Size(shape).numel()).run(_parity, shape):
        assert len(found) == len(STRATEGIES) + 1
        for case, error in found.items():
            assert error < 1e-6, case


def _described() -> dict[str, tuple[Any, ...]]:
    mesh = mesh_with_tp(1, 2)
    model = parts(mesh)
    shards = tensor_shards(model, mesh=mesh, rules=RULES)
    return {
        name: (shards[param].dim, len(shards[param].pieces), tuple(param.shape))
        for name, param in model.named_parameters()
    }


def test_every_parameter_is_described_and_stacked_weights_are_cut_one_dimension_on(
    pools: RankPools,
) -> None:
    expected = {name: p.shape for name, p in whole().named_parameters()}
    for found in pools(2).run(_described):
        assert found.keys() == expected.keys()
        assert {name: dim for name, (dim, _, _) in found.items() if dim is not None} == CUT
        assert found["experts_up.weight"][0] == 1
        assert found["gated.weight"][1] == 2
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


def _empty_parameters(folder: str) -> list[int]:
    def sharded_pair() -> Any:
        model = fully_shard(_WithEmptyParameters(), mesh=mesh_with_tp(2, 1)["dp"])
        return model, _optimizer("adamw", model)

    model, optimizer = sharded_pair()
    model(torch.ones(2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    found = [sum(p in optimizer.state for p in (model.none, model.no_rows))]
    checkpoint.save(f"{folder}/ours", model, optimizer)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/torch")
    for kind in ("ours", "torch"):
        fresh, other = sharded_pair()
        if kind == "ours":
            checkpoint.load(f"{folder}/{kind}", fresh, other)
        else:
            dcp.load({"model": fresh.state_dict()}, checkpoint_id=f"{folder}/{kind}")
        found.append(int(torch.equal(fresh.weight.full_tensor(), model.weight.full_tensor())))
    return found


def test_parameters_without_elements_are_in_a_checkpoint_and_have_no_state(
    pools: RankPools, tmp_path: Path
) -> None:
    for num_states, ours, torchs in pools(2).run(_empty_parameters, str(tmp_path)):
        assert num_states == 0
        assert ours and torchs
    stored = CheckpointFolder(tmp_path / "ours").metadata.state_dict_metadata
    assert stored["model.no_rows"].size == (0, 3)
    assert not any(key.startswith("optimizer.state.no") for key in stored)


# -- tables that do not fit ----------------------------------------------------------------------


def _misfits() -> list[str]:
    mesh = mesh_with_tp(1, 2)

    def described(module: nn.Module, *rules: TensorParallelRule, over: Any = mesh) -> str:
        return said(ValueError, lambda: tensor_shards(module, mesh=over, rules=rules))

    tied = nn.ModuleDict({"column": Column(4, 4), "linear": nn.Linear(4, 4, bias=False)})
    tied["linear"].weight = tied["column"].weight
    return [
        described(nn.Sequential(nn.Linear(4, 4)), *RULES),
        described(Column(4, 4), TensorParallelRule(Column, {"kernel": Shard(0)})),
        described(Column(4, 4), TensorParallelRule(Column, {"*": Shard(2)})),
        described(Column(4, 4), TensorParallelRule(Column, {"*": Partial()})),
        described(Column(4, 4), TensorParallelRule(Column, {"*": FusedShard(0, 3)})),
        described(tied, *RULES, TensorParallelRule(nn.Linear, REPLICATED)),
        described(nn.LayerNorm(4), *NORM_RULES, over=mesh["tp"]),
        said(ValueError, lambda: TensorParallelRule("Linear", COLUMN)),
        said(ValueError, lambda: TensorParallelRule(torch.Tensor, COLUMN)),  # type: ignore[arg-type]
    ]


def test_a_table_that_does_not_fit_is_rejected_by_name(pools: RankPools) -> None:
    for no_rule, no_pattern, no_dim, partial, pieces, tied, mesh, path, cls in pools(2).run(
        _misfits
    ):
        assert "parameter 0.weight of shape (4, 4) of Linear: no rule matches" in no_rule
        assert "has no pattern for it" in no_pattern
        assert "has no dimension 2" in no_dim
        assert "use Shard, Replicate or FusedShard" in partial
        assert "does not fall into 3 equal pieces" in pieces
        assert "linear.weight is tied" in tied
        assert "then the tensor-parallel one" in mesh
        assert "import path" in path
        assert "import path" in cls
