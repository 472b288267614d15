"""Modules that torch's `parallelize_module` made into DTensors, sharded over data parallelism."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as recompute

from megatron_fsdp_v2 import checkpoint, fully_shard
from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.optim import Muon
from megatron_fsdp_v2.tensor_parallel import REPLICATED, TensorParallelRule, tensor_shards
from tests.distributed.checkpoint_trainings import digests
from tests.distributed.tensor_parallel_models import (
    Language,
    assert_loads_everywhere,
    data_rank_of,
    loss_of,
    mesh_with_tp,
    parallelized,
    plain,
    sharded,
    train,
)
from tests.distributed.wrapping import STRATEGIES, said
from tests.ranks import RankPools

STEPS = 3


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    if kind == "muon":
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        groups = [{"params": matrices}, {"params": others, "use_muon": False}]
        return Muon(groups, lr=0.02, ns_dtype=torch.float32)
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)


def _clip(model: nn.Module, norms: list[float]) -> None:
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())


def _weight_error(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((p.full_tensor() - q).abs().max()) for p, q in pairs)


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
            clip = partial(_clip, mine, seen)
            train(mine, _optimizer(kind, mine), ranks, range(STEPS), clip)
        errors = [abs(a - b) for a, b in zip(*norms, strict=True)]
        found[f"{strategy} {kind}"] = max(*errors, _weight_error(model, reference))
    return found


CASES = [(strategy, "sgd") for strategy in STRATEGIES]
CASES += [("optim_grads_params", "adamw"), ("optim_grads_params", "muon")]


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2), (1, 2, 2)], ids=str)
def test_training_equals_the_unsharded_loop(pools: RankPools, shape: tuple[int, ...]) -> None:
    for found in pools(torch.Size(shape).numel()).run(_parity, shape, CASES):
        assert len(found) == len(CASES)
        for case, error in found.items():
            assert error < (1e-5 if "muon" in case else 1e-6), case


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
    return digests(model, optimizer)


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
        found.append(digests(model, optimizer))
    return found


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


def _variants() -> dict[str, float]:
    mesh, hybrid = mesh_with_tp(2, 2), mesh_with_tp(2, 1, 2)
    frozen = plain()
    frozen.blocks[0].up.requires_grad_(False)
    models = {
        "recomputed": sharded(2, 2, model=_recomputed(False)),
        "recomputed, reentrant": sharded(2, 2, model=_recomputed(True)),
        "outer axis": sharded(2, 1, 2),
        "outer axis, sharded": sharded(2, 1, 2, outer_dp_sharding_strategy="optim"),
        "frozen": sharded(2, 2, model=frozen),
    }
    assert hybrid.ndim == 3
    found = {}
    for name, model in models.items():
        reference = plain()
        reference.blocks[0].up.requires_grad_(name != "frozen")
        train(model, _optimizer("sgd", model), [data_rank_of(mesh)], range(2))
        train(reference, _optimizer("sgd", reference), [0, 1], range(2))
        found[name] = _weight_error(model, reference)
    return found


def test_recomputation_outer_axes_and_frozen_layers_change_nothing(pools: RankPools) -> None:
    for found in pools(4).run(_variants):
        assert len(found) == 5
        for name, error in found.items():
            assert error < 1e-6, name


def _gathered() -> dict[str, bool]:
    model = sharded(1, 2)
    model.blocks[0].down.weight.marked = True
    loss_of(model, 0, 0).backward()
    facts = {"sharded": all(type(p.data) is UnevenDTensor for p in model.parameters())}
    block = model.blocks[0]
    block.unshard()
    facts |= {
        "column": block.up.weight.placements == (Shard(0),),
        "row": block.down.weight.placements == (Shard(1),),
        "bias": block.down.bias.placements == (Replicate(),),
        "mesh": block.up.weight.device_mesh.mesh_dim_names == ("tp",),
        "leaf": block.up.weight.is_leaf and block.up.weight.requires_grad,
        "same object": block.up.weight is block._fsdp_unit.groups[0].unsharded_params[2],
    }
    block.reshard()
    return facts


def test_gathered_parameters_are_dtensors_over_the_tensor_parallel_mesh(pools: RankPools) -> None:
    for facts in pools(2).run(_gathered):
        assert all(facts.values()), facts


def _from_elsewhere() -> dict[str, float]:
    mesh = mesh_with_tp(1, 2)
    found = {}
    with torch.device("meta"):
        skeleton = Language()
    model = sharded(1, 2, model=skeleton)
    for assign in (False, True):
        seed = 3 + assign
        model.load_state_dict(parallelized(mesh, plain(seed)).state_dict(), assign=assign)
        loss_of(model, 0, 0)
        found[f"assign={assign}"] = _weight_error(model, plain(seed))
    return found


def test_a_state_dict_of_the_parallelized_model_loads_also_into_one_from_meta(
    pools: RankPools,
) -> None:
    for found in pools(2).run(_from_elsewhere):
        assert found == {"assign=False": 0.0, "assign=True": 0.0}


def _meta_replicas() -> bool:
    # Ranks are seeded differently, as in a training with dropout.
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    mesh = mesh_with_tp(1, 2)
    parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    bias = model[0].bias.to_local().detach()
    both = [torch.empty_like(bias) for _ in range(2)]
    dist.all_gather(both, bias)
    return torch.equal(*both) and bool(bias.any())


def test_replicated_parameters_from_meta_are_the_same_on_all_tensor_parallel_ranks(
    pools: RankPools,
) -> None:
    assert pools(2).run(_meta_replicas) == [True, True]


# -- what cannot be sharded ----------------------------------------------------------------------


def _beside_plain_ones() -> list[Any]:
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

    return [
        said(ValueError, lambda: norm(described=False)),
        norm(described=True) / norm(described=None),
    ]


def test_norms_over_two_meshes_are_rejected_and_the_advice_works(pools: RankPools) -> None:
    for rejected, ratio in pools(4).run(_beside_plain_ones):
        assert "gradients over two meshes" in rejected and "REPLICATED" in rejected
        assert ratio == pytest.approx(1.0, rel=1e-5)


def _rejected() -> list[str]:
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

    return [
        shard(over(mesh["tp"], Partial())),
        shard(over(mesh, Replicate(), Shard(0))),
        shard(over(mesh["dp"], Shard(0))),
        shard(over(other, Shard(0))),
        shard(over(mesh["tp"], Shard(0)), data=init_device_mesh("cpu", (4,))),
        shard(distribute_tensor(torch.ones(5, 4), mesh["tp"], [Shard(0)])),
        shard(over(mesh["tp"], Shard(0)), described=True),
    ]


def test_dtensors_that_cannot_be_sharded_are_rejected_by_name(pools: RankPools) -> None:
    for unsummed, two_axes, same, other, nameless, uneven, twice in pools(4).run(_rejected):
        for text in (unsummed, two_axes, same, other, nameless, uneven, twice):
            assert "parameter weight" in text
        assert "still to be summed" in unsummed
        assert "parallelize over a 1-D mesh" in two_axes
        assert "shares the ranks" in same and "mesh['tp']" in same
        assert "shares the ranks" in other or "not an axis of the same mesh" in other
        assert "no names of axes" in nameless
        assert "unequal parts" in uneven
        assert "leave it out of tensor_shards" in twice


PAGE = Path(__file__).parents[2] / "docs" / "tensor_parallel.md"


def _documented(code: str) -> bool:
    names: dict[str, Any] = {}
    exec(code, names)
    return all(isinstance(param, UnevenDTensor) for param in names["model"].parameters())


def test_the_documented_example_runs(pools: RankPools) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert all(pools(4).run(_documented, code))


def _pooled(shape: tuple[int, ...]) -> tuple[bool, int]:
    """Whether the traced pool changes no bit, and its allocations once it is planned."""
    ranks = [data_rank_of(mesh_with_tp(*shape))]
    kept, allocations = [], 0
    for enable_trace_pool in (False, True):
        model = sharded(*shape, enable_trace_pool=enable_trace_pool)
        optimizer = _optimizer("adamw", model)
        train(model, optimizer, ranks, range(5))
        before = model.trace_pool().num_allocations if enable_trace_pool else 0
        train(model, optimizer, ranks, range(5, 7))
        after = model.trace_pool().num_allocations if enable_trace_pool else 0
        allocations += after - before
        kept.append([p.to_local().clone() for p in model.parameters()])
    return all(map(torch.equal, *kept)), allocations


def test_gathered_dtensors_move_with_the_traced_pool(pools: RankPools) -> None:
    for same, allocations in pools(4).run(_pooled, (2, 2)):
        assert same
        assert allocations == 0
