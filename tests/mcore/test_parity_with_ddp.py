"""Loss curves and gradient norms equal those of Megatron's own DDP.

Parallelisms and training features are in the functional matrix; here are odd world sizes, and bits.
"""

from __future__ import annotations

import pytest

from tests.mcore.session import MODEL_FLAGS, Training, distance, fsdp, train
from tests.ranks import RankPools

ITERATIONS = ["--train-iters", "8", "--eval-interval", "4", "--eval-iters", "1"]
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]

_LONGER = pytest.mark.functional


def _curves(pools: RankPools, world_size: int, flags: list[str]) -> Training:
    result: Training = pools(world_size).run(train, [*MODEL_FLAGS, *ITERATIONS, *flags])[0]
    assert len(result.losses) == len(result.grad_norms) == 8
    # Twice on the way, and on validation and test data at the end.
    assert len(result.evaluations) == 4
    return result


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=_LONGER), 2, pytest.param(3, marks=_LONGER)]
)
def test_every_strategy_trains_like_ddp_in_fp32(megatron: RankPools, world_size: int) -> None:
    reference = _curves(megatron, world_size, [])
    # Two ranks show every strategy, the others that the world size changes nothing.
    for strategy in STRATEGIES if world_size == 2 else ("no_shard", "optim_grads_params"):
        curves = _curves(megatron, world_size, fsdp(strategy))
        assert distance(curves.losses, reference.losses) < 1e-6, strategy
        assert distance(curves.grad_norms, reference.grad_norms) < 1e-6, strategy
        assert distance(curves.evaluations, reference.evaluations) < 1e-6, strategy


def test_overlap_flags_change_no_bit(megatron: RankPools) -> None:
    plain = _curves(megatron, 2, fsdp("optim_grads_params"))
    overlapped = _curves(megatron, 2, fsdp("optim_grads_params", *OVERLAP))
    assert overlapped.losses == plain.losses
    assert overlapped.grad_norms == plain.grad_norms


@pytest.mark.functional
def test_bf16_is_as_close_to_ddp_as_megatrons_distributed_optimizer(megatron: RankPools) -> None:
    """In bf16 a sum in another order moves some weight across a rounding boundary."""
    reference = _curves(megatron, 2, ["--bf16"])
    theirs = _curves(megatron, 2, ["--bf16", "--use-distributed-optimizer"])
    bound = max(2e-4, 2 * distance(theirs.losses, reference.losses))
    # The other strategies are in the functional matrix.
    curves = _curves(megatron, 2, fsdp("optim_grads_params", "--bf16"))
    assert distance(curves.losses, reference.losses) < bound
