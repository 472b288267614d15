"""State dicts of sharded models in files of each rank's own: torch.save, torch.load, copies."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from megatron_fsdp_v2 import fully_shard
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    mesh_of,
    of_all_ranks,
    own_loss,
    said,
    shards_of,
    step_all,
    wrap,
)
from tests.reference.models import Stack, TiedInside


def _model(strategy: str) -> tuple[Any, Any]:
    model = wrap(Stack().double(), sharding_strategy=strategy)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _step(model: Any, optimizer: Any, step: int) -> list[torch.Tensor]:
    own_loss(model, step).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    step_all(optimizer)
    return shards_of(model)


@on_ranks(2, strategy=["no_shard", "optim_grads", "optim_grads_params"])
def test_a_training_goes_on_from_each_ranks_own_file(tmp_path: Path, strategy: str) -> None:
    path = tmp_path / f"{strategy}-{dist.get_rank()}.pt"
    model, optimizer = _model(strategy)
    _step(model, optimizer, 0)
    # Between a forward and its backward, the state dict is of sharded parameters too.
    loss = own_loss(model, 1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    loss.backward()
    optimizer.zero_grad()
    wanted = _step(model, optimizer, 2)
    for assign in (False, True):
        other, resumed = _model(strategy)
        state = torch.load(path, weights_only=True)
        other.load_state_dict(state["model"], assign=assign)
        resumed = torch.optim.AdamW(other.parameters(), lr=0.1)
        resumed.load_state_dict(state["optimizer"])
        assert all(map(torch.equal, wanted, _step(other, resumed, 2)))


def _saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@on_ranks(2, strategy=["no_shard", "optim_grads_params"])
def test_between_forward_and_backward_a_state_dict_has_sharded_parameters_alone(
    strategy: str,
) -> None:
    """Also under the second name of one that a unit shares with its root, which is gathered."""
    model = TiedInside().double()
    wrap(model, [model.embedding, *model.blocks], sharding_strategy=strategy)
    loss, expected = own_loss(model), model.state_dict()
    assert {type(value).__name__ for value in expected.values()} == {"UnevenDTensor"}
    # The gathered ones are back where the backward looks for them.
    assert not isinstance(model.head.weight, DTensor)
    loss.backward()
    assert model.head.weight.grad is not None


@on_ranks(2)
def test_what_one_ranks_file_cannot_be_used_for_is_said() -> None:
    model = wrap(Stack())
    state = model.state_dict()
    loaded = torch.load(_saved(state), weights_only=True)
    files = of_all_ranks(_saved(state).getvalue())
    theirs = torch.load(io.BytesIO(files[1 - dist.get_rank()]), weights_only=True)
    weight = loaded["output.weight"]
    other = fully_shard(Stack(), mesh=mesh_of(2), sharding_strategy="optim")
    copied = copy.deepcopy(state)
    shallow = copy.copy(model.output.weight)
    parameter = pickle.loads(pickle.dumps(model.output.weight))
    with torch.no_grad():
        model.output.weight.zero_()
    rows = said(RuntimeError, lambda: other.load_state_dict(loaded))
    another_rank = said(RuntimeError, lambda: model.load_state_dict(theirs))
    assert "holds other rows than this rank has of the parameter" in rows
    assert "load the file of this rank" in another_rank
    assert "loaded from a file has one rank's rows" in said(RuntimeError, weight.full_tensor)
    flat = said(RuntimeError, lambda: safetensors.torch.save(state))
    assert "Write a gathered state dict" in flat
    assert torch.equal(weight.to_local(), copied["output.weight"].to_local())
    assert bool((copied["output.weight"].to_local() != 0).all())
    assert bool((shallow.to_local() == 0).all()) and isinstance(shallow, nn.Parameter)
    assert isinstance(parameter, nn.Parameter) and parameter.requires_grad


@on_ranks(4)
def test_a_file_holds_tensor_parallel_rows_too() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])

    first, second = build(0), build(1)
    second.load_state_dict(torch.load(_saved(first.state_dict()), weights_only=True))
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert max(float((a.full_tensor() - b.full_tensor()).abs().max()) for a, b in pairs) == 0.0
