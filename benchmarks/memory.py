"""Memory of a training compared with FSDP2, on a CPU: at rest, at the peak of a step, building.

The bytes of live storages on rank 0 are counted in the same way for all contenders, one after the
other. At rest means after `optimizer.step()` and `optimizer.zero_grad()`. Building means creating
and sharding the model.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.cases import TRANSFORMER, Setting
from benchmarks.engines import BASELINE, ENGINES, build
from benchmarks.live_bytes import LiveBytes
from benchmarks.model import batches

COLUMNS = ("building", "at rest", "peak")
STEPS = 5
"""Steps, of which the last is measured; a traced pool is complete from the fourth step on."""
COMPARED = [
    BASELINE,
    "FSDP2, optim_grads",
    "Megatron-FSDP v1, optim_grads_params",
    "Megatron-FSDP v2, experimental",
    "ours, optim_grads_params",
    "ours, optim_grads_params, pool",
    "ours, max_live_grad_buffers=1",
    "ours, that and without prefetch",
    "ours, optim_grads",
]
"""Contenders; the first, FSDP2 at ZeRO-3, is the baseline."""


def measure(name: str, setting: Setting, mesh: DeviceMesh) -> dict[str, int]:
    """Return the bytes while building an engine's model, at rest, and at the peak of a step."""
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as meter:
            with meter.peak_of():
                training = build(name, setting, mesh)
            found = {"building": meter.peak}
            for step in range(STEPS):
                inputs = batches(setting, dist.get_rank(), step)
                with ENGINES[name].context(mesh.device_type), meter.peak_of():
                    training.step(inputs)
            return found | {"at rest": meter.now, "peak": meter.peak}
    finally:
        gc.enable()


def work(mesh: DeviceMesh, args: argparse.Namespace, path: str) -> None:
    """Measure all contenders on every rank; rank 0 writes a line of JSON."""
    del args
    found: dict[str, dict[str, dict[str, int]]] = {}
    for dtype in ("fp32", "bf16"):
        setting = Setting("transformer", TRANSFORMER, dtype, ranks=mesh.size())
        found[dtype] = {name: measure(name, setting, mesh) for name in COMPARED}
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found) + "\n")
