"""Delayed scaling goes on from a checkpoint: scales and histories of maxima are in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mcore import flags as f
from tests.mcore.trained import assert_equal, longer, saved_and_resumed
from tests.ranks import RankPools

# A history that is longer than the run before the checkpoint, so that all of it counts.
HISTORY = "--fp8-amax-history-len 4 --fp8-amax-compute-algo max"
DELAYED = f"--fp8-format hybrid --fp8-recipe delayed {HISTORY}"
MAIN = "--megatron-fsdp-main-params-dtype fp32"
GATHERED = f"{DELAYED} --fp8-param-gather {MAIN}"
COMMON = """
--transformer-impl transformer_engine --bf16 --hidden-size 128 --ffn-hidden-size 256
--seq-length 64 --max-position-embeddings 64 --global-batch-size 8 --train-iters 4
"""
# Every rank evaluates other samples, whose maxima are not reduced before the checkpoint is saved.
EVALUATED = "--eval-interval 2 --eval-iters 1"
PADDED = "--make-vocab-size-divisible-by 256"


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        pytest.param([GATHERED, EVALUATED], 2, id="gathered in FP8"),
        longer([f"{DELAYED} {MAIN}"], 2, id="gathered in bf16"),
        longer([GATHERED, f.TP2_SP], 2, id="tensor"),
        longer([GATHERED, f.PP2], 2, id="pipeline"),
        longer([GATHERED, f.VPP2], 2, id="virtual pipeline"),
        longer([GATHERED, f.FULL_RECOMPUTE], 2, id="recompute"),
        longer([GATHERED, f.ALLTOALL, "--moe-grouped-gemm", f.EP2], 2, id="grouped experts"),
        longer([GATHERED, f.ALLTOALL, f.EP2], 2, id="experts one by one"),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    megatron_te: RankPools, tmp_path: Path, flags: list[str], world_size: int
) -> None:
    common = [COMMON, f.fsdp(), *flags]
    uninterrupted, resumed = saved_and_resumed(
        megatron_te, tmp_path, *common, at=2, world_size=world_size
    )
    assert_equal(resumed, uninterrupted, after=2)
