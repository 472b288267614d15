"""Trainings that show whether memory is given back while a collective still uses it.

    python -m tests.distributed.freed_memory out.json [name ...]

trains and writes digests of what came out. With `SETTINGS` in the environment, the C library gives
every larger block pages of its own, and they are gone as soon as it is freed: whoever still uses it
is ended by a signal, or told by the system that the address is bad.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

from tests.distributed.wrapping import BF16, STRATEGIES, mesh_of, step_all, wrap
from tests.ranks import free_port

_TUNABLES = {
    "mmap_threshold": 4096,
    "mmap_max": 1 << 20,
    "top_pad": 0,
    "tcache_count": 0,
    "perturb": 165,
}
SETTINGS = {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={n}" for name, n in _TUNABLES.items())}
RANKS, UNITS, WIDTH, STEPS = 4, 4, 32, 3
LATE_S = 1e-3
"""Up to which a rank is late, each at its own times, so that others' collectives take long."""

_BUCKETS = {"bucket_bytes": 100_000}
_POOL = {"enable_trace_pool": True}
_AHEAD = {"enable_unshard_after_step": True, "unshard_prefetch_depth": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "pool": _POOL,
    "buckets": _BUCKETS,
    "pool and buckets": _POOL | _BUCKETS,
    "ahead": {**_AHEAD, "max_live_grad_buffers": 1},
    "nothing ahead": {"enable_async_reduce_grad": False, "enable_unshard_prefetch": False},
    "bf16": {"mp_policy": BF16},
    "bf16 and buckets": {"mp_policy": BF16, **_BUCKETS},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "recomputed": {},
    "micro-batches": {},
}
_HSDP = {"mesh": (2, 2), "outer_dp_sharding_strategy": "no_shard"}
_HFSDP = {"mesh": (2, 2), "outer_dp_sharding_strategy": "optim"}
_OF_TWO_AXES = ("alone", "pool", "buckets", "micro-batches")


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Strategy and options of every training, by name; on a mesh of two axes, those of 4 ranks."""
    given = list(itertools.product(STRATEGIES, OPTIONS.items()))
    found = {f"{strategy}, {name}": (strategy, options) for strategy, (name, options) in given}
    for strategy, (name, options) in given:
        if name in _OF_TWO_AXES and strategy != "no_shard":
            found[f"{strategy}, {name}, HSDP"] = strategy, options | _HSDP
            found[f"{strategy}, {name}, HFSDP"] = strategy, options | _HFSDP
    return found


class Layer(nn.Module):
    """An MLP that comes late."""

    def __init__(self, late: random.Random) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.late = late
        self.recomputes = False

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """What may be recomputed."""
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `(batch, width)`."""
        self._come_late()
        if self.recomputes and torch.is_grad_enabled():
            x = checkpoint(self.compute, x, use_reentrant=False)
        else:
            x = self.compute(x)
        if x.requires_grad:
            x.register_hook(self._come_late)
        return x

    def _come_late(self, _: Any = None) -> None:
        time.sleep(self.late.random() * LATE_S)


def made(name: str, strategy: str, options: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
    """Model and optimizer of a case."""
    torch.manual_seed(0)
    layers = [Layer(random.Random(dist.get_rank())) for _ in range(UNITS)]
    for layer in layers:
        layer.recomputes = "recomputed" in name
    mesh = mesh_of(*options.get("mesh", (dist.get_world_size(),)))
    given = {**options, "sharding_strategy": strategy, "mesh": mesh}
    model = wrap(nn.Sequential(*layers), layers, **given)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach="bf16" in name)


def train(name: str, strategy: str, options: dict[str, Any]) -> str:
    """Train; a digest of this rank's losses, gradients and weights."""
    model, optimizer = made(name, strategy, options)
    torch.manual_seed(dist.get_rank())
    digest = hashlib.sha256()

    def note(*values: torch.Tensor) -> None:
        for value in values:
            digest.update(value.detach().double().contiguous().numpy().tobytes())

    num_batches = 2 if "micro-batches" in name else 1
    for _ in range(STEPS):
        for left in reversed(range(num_batches)):
            with model.no_sync() if left else contextlib.nullcontext():
                loss = model(torch.randn(4, WIDTH)).square().mean()
                loss.backward()
                note(loss)
        grads = (param.grad for param in model.parameters())
        note(*(grad.to_local() for grad in grads if grad is not None))
        step_all(optimizer)
        with torch.no_grad():
            note(model(torch.randn(4, WIDTH)))
    note(*(param.to_local() for param in model.parameters()))
    return digest.hexdigest()


def _start(rank: int, port: int, path: str, names: list[str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    found = {name: train(name, *case) for name, case in cases().items() if name in names}
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, found)
    if rank == 0:
        Path(path).write_text(json.dumps(every))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = (free_port(), sys.argv[1], sys.argv[2:] or list(cases()))
    # Forked, so that torch is imported once.
    mp.start_processes(_start, arguments, RANKS, start_method="fork")
