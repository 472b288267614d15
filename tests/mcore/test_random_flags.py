"""Random combinations of Megatron's flags train as DDP does, or are rejected by name."""

from __future__ import annotations

import pytest

from tests.mcore.random_flags import combination, outcome
from tests.mcore.trained import trained
from tests.ranks import RankFailure, RankPools

SEEDS = range(12)


@pytest.mark.functional
@pytest.mark.parametrize("seed", SEEDS)
def test_a_combination_trains_as_ddp_or_is_rejected_by_name(megatron: RankPools, seed: int) -> None:
    outcome(megatron, combination(seed))


EXPERTS = "--num-experts 2 --moe-router-topk 2"
SELECTIVE = "--recompute-granularity selective --recompute-modules"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (EXPERTS, "--num-experts 2 without --disable-bias-linear cannot be used on a CPU"),
        (
            f"{EXPERTS} --disable-bias-linear --tensor-model-parallel-size 2",
            "--num-experts 2 with --tensor-model-parallel-size 2 needs --sequence-parallel",
        ),
        (
            f"{SELECTIVE} mlp",
            "--recompute-modules mlp without --disable-bias-linear cannot be used",
        ),
        (
            f"{EXPERTS} --disable-bias-linear {SELECTIVE} moe_act",
            "Megatron rejects these flags: moe_act in recompute_modules is only supported",
        ),
        (
            f"{EXPERTS} --moe-grouped-gemm --moe-shared-expert-intermediate-size 8",
            "Megatron cannot build the model that these flags describe: bias is not supported",
        ),
    ],
    ids=["biases", "sequence", "recomputed", "options", "layers"],
)
def test_what_megatron_fails_with_is_rejected_by_name(
    megatron: RankPools, flags: str, reason: str
) -> None:
    with pytest.raises(RankFailure, match=f"FlagError: {reason}|RehearsalError: {reason}"):
        trained(megatron, 2, "--global-batch-size 8", flags)
