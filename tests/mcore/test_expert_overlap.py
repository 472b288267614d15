"""`--overlap-moe-expert-parallel-comm`: layers run part by part, and train as with DDP."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_fsdp_v2.runtime.fsdp_module import named_units
from tests.cases import quick_only
from tests.mcore import flags as f
from tests.mcore.overlapped import train_in_fp32, train_with_late_gradients
from tests.mcore.session import distance
from tests.mcore.trained import assert_close, trained
from tests.ranks import RankPools

EXPERTS = (
    f"{f.ALLTOALL} {f.EP2} --moe-grouped-gemm --overlap-moe-expert-parallel-comm "
    "--moe-router-load-balancing-type none --train-iters 2 --global-batch-size 16"
)
POOLED = f"{f.OVERLAP} --fsdp-unshard-prefetch-depth 2 --fsdp-trace-pool"
EARLY = "--ep-overlap-early-attn-memory-release"
LONGER = "--global-batch-size 32 --train-iters 3"


def _gathered(model: Any, optimizer: Any) -> list[str]:
    """Units that stayed gathered after a training."""
    del optimizer
    units = (pair for chunk in model for pair in named_units(chunk))
    return [name for name, unit in units if unit.is_unsharded]


def _trains_like_ddp(megatron: RankPools, ranks: int, mine: f.Flags, both: str) -> None:
    """Check against DDP that runs the same schedule."""
    theirs = trained(megatron, ranks, EXPERTS, both, by=train_in_fp32, once=True)
    ours = trained(megatron, ranks, EXPERTS, both, mine, by=train_in_fp32, probe=_gathered)
    assert ours.extras == [[]] * ranks
    assert bool(ours.evaluations) == ("--eval-interval" in both)
    assert_close(ours, theirs)


@pytest.mark.parametrize("strategy", quick_only(f.STRATEGIES, f.ZERO3))
def test_experts_that_overlap_train_like_ddp(megatron: RankPools, strategy: str) -> None:
    _trains_like_ddp(megatron, 2, f.fsdp(strategy), "")


@pytest.mark.functional
@pytest.mark.parametrize(
    ("mine", "both"),
    [
        (f.OVERLAP, LONGER),
        (POOLED, LONGER),
        (f.HSDP, ""),
        ("", f.VPP2),
        (f.OVERLAP, f.VPP2),
        ("", f"{f.TP2_SP} --expert-tensor-parallel-size 1"),
        (f.OVERLAP, "--num-layers 3 --moe-layer-freq [0,1,1]"),
        (f.OVERLAP, f"--moe-shared-expert-intermediate-size 64 {EARLY}"),
        (f.OVERLAP, "--recompute-granularity selective --recompute-modules layernorm moe_act"),
        (f.OVERLAP, f.MTP),
        ("", "--eval-interval 1 --eval-iters 1 --calculate-per-token-loss"),
    ],
)
def test_experts_that_overlap_train_like_ddp_with_other_features(
    megatron: RankPools, mine: str, both: str
) -> None:
    _trains_like_ddp(megatron, 4, f.fsdp(f.ZERO3, mine), both)


@pytest.mark.parametrize("strategy", quick_only(f.STRATEGIES, f.ZERO3))
def test_gradients_of_weights_that_are_made_late_are_those_of_ddp(
    megatron: RankPools, strategy: str
) -> None:
    theirs = trained(megatron, 2, EXPERTS, "", by=train_in_fp32, once=True)
    ours = trained(megatron, 2, EXPERTS, f.fsdp(strategy), by=train_with_late_gradients)
    assert_close(ours, theirs)
    # Of two layers; four micro-batches in each of two steps.
    for made in ours.extras:
        assert len(made) == 3 * 2 * 4 * 2, made


@pytest.mark.functional
def test_experts_that_overlap_train_in_bf16_within_ddps_own_spread(megatron: RankPools) -> None:
    flags = [EXPERTS, "--bf16 --train-iters 3"]
    ddp = trained(megatron, 2, *flags)
    spread = trained(megatron, 2, *flags, "--use-distributed-optimizer")
    ours = trained(megatron, 2, *flags, f.fsdp())
    losses = max(1e-3, 1.5 * distance(spread.losses, ddp.losses))
    norms = max(1e-3, 1.5 * distance(spread.grad_norms, ddp.grad_norms))
    assert distance(ours.losses, ddp.losses) <= losses
    assert distance(ours.grad_norms, ddp.grad_norms) <= norms
