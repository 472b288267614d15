"""The CPU's all-gather: by broadcasts side by side, where there is much to gather."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.comm import backends
from megatron_fsdp_v2.comm.calls import all_gather_single, broadcast_shards, is_gloo
from megatron_fsdp_v2.comm.interface import Axis, Collective, CollectiveKind, CommStream
from tests.distributed.on_ranks import on_ranks

NUMEL = 1001
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.bool)


def _shard(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2, (NUMEL,), generator=generator).to(dtype)


def _counted(calls: Counter[str]) -> Any:
    """Count what torch is asked for, while the context lasts."""

    def counting(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    names = ("broadcast", "all_gather_into_tensor", "all_gather_single")
    return mock.patch.multiple(dist, **{n: counting(n) for n in names if n in vars(dist)})


@pytest.mark.parametrize("async_op", [False, True], ids=["waits", "async"])
@pytest.mark.parametrize("is_in_place", [False, True], ids=["elsewhere", "in_place"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks("world_size", world_size=[1, 2, 3, 4])
def test_broadcasts_gather_what_an_all_gather_does(
    world_size: int, dtype: torch.dtype, is_in_place: bool, async_op: bool
) -> None:
    rank = dist.get_rank()
    output = torch.zeros(world_size * NUMEL, dtype=dtype)
    shard = _shard(rank, dtype)
    if is_in_place:
        shard = output.narrow(0, rank * NUMEL, NUMEL).copy_(shard)
    group = dist.group.WORLD
    assert group is not None
    work = broadcast_shards(output, shard, group=group, async_op=async_op)
    assert (work is None) != async_op
    if work is not None:
        work.wait()
        assert work.is_completed()
    expected = torch.cat([_shard(other, dtype) for other in range(world_size)])
    assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8))


@on_ranks(4)
def test_ranks_of_a_part_of_the_world_broadcast_among_themselves() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for name in ("outer", "inner"):
        group = mesh.get_group(name)
        by_ring, by_broadcasts = torch.zeros(2, 2 * NUMEL).unbind()
        shard = _shard(dist.get_rank(), torch.float32)
        all_gather_single(by_ring, shard, group=group)
        broadcast_shards(by_broadcasts, shard, group=group)
        assert torch.equal(by_ring, by_broadcasts)


@on_ranks("world_size", world_size=[2, 3])
def test_a_communicator_broadcasts_from_some_size_on(world_size: int) -> None:
    rank = dist.get_rank()
    axis = Axis(dist.group.WORLD, world_size, rank)
    for numel, number in ((64, 0), (backends.BROADCAST_BYTES // 4, world_size)):
        output = torch.zeros(world_size * numel)
        shard = torch.full((numel,), float(rank))
        kind = CollectiveKind.ALL_GATHER
        calls: Counter[str] = Counter()
        with _counted(calls):
            collective = Collective(kind, output, shard, axis, CommStream.GATHER)
            backends.CpuCommunicator().issue(collective, async_op=True).wait()
        assert calls["broadcast"] == number
        assert calls.total() == (number or 1)
        assert output.view(world_size, -1)[:, 0].tolist() == list(range(world_size))


@on_ranks(2, strategy=["optim", "optim_grads", "optim_grads_params"])
def test_a_training_is_the_same_bit_by_bit_by_broadcasts(strategy: str) -> None:
    def trained(smallest: int) -> list[torch.Tensor]:
        calls: Counter[str] = Counter()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16))
        for unit in (*model, model):
            fully_shard(unit, sharding_strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        patched = mock.patch.object(backends, "BROADCAST_BYTES", smallest)
        with patched, _counted(calls):
            for step in range(3):
                torch.manual_seed(10 * step + dist.get_rank())
                model(torch.randn(4, 16)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert (calls["broadcast"] > 0) == (smallest == 1)
        return [param.detach().full_tensor() for param in model.parameters()]

    for ring, broadcast in zip(trained(1 << 30), trained(1), strict=True):
        assert torch.equal(ring, broadcast)


@on_ranks(2)
def test_only_groups_of_gloo_are_taken_for_it() -> None:
    assert is_gloo(dist.group.WORLD)
    assert not is_gloo(dist.new_group(backend="fake"))
