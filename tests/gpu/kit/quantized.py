"""Weights gathered as FP8 and FP4: the bytes of quantizing whole weights, for every recipe."""

from __future__ import annotations

import itertools

import torch

from tests.gpu.kit.running import Check, Outcome, Request, Status, on_ranks
from tests.mcore.quantized import differing_bytes

RECIPES = {"tensorwise": 8.9, "delayed": 8.9, "blockwise": 9.0, "mxfp8": 10.0, "nvfp4": 10.0}
"""By the compute capability that Transformer Engine's kernels need."""
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def capability(device: str) -> float:
    """Of this rank's GPU; that of a rehearsal, which can do all."""
    if device != "cuda":
        return max(RECIPES.values())
    major, minor = torch.cuda.get_device_capability()
    return major + minor / 10


def run(request: Request) -> Outcome:
    """Bytes and scales after two steps, of every recipe, strategy and mesh."""
    if not request.has_te:
        return Outcome(Status.NEEDS_LAYERS, "FP8 is part of Transformer Engine")
    able = on_ranks(request, 1, capability, request.device)[0]
    recipes = [name for name, needed in RECIPES.items() if able >= needed]
    outer = ("", "no_shard", "optim") if request.ranks >= 4 else ("",)
    cases = [
        (recipe, strategy, axis)
        for recipe, strategy, axis in itertools.product(recipes, STRATEGIES, outer)
        if (strategy, axis) != (STRATEGIES[0], "optim")
    ]
    if request.is_small:
        cases = [(recipes[0], STRATEGIES[-1], "")]
    wrong = []
    for recipe, strategy, axis in cases:
        words = (recipe, strategy, 2, 2 if axis else 1, request.device, axis or "optim")
        found = on_ranks(request, request.ranks, differing_bytes, *words)
        if any(found):
            where = sorted({field for fields in found for field in fields})
            wrong.append(f"{recipe}, {strategy}, outer axis {axis or 'none'}: {', '.join(where)}")
    return Outcome.of(not wrong, "; ".join(wrong) or f"{len(cases)} cases have the same bytes")


CHECK = Check(
    "FP8 bytes",
    "gathered bytes and scales are those of quantizing whole weights, for every recipe, strategy, "
    "HSDP and HFSDP",
    run,
    least_ranks=2,
)
