"""State dicts of sharded models in files of each rank's own: torch.save, torch.load, copies."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.wrapping import batch, mesh_of, own_loss, said, wrap
from tests.ranks import RankPools
from tests.reference.models import Stack


def _model(strategy: str) -> tuple[Any, Any]:
    model = wrap(Stack().double(), sharding_strategy=strategy)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _step(model: Any, optimizer: Any, step: int) -> list[torch.Tensor]:
    own_loss(model, step).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return [param.to_local().clone() for param in model.parameters()]


def through_files(folder: str, strategy: str) -> list[bool]:
    """Whether a training goes on bit by bit from files; from assigned ones as well."""
    path = Path(folder) / f"{strategy}-{dist.get_rank()}.pt"
    model, optimizer = _model(strategy)
    _step(model, optimizer, 0)
    # Between a forward and its backward, the state dict is of sharded parameters too.
    loss = model(batch(dist.get_rank(), 1, dtype=torch.float64)).square().mean()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    loss.backward()
    optimizer.zero_grad()
    wanted = _step(model, optimizer, 2)
    same = []
    for assign in (False, True):
        other, resumed = _model(strategy)
        state = torch.load(path, weights_only=True)
        other.load_state_dict(state["model"], assign=assign)
        resumed = torch.optim.AdamW(other.parameters(), lr=0.1)
        resumed.load_state_dict(state["optimizer"])
        same.append(all(map(torch.equal, wanted, _step(other, resumed, 2))))
    return same


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads", "optim_grads_params"])
def test_a_training_goes_on_from_each_ranks_own_file(
    pools: RankPools, tmp_path: Path, strategy: str
) -> None:
    assert pools(2).run(through_files, str(tmp_path), strategy) == [[True, True]] * 2


def _saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def what_a_file_is_told() -> dict[str, Any]:
    """Errors of files used otherwise, and whether copies are copies."""
    model = wrap(Stack())
    state = model.state_dict()
    loaded = torch.load(_saved(state), weights_only=True)
    files: list[Any] = [None] * 2
    dist.all_gather_object(files, _saved(state).getvalue())
    theirs = torch.load(io.BytesIO(files[1 - dist.get_rank()]), weights_only=True)
    weight = loaded["output.weight"]
    other = fully_shard(Stack(), mesh=mesh_of(2), sharding_strategy="optim")
    copied = copy.deepcopy(state)
    shallow = copy.copy(model.output.weight)
    parameter = pickle.loads(pickle.dumps(model.output.weight))
    with torch.no_grad():
        model.output.weight.zero_()
    return {
        "rows": said(RuntimeError, lambda: other.load_state_dict(loaded)),
        "another rank": said(RuntimeError, lambda: model.load_state_dict(theirs)),
        "whole": said(RuntimeError, weight.full_tensor),
        "safetensors": said(RuntimeError, lambda: safetensors.torch.save(state)),
        "same rows": torch.equal(weight.to_local(), copied["output.weight"].to_local()),
        "copied": bool((copied["output.weight"].to_local() != 0).all()),
        "shallow": bool((shallow.to_local() == 0).all()) and isinstance(shallow, nn.Parameter),
        "parameter": isinstance(parameter, nn.Parameter) and parameter.requires_grad,
        "group": unit_of(model).groups[0].name,
    }


def test_what_one_ranks_file_cannot_be_used_for_is_said(pools: RankPools) -> None:
    for found in pools(2).run(what_a_file_is_told):
        assert "holds other rows than this rank has of the parameter" in found["rows"]
        assert "load the file of this rank" in found["another rank"]
        assert "loaded from a file has one rank's rows" in found["whole"]
        assert "Write a gathered state dict" in found["safetensors"]
        assert found["same rows"]
        assert found["copied"] and found["shallow"] and found["parameter"]


def tensor_parallel_file() -> float:
    """Difference of weights loaded from a file, where tensor parallelism cuts them too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])

    first, second = build(0), build(1)
    second.load_state_dict(torch.load(_saved(first.state_dict()), weights_only=True))
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max(float((a.full_tensor() - b.full_tensor()).abs().max()) for a, b in pairs)


def test_a_file_holds_tensor_parallel_rows_too(pools: RankPools) -> None:
    assert pools(4).run(tensor_parallel_file) == [0.0] * 4
