"""Units whose parameters are on different meshes: experts on fewer data-parallel ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron_fsdp_v2 import RuntimeOptions, ShardPlacementResult, checkpoint, fully_shard
from megatron_fsdp_v2.runtime.module import unit_of
from tests.cases import QUICK_STRATEGIES, quick_if
from tests.distributed.checkpoint_trainings import muon
from tests.distributed.on_ranks import on_ranks
from tests.distributed.plain_parallel_model import copied, summed
from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    error_message,
    fill,
    loss_of,
    mesh_of,
    of_all_ranks,
    own_loss,
    pair,
    step_all,
    weight_error,
    whole,
    wrap,
)
from tests.ranks import RankPools
from tests.reference.models import INPUT

EXPERTS = 4


@functools.cache
def expert_mesh() -> DeviceMesh:
    """Four ranks; created once, since its groups are never destroyed."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))


def _gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Tokens of all ranks of a group; the backward sums their gradients."""
    others = torch.zeros_like(x)
    own = torch.cat([x if rank == group.rank() else others for rank in range(group.size())])
    return copied(summed(own, group), group)


def _own_sums(x: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's tokens of the sum over a group; the backward gathers the gradients."""
    return summed(copied(x, group), group).chunk(group.size())[group.rank()]


class Mixture(nn.Module):
    """A layer with experts, all of them here or an equal share on every rank of a group."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(INPUT), nn.Linear(INPUT, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, INPUT, INPUT) / 2)
        self.group: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        shares = self.gate(y).softmax(-1)
        up = self.up.to_local() if isinstance(self.up, DTensor) else self.up
        if self.group is not None:
            y, shares = _gathered(y, self.group), _gathered(shares, self.group)
            shares = shares.chunk(self.group.size(), -1)[self.group.rank()]
        made = torch.einsum("ti,eio,te->to", y, up, shares)
        return x + (made if self.group is None else _own_sums(made, self.group))


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Mixture(), Mixture(), nn.Linear(INPUT, 3))


def sharded(kind: str, dense: tuple[int, ...] = (4,), **options: Any) -> Any:
    """The model on 4 ranks, its experts on 2 x 2: plain tensors, or DTensors over `ep`."""
    model, mesh = build(), expert_mesh()
    for layer in model[:2]:
        layer.group = mesh.get_group("ep")
        share = layer.up.detach().chunk(2)[layer.group.rank()].clone()
        if kind == "dtensor":
            share = distribute_tensor(layer.up.detach(), mesh["ep"], [Shard(0)])
        layer.up = nn.Parameter(share)
    experts = {id(layer.up) for layer in model[:2]}
    # Of torch, or the mesh itself.
    info: Any = FSDPMeshInfo(mesh["edp"], shard_mesh_dim=0) if kind == "dtensor" else mesh["edp"]

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), info) if id(param) in experts else None

    for unit in (*model[:2], model):
        fully_shard(
            unit,
            mesh=mesh_of(*dense),
            shard_placement_fn=place,
            gradient_scaling_factor=1 / 4,
            **options,
        )
    model[0].set_modules_to_forward_prefetch([model[1]])
    model[1].set_modules_to_backward_prefetch([model[0]])
    return model


def _optimizer(kind: str, model: nn.Module) -> Any:
    if kind == "muon":
        return muon(model, lr=0.02, ns_dtype=torch.float32)
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def _train(model: nn.Module, optimizer: Any, ranks: list[int], steps: range) -> list[float]:
    """Train on the mean loss of data-parallel ranks; return norms before clipping."""
    norms = []
    for step in steps:
        for rank in ranks:
            (model(batch(rank, step)).square().mean() / len(ranks)).backward()
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)).item())
        step_all(optimizer)
    return norms


def _error(model: nn.Module, plain: nn.Module) -> float:
    """Largest difference from the whole weights. Collective."""
    errors = []
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        full, wanted = whole(mine).detach(), theirs
        if full.shape != wanted.shape:
            wanted = theirs.chunk(2)[expert_mesh().get_local_rank("ep")]
        errors.append(float((full - wanted).abs().max()))
    return max(errors)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "dense"),
    [
        *(
            quick_if(strategy in QUICK_STRATEGIES, strategy, "adamw", dense)
            for strategy in STRATEGIES
            for dense in ((4,), (2, 2))
        ),
        ("optim_grads_params", "muon", (4,)),
    ],
)
@on_ranks(4, kind=["plain", "dtensor"])
def test_training_equals_the_plain_loop(
    kind: str, strategy: str, optimizer: str, dense: tuple[int, ...]
) -> None:
    plain, options = build(), RuntimeOptions(check_ranks="always")
    model = sharded(kind, dense, sharding_strategy=strategy, options=options)
    sizes = {group.spec.mesh.size() for group in unit_of(model[0]).groups}
    mine = _train(model, _optimizer(optimizer, model), [dist.get_rank()], range(3))
    theirs = _train(plain, _optimizer(optimizer, plain), [0, 1, 2, 3], range(3))
    tolerance = 1e-5 if optimizer == "muon" else 1e-6
    assert sizes == {2, 4}
    assert mine == pytest.approx(theirs, rel=tolerance)
    assert _error(model, plain) < tolerance


def _saved(folder: str) -> None:
    model = sharded("dtensor")
    optimizer = _optimizer("adamw", model)
    _train(model, optimizer, [dist.get_rank()], range(1))
    checkpoint.save(folder, model, optimizer)


def _resumed(folder: str, strategy: str) -> float:
    plain = build()
    optimizers = [_optimizer("adamw", plain)]
    _train(plain, optimizers[0], [0, 1, 2, 3], range(2))
    if dist.get_world_size() == 4:
        model: Any = sharded("dtensor", (2, 2), sharding_strategy=strategy)
    else:
        model = wrap(build(), ())
    optimizers.append(_optimizer("adamw", model))
    checkpoint.load(folder, model, optimizers[1])
    ranks = [dist.get_rank()] if dist.get_world_size() == 4 else [0, 1, 2, 3]
    _train(model, optimizers[1], ranks, range(1, 2))
    return _error(model, plain)


def test_a_checkpoint_resumes_at_other_meshes(pools: RankPools, tmp_path: Path) -> None:
    pools(4).run(_saved, str(tmp_path / "one"))
    errors = pools(4).run(_resumed, str(tmp_path / "one"), "optim")
    errors += pools(1).run(_resumed, str(tmp_path / "one"), "optim_grads_params")
    assert max(errors) < 1e-6


@on_ranks(4)
def test_what_cannot_distinguish_meshes_is_rejected_by_name(tmp_path: Path) -> None:
    model, of_one_rank = sharded("plain"), build()
    for layer in of_one_rank[:2]:
        layer.up = nn.Parameter(layer.up.detach()[:2])
    checkpoint.save(tmp_path / "one", of_one_rank)
    loaded = error_message(ValueError, lambda: checkpoint.load(tmp_path / "one", model))
    # Even if all experts have the same values.
    fill(model, 0.0)
    saved = error_message(ValueError, lambda: checkpoint.save(tmp_path / "two", model))
    hook = error_message(ValueError, lambda: model[0].set_all_reduce_hook(print))
    for text in (loaded, saved):
        assert "ranks 0 and 1 have different parameters named 0.up" in text
    assert "0 (Mixture) are sharded over different meshes" in hook


@on_ranks(4)
def test_parameters_of_one_unit_are_sharded_and_replicated() -> None:
    plain, model = pair(
        units=lambda m: m.blocks,
        mesh=mesh_of(4),
        shard_placement_fn=lambda param: Replicate() if param.ndim == 1 else Shard(1),
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3) for m in (plain, model)]
    for step in range(2):
        for rank in range(4):
            (loss_of(plain, rank, step) / 4).backward()
        with model.no_sync():
            (own_loss(model, step) / 2).backward()
        (own_loss(model, step) / 2).backward()
        norms = [whole(nn.utils.clip_grad_norm_(m.parameters(), 0.1)) for m in (plain, model)]
        step_all(*optimizers)
    placements = {param.placements for param in model.parameters()}
    large = nn.Module()
    large.up = nn.Parameter(torch.randn(2, 50, 100))
    rejected = error_message(
        ValueError,
        lambda: fully_shard(large, mesh=mesh_of(4), shard_placement_fn=lambda param: Shard(-1)),
    )
    assert placements == {(Shard(0),), (Replicate(),)}
    assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-6)
    assert weight_error(model, plain) < 1e-6
    assert "some of the 4 ranks would hold 5000 elements, where 2500 would be" in rejected


@on_ranks(4)
def test_meta_experts_get_the_values_of_the_first_rank_of_their_mesh() -> None:
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    layer[2].weight = layer[1].weight
    edp = expert_mesh()["edp"]

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(None, edp) if param is layer[1].weight else None

    fully_shard(layer[1], mesh=edp)
    fully_shard(layer, mesh=mesh_of(4), shard_placement_fn=place)
    layer(torch.ones(1, 4)).sum().backward()
    dense, expert = ([*of_all_ranks(layer[i].weight.full_tensor())] for i in (0, 2))
    scales = [layer[i]._fsdp_unit.groups[0].spec.scale for i in (1,)]
    assert all(torch.equal(dense[0], other) for other in dense)
    assert torch.equal(expert[0], expert[2]) and torch.equal(expert[1], expert[3])
    assert not torch.equal(expert[0], expert[1])
    assert scales == [1 / 2]
    assert layer[1].weight is layer[2].weight


@on_ranks(4)
def test_an_overflow_of_experts_is_found_on_all_ranks() -> None:
    model = sharded("plain", (2, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = _optimizer("adamw", model)
    before = [whole(param).clone() for param in model.parameters()]
    scaler.scale(model(batch(dist.get_rank())).square().mean()).backward()
    if dist.get_rank() == 1 and model[0].up.grad.to_local().numel():
        model[0].up.grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 0.5
    assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), before, strict=True))
