"""`--overlap-moe-expert-parallel-comm`: layers run part by part, and train as with DDP."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_fsdp_v2.runtime.fsdp_module import named_units
from tests.mcore.overlapped import train_in_fp32, train_with_late_gradients
from tests.mcore.session import MODEL_FLAGS, curves, distance, fsdp, train
from tests.ranks import RankPools

_EXPERTS = """
--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
--disable-bias-linear --moe-grouped-gemm --moe-router-topk 2 --train-iters 3
--overlap-moe-expert-parallel-comm --global-batch-size 16
"""
EXPERTS = _EXPERTS.split()
GATHERED = ["--overlap-grad-reduce", "--overlap-param-gather"]
POOLED = [*GATHERED, "--fsdp-unshard-prefetch-depth", "2", "--fsdp-trace-pool"]
EARLY = "--ep-overlap-early-attn-memory-release"


def _gathered(model: Any, optimizer: Any) -> list[str]:
    """Units that stayed gathered after a training."""
    del optimizer
    units = (pair for chunk in model for pair in named_units(chunk))
    return [name for name, unit in units if unit.is_unsharded]


def _differs(megatron: RankPools, ranks: int, mine: list[str], both: list[str]) -> float:
    """Largest difference from DDP that runs the same schedule."""
    common = [*MODEL_FLAGS, *EXPERTS, *both]
    theirs = curves(megatron(ranks).run(train_in_fp32, common))
    ours = curves(megatron(ranks).run(train_in_fp32, [*common, *mine], _gathered))
    assert ours.extras == [[]] * ranks
    assert bool(ours.evaluations) == ("--eval-interval" in both)
    found = [distance(ours.losses, theirs.losses), distance(ours.grad_norms, theirs.grad_norms)]
    if ours.evaluations:
        found.append(distance(ours.evaluations, theirs.evaluations))
    return max(found)


_OTHERS = ("no_shard", "optim", "optim_grads")
STRATEGIES = [
    *(pytest.param(name, marks=pytest.mark.functional) for name in _OTHERS),
    "optim_grads_params",
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_that_overlap_train_like_ddp(megatron: RankPools, strategy: str) -> None:
    assert _differs(megatron, 2, fsdp(strategy), []) < 1e-6


PIPELINE = "--pipeline-model-parallel-size 2 --num-layers 4"


@pytest.mark.functional
@pytest.mark.parametrize(
    ("mine", "both"),
    [
        (GATHERED, "--global-batch-size 32"),
        (
            [*GATHERED, "--fsdp-unshard-prefetch-depth", "2", "--fsdp-trace-pool"],
            "--global-batch-size 32",
        ),
        (["--num-distributed-optimizer-instances", "2"], ""),
        ([], "--num-layers-per-virtual-pipeline-stage 1 " + PIPELINE),
        (GATHERED, "--num-layers-per-virtual-pipeline-stage 1 " + PIPELINE),
        ([], "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"),
        (GATHERED, "--num-layers 3 --moe-layer-freq [0,1,1]"),
        (GATHERED, f"--moe-shared-expert-intermediate-size 64 {EARLY}"),
        (GATHERED, "--recompute-granularity selective --recompute-modules layernorm moe_act"),
        (GATHERED, "--mtp-num-layers 1 --position-embedding-type rope"),
        ([], "--eval-interval 1 --eval-iters 1 --calculate-per-token-loss"),
    ],
)
def test_experts_that_overlap_train_like_ddp_with_other_features(
    megatron: RankPools, mine: list[str], both: str
) -> None:
    assert _differs(megatron, 4, [*fsdp(), *mine], both.split()) < 1e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_weights_that_are_made_late_are_those_of_ddp(
    megatron: RankPools, strategy: str
) -> None:
    common = [*MODEL_FLAGS, *EXPERTS]
    theirs = curves(megatron(2).run(train_in_fp32, common))
    ours = curves(megatron(2).run(train_with_late_gradients, [*common, *fsdp(strategy)]))
    assert distance(ours.losses, theirs.losses) < 1e-6
    assert distance(ours.grad_norms, theirs.grad_norms) < 1e-6
    # Two layers; four micro-batches in each of three steps.
    for made in ours.extras:
        assert len(made) == 12 * 2 * 3, made


@pytest.mark.functional
def test_experts_that_overlap_train_in_bf16_within_ddps_own_spread(megatron: RankPools) -> None:
    common = [*MODEL_FLAGS, *EXPERTS, "--bf16"]
    ddp = curves(megatron(2).run(train, common))
    spread = curves(megatron(2).run(train, [*common, "--use-distributed-optimizer"]))
    ours = curves(megatron(2).run(train, [*common, *fsdp()]))
    assert distance(ours.losses, ddp.losses) <= max(1e-3, 1.5 * distance(spread.losses, ddp.losses))
    assert distance(ours.grad_norms, ddp.grad_norms) <= max(
        1e-3, 1.5 * distance(spread.grad_norms, ddp.grad_norms)
    )
