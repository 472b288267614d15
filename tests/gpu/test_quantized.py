"""Weights gathered in FP8 and FP4 have the bytes of quantized full weights, for every recipe."""

from __future__ import annotations

import pytest
import torch

from megatron_cpu_rehearsal.te.load import why_not_installed
from tests.distributed.wrapping import STRATEGIES
from tests.gpu.machine import Machine, has_transformer_engine
from tests.mcore.quantized import differing_bytes

RECIPES = {"tensorwise": 8.9, "delayed": 8.9, "blockwise": 9.0, "mxfp8": 10.0, "nvfp4": 10.0}
"""Minimum compute capability of Transformer Engine's kernels, by recipe."""


def capability(device: str) -> float:
    """Return the compute capability of this rank's GPU; the highest one in a rehearsal."""
    if device != "cuda":
        return max(RECIPES.values())
    major, minor = torch.cuda.get_device_capability()
    return major + minor / 10


def differing(device: str, recipe: str, strategy: str, outer: str) -> object:
    """Return the fields of gathered weights that differ from those of quantized full weights."""
    return differing_bytes(recipe, strategy, 2, 2 if outer else 1, device, outer or "optim")


@pytest.mark.parametrize("outer", ["", "no_shard", "optim"], ids=["one axis", "HSDP", "HFSDP"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gathered_bytes_and_scales_equal_those_of_quantized_full_weights(
    machine: Machine, recipe: str, strategy: str, outer: str
) -> None:
    if (strategy, outer) == ("no_shard", "optim"):
        pytest.skip("a replicated optimizer is not sharded along the outer axis")
    if machine.is_small and (recipe, strategy) != ("tensorwise", STRATEGIES[-1]):
        pytest.skip("--small")
    machine.require(4 if outer else 2)
    if not has_transformer_engine() if machine.on_cuda else why_not_installed():
        pytest.skip("needs Transformer Engine")
    if machine.run(capability, ranks=1)[0] < RECIPES[recipe]:
        pytest.skip(f"needs compute capability {RECIPES[recipe]}")
    assert not any(machine.run(differing, recipe, strategy, outer))
