"""Transformer Engine's kernels, and apex's, add weight gradients to the flat gradient buffer."""

from __future__ import annotations

import pytest
import torch

from tests.cases import longer
from tests.mcore import flags as f
from tests.mcore import te_modules
from tests.mcore.flags import ALLTOALL, EP2, FULL_RECOMPUTE, OVERLAP, UNTIED, ZERO3, fsdp, words
from tests.mcore.trained import assert_close, assert_equal, on_te, trained
from tests.ranks import RankPools

TE = words(f.TRANSFORMER_ENGINE, "--train-iters 3")
APART = "--no-gradient-accumulation-fusion"


@pytest.mark.parametrize("fuses", [True, longer(False)], ids=["fused", "apart"])
@pytest.mark.parametrize("dtype", [longer(torch.float32), torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("micro_batches", "recomputes"),
    [longer(1, ""), (4, ""), (4, "reentrant"), longer(4, "non-reentrant")],
)
@on_te("world_size", world_size=[longer(1), 2])
def test_gradients_of_every_module_and_strategy_are_those_of_the_unsharded_module(
    world_size: int, micro_batches: int, recomputes: str, dtype: torch.dtype, fuses: bool
) -> None:
    """Bit for bit. In bf16, what is fused is rounded to fp32, and what is apart to bf16 before."""
    assert te_modules.wrong_gradients(dtype, micro_batches, recomputes, fuses=fuses) == []


@pytest.mark.functional
def test_in_bf16_one_can_tell_what_is_fused(megatron_te: RankPools) -> None:
    flags = [TE, "--bf16", fsdp()]
    assert trained(megatron_te, 2, *flags).losses != trained(megatron_te, 2, *flags, APART).losses


@pytest.mark.functional
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, "--global-batch-size 2"),
        (1, "--global-batch-size 8"),
        (2, "--global-batch-size 4"),
        (2, f"--global-batch-size 16 {OVERLAP}"),
        (2, f"--global-batch-size 16 {FULL_RECOMPUTE}"),
        (2, f"--global-batch-size 8 {ALLTOALL} --moe-grouped-gemm"),
        (2, f"--global-batch-size 8 {f.TP2_SP}"),
    ],
)
def test_under_megatron_fusing_changes_no_bit_in_fp32(
    megatron_te: RankPools, world_size: int, flags: str
) -> None:
    """The output layer's gradient is apex's kernel's. Tied, autograd would add in another order."""
    common = [TE, UNTIED, flags]
    for strategy in f.STRATEGIES if "--overlap" in flags else (ZERO3,):
        fused = trained(megatron_te, world_size, *common, fsdp(strategy))
        assert_equal(fused, trained(megatron_te, world_size, *common, fsdp(strategy), APART))
    assert_close(fused, trained(megatron_te, world_size, *[TE, UNTIED], flags.replace(OVERLAP, "")))


@pytest.mark.functional
@pytest.mark.parametrize("fusion", ["", APART], ids=["fused", "apart"])
@pytest.mark.parametrize("strategy", [f.ZERO1, ZERO3])
def test_gradients_that_are_made_later_are_the_same(
    megatron_te: RankPools, strategy: str, fusion: str
) -> None:
    """Apart, autograd is given memory for them that nobody has written."""
    overlaps = f"{ALLTOALL} --moe-grouped-gemm {EP2} --overlap-moe-expert-parallel-comm --bf16"
    common = [TE, "--global-batch-size 8", overlaps, fusion, fsdp(strategy)]
    at_once = trained(megatron_te, 2, *common)
    assert_equal(trained(megatron_te, 2, *common, "--delay-wgrad-compute"), at_once)
