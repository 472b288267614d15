"""What a save costs: bytes written, and how long training waits for a save beside it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint import saving
from megatron_fsdp_v2.checkpoint.verifying import verify
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from tests.distributed.checkpoint_trainings import digests, net, train
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import mesh_of, wrap
from tests.ranks import RankPools

MOST_BYTES = 1.02
"""Bytes written over bytes of state."""


@on_ranks(2)
def test_little_more_is_written_than_there_is_state(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    layers = [nn.Linear(512, 512, bias=False) for _ in range(4)]
    model = wrap(nn.Sequential(*layers), units=layers, mesh=mesh_of(dist.get_world_size()))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    checkpoint.save(folder, model, optimizer)
    tensors: list[Any] = [*model.parameters()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, UnevenDTensor)]
    local = torch.tensor(sum(tensor.to_local().nbytes for tensor in tensors))
    dist.all_reduce(local)
    nbytes = int(local)
    written = sum(file.stat().st_size for file in Path(folder).iterdir())
    assert nbytes == 3 * 4 * 512 * 512 * 4
    assert nbytes < written <= MOST_BYTES * nbytes


@on_ranks(2)
def test_training_waits_for_a_copy_and_for_no_writing(tmp_path: Path) -> None:
    """A save whose writing may not begin before training has gone on."""
    folder = str(tmp_path / "saved")
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, 2)
    saved = digests(model, optimizer)
    may_write = threading.Event()
    saving._BACKGROUND.submit(may_write.wait)
    future = checkpoint.save(folder, model, optimizer, async_save=True)
    assert future is not None
    facts = [not future.done(), not list(Path(folder).parent.rglob("*.distcp"))]
    train(model, optimizer, 2, first=2)
    facts.append(digests(model, optimizer) != saved)
    dist.barrier()
    may_write.set()
    future.result()
    checkpoint.load(folder, model, optimizer)
    facts = [*facts, digests(model, optimizer) == saved]
    assert facts == [True] * 4


def _several_at_once(folder: str) -> list[Any]:
    model = net(width=64)
    futures = []
    for number in range(5):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(number)
        path = f"{folder}/{number}"
        futures.append(checkpoint.save(path, model, extra=number, async_save=True))
    blocking = checkpoint.save(f"{folder}/blocking", model, extra="blocking")
    found: list[Any] = [blocking]
    for number, future in enumerate(futures):
        assert future is not None
        future.result()
        extra = checkpoint.load(f"{folder}/{number}", model)
        values = torch.cat([p.full_tensor().flatten() for p in model.parameters()]).unique()
        found.append((extra, values.tolist()))
    return found


def test_saves_that_run_at_once_do_not_meet(pools: RankPools, tmp_path: Path) -> None:
    for found in pools(3).run(_several_at_once, str(tmp_path)):
        assert found == [None, *((number, [float(number)]) for number in range(5))]
    assert all(verify(path).is_good for path in tmp_path.iterdir())
