"""A training of which one rank misbehaves in its third step; `test_hangs.py` runs it."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.diagnostics import watch_collectives

FAULTY, STEP = 1, 2


class Model(nn.Module):
    """Layers of one size, or of several: gloo ends a process that communicates another size."""

    def __init__(self, how: str) -> None:
        super().__init__()
        widths = (8, 16, 24, 32) if how == "skips a larger layer" else (8, 8, 8, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)) for width in widths
        )

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """Run the layers in order."""
        layers = list(self.layers)
        if how in ("skips", "skips a larger layer"):
            del layers[2]
        for layer in layers:
            x = layer(x)
        return x


def next_batch(how: str) -> torch.Tensor:
    """Return a batch; a faulty rank's data loader hangs, or is slow."""
    if how in ("loads", "is slow"):
        time.sleep(100 if how == "loads" else 4)
    return torch.ones(2, 4)


def main(rank: int, num_ranks: int, how: str, folder: Path) -> None:
    """Train five steps on one rank."""
    torch.set_num_threads(1)
    # gloo prints where it ends the process.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    # Ranks start at different times; the timeout is that of collectives.
    store.add("started", 1)
    while store.add("started", 0) < num_ranks:
        time.sleep(0.05)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=8)
    )
    watch_collectives(folder / "reports", stalled_after_s=2)
    torch.manual_seed(0)
    model = Model(how)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for step in range(5):
        fault = how if (rank, step) == (FAULTY, STEP) else ""
        if fault == "dies":
            os._exit(3)
        model(next_batch(fault), fault).sum().backward()
        model.zero_grad()
