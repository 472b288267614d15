"""Step time, MFU and memory of models of 1 and 8 billion parameters, compared with peers."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import engines
from benchmarks.cases import Case, Setting
from benchmarks.model import batches
from tests.gpu.machine import Machine, mesh_of, synchronize
from tests.ranks import RankFailure

MODELS = {
    "1B": Setting("1B", Case(18, 2048, vocabulary=32768, batch=2, length=2048), "bf16"),
    "8B": Setting(
        "8B", Case(38, 4096, vocabulary=32768, batch=1, length=2048), "bf16", recomputes=True
    ),
}
TINY = Setting("tiny", Case(2, 64, vocabulary=64, batch=1, length=8), "bf16")
ZERO_3 = "optim_grads_params"
ENGINES = (engines.BASELINE, f"{engines.V1}, {ZERO_3}", f"ours, {ZERO_3}")
STATE_NBYTES = 20
"""Bytes per parameter: main weight and gradient, two moments of Adam, weights in bf16, padding."""
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "H20": 148e12, "B200": 2250e12}
"""Dense bf16 FLOP/s from NVIDIA's data sheets; the longest matching name counts."""


def num_params(case: Case) -> int:
    """Return the number of parameters of a transformer with embedding and output layer."""
    width = case.width
    layer = 12 * width**2 + 13 * width
    return case.layers * layer + (2 * width + 1) * case.vocabulary


def flops_of(setting: Setting) -> float:
    """Return the FLOPs of a step on one rank: 6 per parameter and token, and attention.

    As in the definition of MFU, recomputation does not count.
    """
    case = setting.shape
    tokens = case.batch * case.length * setting.micro_batches
    products = num_params(case) - case.width * case.vocabulary
    return 6.0 * tokens * (products + case.layers * case.width * case.length)


def peak_flops(device: str) -> float | None:
    """Return the peak FLOP/s of this rank's device; None if unknown."""
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name()
    known = [key for key in PEAK_FLOPS if key in name]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def measured(device: str, engine: str, setting: Setting, steps: int) -> dict[str, Any]:
    """Return the seconds of a step, its peak memory and MFU on this rank."""
    on_cuda = device == "cuda"
    training = engines.build(engine, setting, mesh_of(device))
    times = []
    for step in range(steps + 2):
        inputs = batches(setting, dist.get_rank(), step, device)
        synchronize(device)
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        began = time.perf_counter()
        with engines.ENGINES[engine].context(device):
            training.step(inputs)
        synchronize(device)
        if step >= 2:
            times.append(time.perf_counter() - began)
    seconds = statistics.median(times)
    found = {"step_s": seconds}
    if on_cuda:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    peak = peak_flops(device)
    if peak is not None:
        found["mfu"] = flops_of(setting) / seconds / peak
    return found


def free_nbytes(device: str) -> int:
    """Return the number of free bytes of this rank's GPU."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", MODELS)
def test_model_of_billions_of_parameters_trains_at_a_reported_speed(
    machine: Machine, model: str, engine: str, record_property: Callable[[str, object], None]
) -> None:
    if machine.is_small and engine != ENGINES[-1]:
        pytest.skip("--small")
    setting = MODELS[model] if machine.on_cuda else TINY
    setting = dataclasses.replace(setting, ranks=machine.ranks)
    if machine.on_cuda:
        num = num_params(setting.shape)
        # Each engine receives the full model in fp32 on the device.
        needed = num * max(STATE_NBYTES / machine.ranks + 6, 4)
        if min(machine.run(free_nbytes)) < needed:
            pytest.skip(f"needs {needed / 2**30:.0f} GiB of each GPU")
    try:
        by_rank = machine.run(measured, engine, setting, 10 if machine.on_cuda else 1)
    except RankFailure as failure:
        if engine == ENGINES[-1]:
            raise
        pytest.skip(f"{engine} failed: {str(failure).strip().splitlines()[-1]}")
    for name in by_rank[0]:
        worst = min if name == "mfu" else max
        record_property(name, round(worst(found[name] for found in by_rank), 4))
    machine.require_cuda()
