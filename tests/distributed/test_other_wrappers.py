"""Other data parallelism around or inside a sharded model; modules run outside of their unit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_fsdp_v2 import fully_shard
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import batch, mesh_of, said, wrap
from tests.reference.models import INPUT, WIDTH, Stack


@on_ranks(2)
def test_other_wrappers_around_and_inside_are_named() -> None:
    def around() -> nn.Module:
        return nn.Sequential(wrap(Stack()), nn.Linear(3, 3))

    def fsdp1(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"))

    ddp, inner = DistributedDataParallel, nn.Sequential(nn.Linear(3, 3))
    their_fully_shard(inner[0], mesh=mesh_of(2))
    for module in (wrap(Stack()), around()):
        by_ddp = said(RuntimeError, lambda module=module: ddp(module))
        by_fsdp1 = said(RuntimeError, lambda module=module: fsdp1(module))
        assert f"{ddp.__name__} was called on a module that is, or contains, a FSDPStack" in by_ddp
        assert "FullyShardedDataParallel (FSDP1) was called on a module" in by_fsdp1
    by_fsdp2 = said(RuntimeError, lambda: their_fully_shard(around(), mesh=mesh_of(2)))
    assert "torch.distributed.fsdp.fully_shard was called on a module" in by_fsdp2
    reduces = {
        "0 (DistributedDataParallel) reduces its gradients through": ddp(nn.Linear(3, 3)),
        "0 (FullyShardedDataParallel) reduces its gradients through": fsdp1(nn.Linear(3, 3)),
        "0.0 (FSDPLinear) reduces its gradients through torch.distributed.fsdp.fully_": inner,
    }
    for text, module in reduces.items():
        outer = nn.Sequential(module)
        assert text in said(ValueError, lambda outer=outer: fully_shard(outer))
    itself = said(ValueError, lambda: fully_shard(ddp(nn.Linear(3, 3))))
    assert "the module (DistributedDataParallel) reduces its gradients" in itself


@on_ranks(2)
def test_a_module_run_outside_of_its_units_forward_is_named() -> None:
    model: Any = wrap(Stack())
    block, x = model.blocks[1], torch.randn(2, WIDTH)
    embedding: Any = fully_shard(nn.Sequential(nn.Embedding(9, WIDTH)))
    functional = nn.functional
    for name, call in (
        ("input.weight of Stack", lambda: functional.linear(batch(0), model.input.weight)),
        ("up.weight of blocks.1", lambda: block.up(x)),
        ("norm.weight of blocks.1", lambda: block.norm(x)),
        ("0.weight of Sequential", lambda: embedding[0](torch.tensor([1, 2]))),
        ("up.weight of blocks.1", lambda: torch.matmul(torch.randn(2, INPUT), block.up.weight)),
    ):
        text = said(RuntimeError, call)
        assert "which is sharded: this rank holds some of its rows" in text, name
        assert "unshard()" in text and "register_fsdp_forward_method" in text
        assert f"computes with {name}" in text
    # What has another reason keeps its message.
    shape = said(RuntimeError, lambda: model.input.weight.view(-1, 11))
    assert "which is sharded" not in shape and shape != "no error"
    block.unshard()
    assert block.up(x).shape == (2, 2 * WIDTH + 1)
    block.reshard()
