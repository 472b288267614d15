"""A training of which one rank misbehaves in its third step; `test_hangs.py` runs it.

python hanging.py HOW FOLDER
"""

from __future__ import annotations

import os
import sys
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
    """Layers of one size: gloo ends a process whose collective has another size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """Run the layers in order."""
        layers = list(self.layers)
        if how == "skips":
            del layers[2]
        for layer in layers:
            x = layer(x)
        return x


def next_batch(how: str) -> torch.Tensor:
    """Return a batch; a faulty rank's data loader hangs, or is slow."""
    if how in ("loads", "is slow"):
        time.sleep(100 if how == "loads" else 4)
    return torch.ones(2, 4)


def main(how: str, folder: Path) -> None:
    """Train five steps."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for step in range(5):
        fault = how if (rank, step) == (FAULTY, STEP) else ""
        if fault == "dies":
            os._exit(3)
        model(next_batch(fault), fault).sum().backward()
        model.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
