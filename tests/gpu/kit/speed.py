"""Step time, MFU and memory of models of 1 and 8 billion parameters, beside those of peers."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import engines
from benchmarks.cases import Case, Setting
from benchmarks.model import batches
from tests.gpu.kit.machine import device_of, mesh_of
from tests.gpu.kit.running import Outcome, Request, Status, on_ranks
from tests.ranks import RankFailure

MODELS = {
    "1B": Setting("1B", Case(18, 2048, vocabulary=32768, batch=2, length=2048), "bf16"),
    "8B": Setting(
        "8B", Case(38, 4096, vocabulary=32768, batch=1, length=2048), "bf16", recomputes=True
    ),
}
TINY = {"1B": Setting("1B", Case(2, 64, vocabulary=64, batch=1, length=8), "bf16")}
ZERO_3 = "optim_grads_params"
ENGINES = (engines.BASELINE, f"{engines.V1}, {ZERO_3}", f"ours, {ZERO_3}")
STATE_NBYTES = 20
"""Of a parameter: main weight and gradient, two moments of Adam, and weights in bf16, padded."""
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "H20": 148e12, "B200": 2250e12}
"""Dense bf16, as NVIDIA's data sheets have it; the longest name that fits counts."""


def num_params(case: Case) -> int:
    """Parameters of a transformer: matrices, biases and norms, embedding and output layer."""
    width = case.width
    layer = 12 * width**2 + 13 * width
    return case.layers * layer + (2 * width + 1) * case.vocabulary


def flops_of(setting: Setting) -> float:
    """Of a step on one rank: 6 for each parameter and token, and attention; nothing twice.

    What is recomputed does not count, as MFU has it.
    """
    case = setting.shape
    tokens = case.batch * case.length * setting.micro_batches
    products = num_params(case) - case.width * case.vocabulary
    return 6.0 * tokens * (products + case.layers * case.width * case.length)


def peak_flops(device: str) -> float | None:
    """What this rank's device can do at most; None where that is not known."""
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name()
    known = [key for key in PEAK_FLOPS if key in name]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def measured(device: str, engine: str, setting: Setting, steps: int) -> dict[str, Any]:
    """Seconds of a step, and bytes at its peak, on this rank."""
    on_cuda = device == "cuda"
    training = engines.build(engine, setting, mesh_of(device, (dist.get_world_size(),)))
    times = []
    for step in range(steps + 2):
        inputs = batches(setting, dist.get_rank(), step, device)
        if on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        began = time.perf_counter()
        with engines.ENGINES[engine].context(device):
            training.step(inputs)
        if on_cuda:
            torch.cuda.synchronize()
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
    """Bytes of a GPU that are free."""
    return torch.cuda.mem_get_info(device_of(device))[0] if device == "cuda" else 0


def run(model: str, request: Request) -> Outcome:
    """Every engine in processes of its own; measured, not judged, but ours has to run."""
    setting = MODELS[model] if request.on_cuda else TINY["1B"]
    setting = Setting(**{**vars(setting), "ranks": request.ranks})
    if request.on_cuda:
        free = min(on_ranks(request, request.ranks, free_nbytes, request.device))
        params = num_params(setting.shape)
        # Engines are handed a whole model, in fp32, on the device.
        needed = params * max(STATE_NBYTES / request.ranks + 6, 4)
        if free < needed:
            return Outcome(Status.NEEDS_RANKS, f"{needed / 2**30:.0f} GiB of each GPU")
    found, failed = {}, {}
    for engine in ENGINES if not request.is_small else ENGINES[-1:]:
        steps = 10 if request.on_cuda else 1
        try:
            ranks = on_ranks(
                request, request.ranks, measured, request.device, engine, setting, steps
            )
        except RankFailure as failure:
            failed[engine] = str(failure).strip().splitlines()[-1]
            continue
        found[engine] = {name: max(of[name] for of in ranks) for name in ranks[0]}
        if "mfu" in ranks[0]:
            found[engine]["mfu"] = min(of["mfu"] for of in ranks)
    text = "; ".join(
        f"{engine}: " + ", ".join(f"{name} {value:.3g}" for name, value in of.items())
        for engine, of in found.items()
    )
    text += "".join(f"; {engine} failed: {why}" for engine, why in failed.items())
    return Outcome.of(ENGINES[-1] in found, text, engines=found)
