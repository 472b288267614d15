"""Loss curves and gradient norms equal those of Megatron's own DDP.

Parallelisms and training features are in the functional matrix; here are odd world sizes, and bits.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import quick_only
from tests.mcore.flags import NO_SHARD, OVERLAP, STRATEGIES, ZERO3, Flags, fsdp
from tests.mcore.session import Training, distance
from tests.mcore.trained import assert_close, assert_equal, trained
from tests.ranks import RankPools

STEPS = "--train-iters 4 --eval-interval 2 --eval-iters 1 --global-batch-size 8"


def _curves(
    pools: RankPools, world_size: int, *flags: Flags, iterations: int = 4, **options: Any
) -> Training:
    # Three ranks cannot share a batch of 8.
    batch = "--global-batch-size 12" if world_size == 3 else ""
    common = [STEPS, batch, f"--train-iters {iterations}"]
    result = trained(
        pools, world_size, *common, *flags, iterations=iterations, once=True, **options
    )
    # At every second iteration, and on validation and test data at the end.
    assert len(result.evaluations) == iterations // 2 + 2
    return result


@pytest.mark.parametrize("world_size", quick_only([1, 2, 3], 2))
def test_every_strategy_trains_like_ddp_in_fp32(megatron: RankPools, world_size: int) -> None:
    reference = _curves(megatron, world_size)
    # Two ranks show every strategy, the others that the world size changes nothing.
    for strategy in STRATEGIES if world_size == 2 else (NO_SHARD, ZERO3):
        assert_close(_curves(megatron, world_size, fsdp(strategy)), reference)


def test_overlap_flags_change_no_bit(megatron: RankPools) -> None:
    assert_equal(_curves(megatron, 2, fsdp(), OVERLAP), _curves(megatron, 2, fsdp()))


@pytest.mark.functional
def test_bf16_is_ddp_bitwise_where_the_order_of_a_sum_does_not_show(megatron: RankPools) -> None:
    """The norm that clips is a sum, cut otherwise into shards: here it is added up in fp64.

    By default its last bit moves some weight across a rounding boundary of bf16, as it does in
    Megatron's distributed optimizer.
    """
    flags = "--bf16 --num-layers 4"
    reference = _curves(megatron, 2, flags, iterations=8, exact_norms=True)
    assert_equal(_curves(megatron, 2, fsdp(), flags, iterations=8, exact_norms=True), reference)
    theirs = _curves(megatron, 2, f"{flags} --use-distributed-optimizer", iterations=8)
    mine = _curves(megatron, 2, fsdp(), flags, iterations=8)
    bound = max(2e-4, 2 * distance(theirs.losses, reference.losses))
    assert distance(mine.losses, reference.losses) < bound
