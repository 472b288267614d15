"""Uneven DTensors answer for all ranks' rows, and hand that on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.dtensor.row_shards import RowShards
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from tests.ranks import RankPools
from tests.reference.models import Stack


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def _uneven(full: torch.Tensor, ranges: tuple[tuple[int, int], ...]) -> UnevenDTensor:
    start, end = ranges[dist.get_rank()]
    return UnevenDTensor.from_rows(
        full[start:end].clone(), _mesh(), RowShards(ranges, (1,)), tuple(full.shape)
    )


def gathers_and_hands_on() -> bool:
    full = torch.arange(20.0).view(5, 4)
    tensor = _uneven(full, ((0, 0), (0, 4), (4, 5)))
    param = torch.nn.Parameter(tensor)
    doubled = param.detach() * 2
    checks = [
        type(param) is UnevenDTensor,
        torch.equal(param.full_tensor(), full),
        torch.equal(doubled.full_tensor(), full * 2),
        torch.equal(torch.zeros_like(param).full_tensor(), torch.zeros(5, 4)),
        float(torch.linalg.vector_norm(param.detach()).full_tensor())
        == pytest.approx(float(full.norm()), rel=1e-6),
    ]
    with torch.no_grad():
        param.copy_(full + 1)
    checks.append(torch.equal(param.full_tensor(), full + 1))
    other = _uneven(full * 3, ((0, 2), (2, 3), (3, 5)))
    with torch.no_grad():
        param.copy_(other)
    checks.append(torch.equal(param.full_tensor(), full * 3))
    try:
        param.detach() + other
    except ValueError as error:
        checks.append("sharded differently" in str(error))
    return all(checks) and len(checks) == 8


def test_rows_are_gathered_and_handed_on_also_from_empty_shards(pools: RankPools) -> None:
    assert all(pools(3).run(gathers_and_hands_on))


def _model() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Stack()
    for block in model.blocks:
        fully_shard(block, mesh=_mesh())
    fully_shard(model, mesh=_mesh())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _train(model: Any, optimizer: Any, steps: range) -> list[torch.Tensor]:
    outputs = []
    for step in steps:
        torch.manual_seed(step)
        inputs = torch.randn(12, 5).chunk(dist.get_world_size())[dist.get_rank()]
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        outputs.append(torch.cat([p.full_tensor().flatten() for p in model.parameters()]).detach())
    return outputs


def save(folder: str) -> torch.Tensor:
    """Train, save with torch's own calls, train on."""
    model, optimizer = _model()
    _train(model, optimizer, range(2))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return _train(model, optimizer, range(2, 4))[-1]


def load(folder: str) -> torch.Tensor:
    """Load into a fresh model at this world size, train on."""
    model, optimizer = _model()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return _train(model, optimizer, range(2, 4))[-1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_torchs_own_checkpoint_calls_reshard(
    pools: RankPools, tmp_path: Path, world_size: int
) -> None:
    uninterrupted = pools(2).run(save, str(tmp_path))[0]
    resumed = pools(world_size).run(load, str(tmp_path))[0]
    torch.testing.assert_close(resumed, uninterrupted, rtol=1e-5, atol=1e-6)
