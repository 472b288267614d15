"""Parameters that tensor parallelism cut before: DTensors over both, of the whole's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.checkpoint.entries import state_entries
from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, mesh_of, said
from tests.ranks import RankPools
from tests.reference.wrapping_adam import WrappingAdam

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


def _sharded(dp: int, tp: int, strategy: str) -> Any:
    both = mesh_of(dp, tp)
    model = _Parts(both.get_local_rank(1), tp)
    shards = {}
    for name, param in model.named_parameters():
        dim, num_pieces = WEIGHTS[name][1:]
        pieces = (param.shape[0] // num_pieces,) * num_pieces if num_pieces > 1 else ()
        shards[param] = TensorShard(both, dim, pieces)
    return fully_shard(model, mesh=both["outer"], sharding_strategy=strategy, tensor_shards=shards)


def _stepped(model: Any, steps: int = 2) -> tuple[Any, Any]:
    """A model after some steps, and its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3)).backward()
        optimizer.step()
    return model, optimizer


def _wraps(dp: int, tp: int, strategy: str) -> list[tuple[str, str]]:
    """State whose optimizer wrapped it as plain DTensors, as the checkpoint sees it."""
    model = _sharded(dp, tp, strategy)
    optimizer = WrappingAdam(model.parameters(), lr=0.1)
    model(torch.ones(3)).backward()
    optimizer.step()
    entries = state_entries(optimizer, {p: name for name, p in model.named_parameters()})
    return [(name, type(value).__name__) for name, value in entries.items()]


@on_ranks(2, sizes=[(1, 2), (2, 1)], strategy=STRATEGIES)
def test_state_that_an_optimizer_wraps_itself_is_of_the_same_rows(
    sizes: tuple[int, int], strategy: str
) -> None:
    found = _wraps(*sizes, strategy)
    assert len(found) == 2 * len(WEIGHTS)
    assert {kind for _, kind in found} == {"UnevenDTensor"}


def _reference() -> dict[str, torch.Tensor]:
    model, _ = _stepped(_Parts(0, 1))
    return {name: param.detach() for name, param in model.named_parameters()}


@on_ranks(4, strategy=STRATEGIES)
def test_parameters_are_dtensors_of_the_whole_weight_and_train_like_it(strategy: str) -> None:
    model, optimizer = _stepped(_sharded(2, 2, strategy))
    for name, expected in _reference().items():
        param = getattr(model, name)
        assert tuple(param.shape) == WEIGHTS[name][0]
        assert param.device_mesh.ndim == 2
        assert torch.equal(param.full_tensor(), expected)
        # A rank without rows has no state.
        if param in optimizer.state:
            assert optimizer.state[param]["exp_avg"].shape == expected.shape


@on_ranks(4, strategy=STRATEGIES)
def test_clipping_counts_replicated_parameters_once(strategy: str) -> None:
    plain, model = _Parts(0, 1), _sharded(2, 2, strategy)
    for either in (plain, model):
        either(torch.ones(3)).backward()
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
    left = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    left = left.full_tensor()
    assert float(total) == pytest.approx(expected, rel=1e-6)
    assert float(left) == pytest.approx(0.5, rel=1e-4)


@on_ranks(4)
def test_pieces_of_a_gated_layer_are_whole_halves() -> None:
    model = _sharded(2, 2, "optim_grads_params")
    gate, up = model.gated.pieces()
    whole = _whole("gated")
    assert gate.shape == up.shape == (FFN, HIDDEN)
    assert torch.equal(gate.full_tensor(), whole[:FFN])
    assert torch.equal(up.full_tensor(), whole[FFN:])
    assert [piece.shape for piece in model.row.pieces()] == [model.row.shape]


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    names = {param: name for name, param in model.named_parameters()}
    state = {
        names[param]: {key: entry[key] for key in ("exp_avg", "exp_avg_sq")}
        for param, entry in optimizer.state.items()
    }
    return {"model": dict(model.named_parameters()), "optimizer": state}


def _saves(folder: str) -> None:
    model, optimizer = _stepped(_sharded(2, 2, "optim_grads_params"))
    dcp.save(_state(model, optimizer), checkpoint_id=folder)


def check_load(folder: str, dp: int, tp: int, strategy: str) -> None:
    """See that what is loaded over other weights is the reference."""
    model, optimizer = _stepped(_sharded(dp, tp, strategy), steps=1)
    state = _state(model, optimizer)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    dcp.load(state, checkpoint_id=folder)
    for name, expected in _reference().items():
        assert torch.equal(state["model"][name].full_tensor(), expected), name


@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (1, 4), (2, 2), (2, 1), (1, 2), (1, 1)])
def test_a_checkpoint_loads_at_any_data_and_tensor_parallel_size(
    pools: RankPools, tmp_path: Path, dp: int, tp: int
) -> None:
    pools(4).run(_saves, str(tmp_path))
    for strategy in ("optim_grads_params", "no_shard"):
        pools(dp * tp).run(check_load, str(tmp_path), dp, tp, strategy)


@on_ranks(4)
def test_bad_shards_are_rejected_by_name() -> None:
    data, both = mesh_of(2, 2)["outer"], mesh_of(2, 2)

    def shard(**kwargs: Any) -> Any:
        model = nn.Linear(4, 4, bias=False)
        tensor = TensorShard(**{"mesh": both, "dim": 0, **kwargs})
        return fully_shard(model, mesh=data, tensor_shards={model.weight: tensor})

    swapped = DeviceMesh.from_group(
        [both.get_group(1), both.get_group(0)], "cpu", mesh=both.mesh.T, mesh_dim_names=("a", "b")
    )
    one = said(ValueError, lambda: shard(mesh=data))
    assert "parameter weight" in one and "one more" in one
    assert "one more" in said(ValueError, lambda: shard(mesh=swapped))
    assert "no dimension 2" in said(ValueError, lambda: shard(dim=2))
    assert "add up to the 4" in said(ValueError, lambda: shard(pieces=(1, 2)))


@on_ranks(3)
def test_a_separate_parameter_is_cut_alike_beside_any_others() -> None:
    def cuts(rows: int) -> Any:
        model = nn.ModuleDict({"shared": nn.Linear(4, 5), "other": nn.Linear(3, rows)})
        model.__class__ = type("Both", (nn.ModuleDict,), {"forward": lambda self, x: x})
        fully_shard(model, separate_params={model["shared"].weight})
        return model["shared"].weight.local_rows

    assert cuts(2) == cuts(31)
