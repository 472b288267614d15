"""Other data parallelism around or inside a sharded model; modules run outside of their unit."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_fsdp_v2 import fully_shard
from tests.distributed.wrapping import batch, mesh_of, said, wrap
from tests.ranks import RankPools
from tests.reference.models import INPUT, WIDTH, Stack

CPU = torch.device("cpu")


def wrapped_otherwise() -> dict[str, str]:
    """What is said where another wrapper is around, or inside."""
    named = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))

    def around() -> nn.Module:
        return nn.Sequential(wrap(Stack()), nn.Linear(3, 3))

    def inside(module: nn.Module) -> str:
        return said(ValueError, lambda: fully_shard(nn.Sequential(module), mesh=mesh_of(2)))

    inner = nn.Sequential(nn.Linear(3, 3))
    their_fully_shard(inner[0], mesh=named)
    return {
        "ddp": said(RuntimeError, lambda: DistributedDataParallel(wrap(Stack()))),
        "ddp above": said(RuntimeError, lambda: DistributedDataParallel(around())),
        "fsdp1": said(RuntimeError, lambda: FullyShardedDataParallel(wrap(Stack()), device_id=CPU)),
        "fsdp1 above": said(
            RuntimeError, lambda: FullyShardedDataParallel(around(), device_id=CPU)
        ),
        "fsdp2 above": said(RuntimeError, lambda: their_fully_shard(around(), mesh=named)),
        "ddp inside": inside(DistributedDataParallel(nn.Linear(3, 3))),
        "fsdp1 inside": inside(FullyShardedDataParallel(nn.Linear(3, 3), device_id=CPU)),
        "fsdp2 inside": inside(inner),
        "ddp itself": said(
            ValueError,
            lambda: fully_shard(DistributedDataParallel(nn.Linear(3, 3)), mesh=mesh_of(2)),
        ),
    }


EXPECTED = {
    "ddp": "DistributedDataParallel was called on a module that is, or contains, a FSDPStack",
    "ddp above": "DistributedDataParallel was called on a module that is, or contains, a FSDPStack",
    "fsdp1": "FullyShardedDataParallel (FSDP1) was called on a module",
    "fsdp1 above": "FullyShardedDataParallel (FSDP1) was called on a module",
    "fsdp2 above": "torch.distributed.fsdp.fully_shard was called on a module",
    "ddp inside": "0 (DistributedDataParallel) reduces its gradients through",
    "fsdp1 inside": "0 (FullyShardedDataParallel) reduces its gradients through",
    "fsdp2 inside": "0.0 (FSDPLinear) reduces its gradients through torch.distributed.fsdp.fully_",
    "ddp itself": "the module (DistributedDataParallel) reduces its gradients",
}


def test_other_wrappers_around_and_inside_are_named(pools: RankPools) -> None:
    for found in pools(2).run(wrapped_otherwise):
        assert found.keys() == EXPECTED.keys()
        for name, expected in EXPECTED.items():
            assert expected in found[name], name


def run_at_rest() -> tuple[dict[str, str], bool]:
    """What is said where a part of a unit is run by itself; whether it runs between unshard()s."""
    model: Any = wrap(Stack())
    block, x = model.blocks[1], torch.randn(2, WIDTH)
    embedding: Any = fully_shard(nn.Sequential(nn.Embedding(9, WIDTH)), mesh=mesh_of(2))

    def weight() -> Any:
        return nn.functional.linear(batch(0), model.input.weight)

    found = {
        "weight": said(RuntimeError, weight),
        "linear": said(RuntimeError, lambda: block.up(x)),
        "norm": said(RuntimeError, lambda: block.norm(x)),
        "table": said(RuntimeError, lambda: embedding[0](torch.tensor([1, 2]))),
        "product": said(RuntimeError, lambda: torch.matmul(torch.randn(2, INPUT), block.up.weight)),
    }
    # What has another reason keeps its message.
    found["shape"] = said(RuntimeError, lambda: model.input.weight.view(-1, 11))
    block.unshard()
    runs = block.up(x).shape == (2, 2 * WIDTH + 1)
    block.reshard()
    return found, runs


def test_a_module_run_outside_of_its_units_forward_is_named(pools: RankPools) -> None:
    for found, runs in pools(2).run(run_at_rest):
        names = {
            "weight": "input.weight of FSDPStack",
            "linear": "up.weight of blocks.1",
            "norm": "norm.weight of blocks.1",
            "table": "0.weight of FSDPSequential",
            "product": "up.weight of blocks.1",
        }
        for case, name in names.items():
            assert "which is sharded: this rank holds some of its rows" in found[case], case
            assert "unshard()" in found[case] and "register_fsdp_forward_method" in found[case]
            assert f"computes with {name.replace('FSDP', '')}" in found[case], found[case]
        assert "which is sharded" not in found["shape"]
        assert runs
