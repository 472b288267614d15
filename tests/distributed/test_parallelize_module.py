"""Modules that torch's `parallelize_module` made into DTensors, sharded over data parallelism."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as recompute

from megatron_fsdp_v2 import checkpoint, fully_shard
from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.tensor_parallel import REPLICATED, TensorParallelRule, tensor_shards
from tests.distributed.checkpoint_trainings import digests, muon, torch_saves
from tests.distributed.on_ranks import on_ranks
from tests.distributed.tensor_parallel_models import (
    Language,
    assert_loads_everywhere,
    data_rank_of,
    full_error,
    loaded_in_both_ways,
    loss_of,
    mesh_with_tp,
    parallelized,
    plain,
    sharded,
    train,
)
from tests.distributed.wrapping import STRATEGIES, of_all_ranks, said, shards_of
from tests.ranks import RankPools

STEPS = 3


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    if kind == "muon":
        return muon(model, lr=0.02, ns_dtype=torch.float32)
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)


CASES = [(strategy, "sgd") for strategy in STRATEGIES]
CASES += [("optim_grads_params", "adamw"), ("optim_grads_params", "muon")]


@pytest.mark.parametrize(("strategy", "kind"), CASES)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2), (1, 2, 2)], ids=str)
@on_ranks("shape")
def test_training_equals_the_unsharded_loop(
    shape: tuple[int, ...], strategy: str, kind: str
) -> None:
    mesh = mesh_with_tp(*shape)
    model, reference = sharded(*shape, sharding_strategy=strategy), plain()
    ranks = list(range(mesh.size() // shape[-1]))
    mine = train(model, _optimizer(kind, model), [data_rank_of(mesh)], range(STEPS), 0.5)
    theirs = train(reference, _optimizer(kind, reference), ranks, range(STEPS), 0.5)
    tolerance = 1e-5 if kind == "muon" else 1e-6
    assert full_error(model, reference) < tolerance
    assert mine == pytest.approx(theirs, abs=tolerance)


# -- checkpoints ---------------------------------------------------------------------------------


def _saved(folder: str, shape: tuple[int, ...]) -> dict[str, str]:
    model = sharded(*shape)
    optimizer = _optimizer("adamw", model)
    train(model, optimizer, [data_rank_of(mesh_with_tp(*shape))], range(2))
    checkpoint.save(f"{folder}/ours", model, optimizer)
    torch_saves(f"{folder}/torch", model, optimizer)
    if dist.get_rank() == 0:
        checkpoint.export(f"{folder}/ours", f"{folder}/plain.pt")
    dist.barrier()
    loaded = torch.load(f"{folder}/plain.pt", weights_only=True)
    for name, param in model.named_parameters():
        assert torch.equal(loaded[name], param.full_tensor()), name
    return digests(model, optimizer)


def _loaded(folder: str, shape: tuple[int, ...], strategy: str) -> list[dict[str, str]]:
    def made() -> tuple[Any, torch.optim.Optimizer]:
        model = sharded(*shape, model=plain(seed=1), sharding_strategy=strategy)
        return model, _optimizer("adamw", model)

    return loaded_in_both_ways(folder, made)


def test_a_checkpoint_loads_bit_equal_at_other_data_and_tensor_parallel_sizes(
    pools: RankPools, tmp_path: Path
) -> None:
    saved = pools(4).run(_saved, str(tmp_path), (2, 2))[0]
    assert saved.keys() > {"embedding.weight", "blocks.1.down.weight.exp_avg_sq"}
    assert_loads_everywhere(pools, _loaded, tmp_path, saved)


# -- other ways through a step -------------------------------------------------------------------


class _Recomputed(Language):
    use_reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = recompute(block, x, use_reentrant=self.use_reentrant)
        return self.head(self.norm(x))


def _recomputed(use_reentrant: bool) -> Any:
    torch.manual_seed(0)
    model = _Recomputed()
    model.use_reentrant = use_reentrant
    return model


def _frozen() -> Any:
    model = plain()
    model.blocks[0].up.requires_grad_(False)
    return model


VARIANTS: dict[str, Callable[[], Any]] = {
    "recomputed": lambda: sharded(2, 2, model=_recomputed(False)),
    "recomputed, reentrant": lambda: sharded(2, 2, model=_recomputed(True)),
    "outer axis": lambda: sharded(2, 1, 2),
    "outer axis, sharded": lambda: sharded(2, 1, 2, outer_dp_sharding_strategy="optim"),
    "frozen": lambda: sharded(2, 2, model=_frozen()),
}


@on_ranks(4, name=VARIANTS)
def test_recomputation_outer_axes_and_frozen_layers_change_nothing(name: str) -> None:
    model, reference = VARIANTS[name](), _frozen() if name == "frozen" else plain()
    train(model, _optimizer("sgd", model), [data_rank_of(mesh_with_tp(2, 2))], range(2))
    train(reference, _optimizer("sgd", reference), [0, 1], range(2))
    assert full_error(model, reference) < 1e-6


@on_ranks(2)
def test_gathered_parameters_are_dtensors_over_the_tensor_parallel_mesh() -> None:
    model = sharded(1, 2)
    model.blocks[0].down.weight.marked = True
    loss_of(model, 0, 0).backward()
    assert all(type(p.data) is UnevenDTensor for p in model.parameters())
    block = model.blocks[0]
    block.unshard()
    weight = block.up.weight
    assert weight.placements == (Shard(0),)
    assert block.down.weight.placements == (Shard(1),)
    assert block.down.bias.placements == (Replicate(),)
    assert weight.device_mesh.mesh_dim_names == ("tp",)
    assert weight.is_leaf and weight.requires_grad
    assert weight is block._fsdp_unit.groups[0].unsharded_params[2]


@on_ranks(2)
def test_a_state_dict_of_the_parallelized_model_loads_also_into_one_from_meta() -> None:
    with torch.device("meta"):
        skeleton = Language()
    model = sharded(1, 2, model=skeleton)
    for seed, assign in ((3, False), (4, True)):
        given = parallelized(mesh_with_tp(1, 2), plain(seed)).state_dict()
        model.load_state_dict(given, assign=assign)
        loss_of(model, 0, 0)
        assert full_error(model, plain(seed)) == 0.0


@on_ranks(2)
def test_replicated_parameters_from_meta_are_the_same_on_all_tensor_parallel_ranks() -> None:
    # Ranks are seeded differently, as in a training with dropout.
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    mesh = mesh_with_tp(1, 2)
    parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    bias = model[0].bias.to_local().detach()
    assert torch.equal(*of_all_ranks(bias)) and bool(bias.any())


# -- what cannot be sharded ----------------------------------------------------------------------


@on_ranks(4)
def test_norms_over_two_meshes_are_rejected_and_the_advice_works() -> None:
    mesh = mesh_with_tp(2, 2)

    def trained(*, described: bool | None) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        if described is not None:
            plan = {"0": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(model, mesh["tp"], plan)
            rules = [TensorParallelRule(nn.Module, REPLICATED)]
            shards = tensor_shards(model, mesh=mesh, rules=rules) if described else None
            # Units of their own, so that every rank has rows of both.
            for unit in (*model, model):
                fully_shard(unit, mesh=mesh["dp"], tensor_shards=shards)
        model(torch.arange(16.0).view(2, 8)).square().sum().backward()
        return model.parameters()

    def norm(*, described: bool | None) -> float:
        return float(nn.utils.clip_grad_norm_(trained(described=described), 1.0).item())

    rejected = said(ValueError, lambda: norm(described=False))
    ratio = norm(described=True) / norm(described=None)
    assert "gradients over two meshes" in rejected and "REPLICATED" in rejected
    assert ratio == pytest.approx(1.0, rel=1e-5)


@on_ranks(4)
def test_dtensors_that_cannot_be_sharded_are_rejected_by_name() -> None:
    mesh, other = mesh_with_tp(2, 2), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))

    def shard(param: Any, data: Any = None, **options: Any) -> str:
        module = nn.Linear(4, 4, bias=False)
        module.weight = nn.Parameter(param)
        shards = {module.weight: TensorShard(mesh, 0)} if options else None
        return said(
            ValueError,
            lambda: fully_shard(module, mesh=data or mesh["dp"], tensor_shards=shards),
        )

    def over(tensor: Any, *placements: Any, rows: int = 4) -> Any:
        return DTensor.from_local(torch.ones(rows, 4), tensor, placements, run_check=False)

    nameless = init_device_mesh("cpu", (4,))
    same = shard(over(mesh["dp"], Shard(0)))
    other = shard(over(other, Shard(0)))
    found = {
        "still to be summed": shard(over(mesh["tp"], Partial())),
        "parallelize over a 1-D mesh": shard(over(mesh, Replicate(), Shard(0))),
        "mesh['tp']": same,
        "no names of axes": shard(over(mesh["tp"], Shard(0)), data=nameless),
        "unequal parts": shard(distribute_tensor(torch.ones(5, 4), mesh["tp"], [Shard(0)])),
        "leave it out of tensor_shards": shard(over(mesh["tp"], Shard(0)), described=True),
    }
    for text, message in found.items():
        assert "parameter weight" in message and text in message
    assert "shares the ranks" in same
    assert "parameter weight" in other
    assert "shares the ranks" in other or "not an axis of the same mesh" in other


PAGE = Path(__file__).parents[2] / "docs" / "tensor_parallel.md"


@on_ranks(4)
def test_the_documented_example_runs() -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0], names)
    assert all(isinstance(param, UnevenDTensor) for param in names["model"].parameters())


@on_ranks(4)
def test_gathered_dtensors_move_with_the_traced_pool() -> None:
    ranks = [data_rank_of(mesh_with_tp(2, 2))]
    kept = []
    for enable_trace_pool in (False, True):
        model = sharded(2, 2, enable_trace_pool=enable_trace_pool)
        optimizer = _optimizer("adamw", model)
        train(model, optimizer, ranks, range(5))
        before = model.trace_pool().num_allocations if enable_trace_pool else 0
        train(model, optimizer, ranks, range(5, 7))
        kept.append(shards_of(model))
    assert all(map(torch.equal, *kept))
    assert model.trace_pool().num_allocations == before
