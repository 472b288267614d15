"""A long training with many features: memory and step time do not grow."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import checkpoint
from tests.distributed.wrapping import wrap
from tests.processes import num_live_tensors, resident_nbytes
from tests.ranks import RankPools
from tests.reference.models import INPUT, Stack

STEPS = 2000
SAVE_EVERY = 100
EVALUATE_EVERY = 10
MIB = 2**20


def _measurements(seconds: list[float], loss: float) -> dict[str, float]:
    """Return the median step time of a quarter, and memory and counts at its end, on this rank."""
    tensors = num_live_tensors()
    threads, files = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    return {
        "seconds": statistics.median(seconds),
        "resident bytes": resident_nbytes(),
        "tensors": tensors,
        "threads": threads,
        "open files": files,
        "loss": loss,
    }


def soak(folder: str, steps: int) -> list[dict[str, float]]:
    """Train with accumulation, evaluation, asynchronous saves and the pool, on this rank."""
    model = wrap(Stack(4), enable_trace_pool=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    quarters: list[dict[str, float]] = []
    times: list[float] = []
    pending = None
    for step in range(1, steps + 1):
        began = time.perf_counter()
        optimizer.zero_grad()
        for micro in range(2):
            with model.no_sync() if micro == 0 else torch.enable_grad():
                x = torch.randn(8, INPUT, generator=generator)
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - began)
        if step % EVALUATE_EVERY == 0:
            with torch.no_grad():
                model(torch.randn(3, INPUT, generator=generator))
        if step % SAVE_EVERY == 0:
            if pending is not None:
                pending.result()
            path = Path(folder) / f"step_{step}"
            pending = checkpoint.save(path, model, optimizer, extra={"step": step}, async_save=True)
            if dist.get_rank() == 0 and step > 2 * SAVE_EVERY:
                shutil.rmtree(Path(folder) / f"step_{step - 2 * SAVE_EVERY}")
        if step % (steps // 4) == 0:
            if pending is not None:
                pending.result()
            quarters.append(_measurements(times, float(loss.detach())))
            times.clear()
    return quarters


@pytest.mark.functional
def test_long_training_does_not_grow_in_memory_or_step_time(
    pools: RankPools, tmp_path: Path
) -> None:
    for rank, quarters in enumerate(pools(2).run(soak, str(tmp_path), STEPS, timeout_s=400.0)):
        early, late = quarters[1], quarters[3]
        for name in ("tensors", "threads", "open files"):
            assert late[name] <= early[name], (rank, name, quarters)
        # The allocator's arenas fluctuate; one leaked buffer per step would take 10 MiB by now.
        assert late["resident bytes"] <= early["resident bytes"] + 4 * MIB, (rank, quarters)
        # The bound allows for load of other programs, which varies.
        assert late["seconds"] <= 1.5 * early["seconds"], (rank, quarters)
        assert late["loss"] < quarters[0]["loss"]
    assert len(list(tmp_path.glob("step_*"))) == 2
