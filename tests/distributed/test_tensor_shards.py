"""Parameters that tensor parallelism cut before: DTensors over both, of the whole's shape."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from tests.distributed.wrapping import STRATEGIES, mesh_of, said
from tests.ranks import RankPools

HIDDEN, FFN = 6, 12
# Name, shape of the whole, dimension that is cut, number of pieces.
WEIGHTS = {
    "column": ((FFN, HIDDEN), 0, 1),
    "gated": ((2 * FFN, HIDDEN), 0, 2),
    "row": ((HIDDEN, FFN), 1, 1),
    "norm": ((HIDDEN,), None, 1),
}


def _whole(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sorted(WEIGHTS).index(name))
    return torch.randn(WEIGHTS[name][0], generator=generator)


def _part(name: str, rank: int, size: int) -> torch.Tensor:
    whole, (_, dim, num_pieces) = _whole(name), WEIGHTS[name]
    if dim is None:
        return whole
    pieces = torch.chunk(whole, num_pieces, dim)
    return torch.cat([torch.chunk(piece, size, dim)[rank] for piece in pieces], dim)


class _Parts(nn.Module):
    """A tensor-parallel rank's parts; its gradients are a function of the whole weights."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        for name in WEIGHTS:
            self.register_parameter(name, nn.Parameter(_part(name, rank, size).clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() * sum((p**3).sum() for p in self.parameters())  # type: ignore[return-value]


def _meshes(dp: int, tp: int) -> tuple[DeviceMesh, DeviceMesh]:
    mesh = mesh_of(dp, tp)
    return mesh["outer"], mesh


def _sharded(dp: int, tp: int, strategy: str) -> Any:
    data, both = _meshes(dp, tp)
    model = _Parts(both.get_local_rank(1), tp)
    shards = {}
    for name, param in model.named_parameters():
        dim, num_pieces = WEIGHTS[name][1:]
        pieces = (param.shape[0] // num_pieces,) * num_pieces if num_pieces > 1 else ()
        shards[param] = TensorShard(both, dim, pieces)
    return fully_shard(model, mesh=data, sharding_strategy=strategy, tensor_shards=shards)


def _trained(dp: int, tp: int, strategy: str, steps: int = 2) -> tuple[Any, Any]:
    model = _sharded(dp, tp, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3)).backward()
        optimizer.step()
    return model, optimizer


def _reference(steps: int = 2) -> dict[str, torch.Tensor]:
    model = _Parts(0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3)).backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def _global_views(strategy: str) -> list[str]:
    model, optimizer = _trained(2, 2, strategy)
    wrong = []
    for name, expected in _reference().items():
        param = getattr(model, name)
        facts = {
            "shape": tuple(param.shape) == WEIGHTS[name][0],
            "mesh": param.device_mesh.ndim == 2,
            "whole": torch.equal(param.full_tensor(), expected),
            # A rank without rows has no state.
            "state": param not in optimizer.state
            or optimizer.state[param]["exp_avg"].shape == expected.shape,
        }
        wrong += [f"{name}: {fact}" for fact, holds in facts.items() if not holds]
    return wrong


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_are_dtensors_of_the_whole_weight_and_train_like_it(
    pools: RankPools, strategy: str
) -> None:
    for wrong in pools(4).run(_global_views, strategy):
        assert wrong == []


def _norms(strategy: str) -> list[float]:
    model = _sharded(2, 2, strategy)
    model(torch.ones(3)).backward()
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    left = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return [float(total.full_tensor()), float(left.full_tensor())]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_counts_replicated_parameters_once(pools: RankPools, strategy: str) -> None:
    plain = _Parts(0, 1)
    plain(torch.ones(3)).backward()
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    for total, left in pools(4).run(_norms, strategy):
        assert total == pytest.approx(expected, rel=1e-6)
        assert left == pytest.approx(0.5, rel=1e-4)


def _pieces() -> list[bool]:
    model = _sharded(2, 2, "optim_grads_params")
    gate, up = model.gated.pieces()
    whole = _whole("gated")
    return [
        gate.shape == up.shape == (FFN, HIDDEN),
        torch.equal(gate.full_tensor(), whole[:FFN]),
        torch.equal(up.full_tensor(), whole[FFN:]),
        [piece.shape for piece in model.row.pieces()] == [model.row.shape],
    ]


def test_pieces_of_a_gated_layer_are_whole_halves(pools: RankPools) -> None:
    for facts in pools(4).run(_pieces):
        assert all(facts), facts


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    names = {param: name for name, param in model.named_parameters()}
    state = {
        names[param]: {key: entry[key] for key in ("exp_avg", "exp_avg_sq")}
        for param, entry in optimizer.state.items()
    }
    return {"model": dict(model.named_parameters()), "optimizer": state}


def _save(folder: str, dp: int, tp: int, strategy: str) -> None:
    dcp.save(_state(*_trained(dp, tp, strategy)), checkpoint_id=folder)


def _load(folder: str, dp: int, tp: int, strategy: str) -> list[str]:
    model, optimizer = _trained(dp, tp, strategy, steps=1)
    state = _state(model, optimizer)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    dcp.load(state, checkpoint_id=folder)
    wrong = []
    for name, expected in _reference().items():
        if not torch.equal(state["model"][name].full_tensor(), expected):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (1, 4), (2, 2), (2, 1), (1, 2), (1, 1)])
def test_a_checkpoint_loads_at_any_data_and_tensor_parallel_size(
    pools: RankPools, dp: int, tp: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "saved")
        pools(4).run(_save, path, 2, 2, "optim_grads_params")
        for strategy in ("optim_grads_params", "no_shard"):
            for wrong in pools(dp * tp).run(_load, path, dp, tp, strategy):
                assert wrong == []


def _bad_shards() -> list[str]:
    data, both = _meshes(2, 2)

    def shard(**kwargs: Any) -> Any:
        model = nn.Linear(4, 4, bias=False)
        tensor = TensorShard(**{"mesh": both, "dim": 0, **kwargs})
        return fully_shard(model, mesh=data, tensor_shards={model.weight: tensor})

    swapped = DeviceMesh.from_group(
        [both.get_group(1), both.get_group(0)], "cpu", mesh=both.mesh.T, mesh_dim_names=("a", "b")
    )
    return [
        said(ValueError, lambda: shard(mesh=data)),
        said(ValueError, lambda: shard(mesh=swapped)),
        said(ValueError, lambda: shard(dim=2)),
        said(ValueError, lambda: shard(pieces=(1, 2))),
    ]


def test_bad_shards_are_rejected_by_name(pools: RankPools) -> None:
    for one, swapped, dim, pieces in pools(4).run(_bad_shards):
        assert "parameter weight" in one and "one more" in one
        assert "one more" in swapped
        assert "no dimension 2" in dim
        assert "add up to the 4" in pieces


def _separate() -> list[Any]:
    mesh = mesh_of(dist.get_world_size())

    def cuts(rows: int) -> Any:
        model = nn.ModuleDict({"shared": nn.Linear(4, 5), "other": nn.Linear(3, rows)})
        model.__class__ = type("Both", (nn.ModuleDict,), {"forward": lambda self, x: x})
        fully_shard(model, mesh=mesh, separate_params={model["shared"].weight})
        return model["shared"].weight.local_rows

    return [cuts(2), cuts(31)]


def test_a_separate_parameter_is_cut_alike_beside_any_others(pools: RankPools) -> None:
    for few, many in pools(3).run(_separate):
        assert few == many
