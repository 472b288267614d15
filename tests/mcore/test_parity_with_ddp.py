"""Loss curves and gradient norms equal those of Megatron's own DDP."""

from __future__ import annotations

import pytest

from tests.mcore.session import MODEL_FLAGS, Training, fsdp, train
from tests.ranks import RankPools

ITERATIONS = ["--train-iters", "8"]
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]


def _curves(pools: RankPools, world_size: int, flags: list[str]) -> Training:
    result: Training = pools(world_size).run(train, [*MODEL_FLAGS, *ITERATIONS, *flags])[0]
    assert len(result.losses) == len(result.grad_norms) == 8
    return result


def _distance(mine: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_strategy_trains_like_ddp_in_fp32(megatron: RankPools, world_size: int) -> None:
    reference = _curves(megatron, world_size, [])
    # Two ranks show every strategy, the others that the world size changes nothing.
    for strategy in STRATEGIES if world_size == 2 else ("no_shard", "optim_grads_params"):
        curves = _curves(megatron, world_size, fsdp(strategy))
        assert _distance(curves.losses, reference.losses) < 1e-6, strategy
        assert _distance(curves.grad_norms, reference.grad_norms) < 1e-6, strategy


def test_overlap_flags_change_no_bit(megatron: RankPools) -> None:
    plain = _curves(megatron, 2, fsdp("optim_grads_params"))
    overlapped = _curves(megatron, 2, fsdp("optim_grads_params", *OVERLAP))
    assert overlapped.losses == plain.losses
    assert overlapped.grad_norms == plain.grad_norms


def test_bf16_is_as_close_to_ddp_as_megatrons_distributed_optimizer(megatron: RankPools) -> None:
    """In bf16 a sum in another order moves some weight across a rounding boundary."""
    reference = _curves(megatron, 2, ["--bf16"])
    theirs = _curves(megatron, 2, ["--bf16", "--use-distributed-optimizer"])
    bound = max(2e-4, 2 * _distance(theirs.losses, reference.losses))
    for strategy in ("optim", "optim_grads_params"):
        curves = _curves(megatron, 2, fsdp(strategy, "--bf16"))
        assert _distance(curves.losses, reference.losses) < bound, strategy


def test_clipping_swiglu_and_untied_embeddings_train_like_ddp(megatron: RankPools) -> None:
    flags = ["--swiglu", "--untie-embeddings-and-output-weights", "--clip-grad", "0.05"]
    flags += ["--normalization", "RMSNorm", "--group-query-attention", "--num-query-groups", "2"]
    reference = _curves(megatron, 2, flags)
    curves = _curves(megatron, 2, fsdp("optim_grads_params", *flags))
    assert _distance(curves.losses, reference.losses) < 1e-6
    assert _distance(curves.grad_norms, reference.grad_norms) < 1e-6


@pytest.mark.parametrize(
    "flags",
    [
        [
            *("--recompute-granularity", "full"),
            *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
        ],
        ["--calculate-per-token-loss"],
        ["--eval-interval", "5", "--eval-iters", "2"],
        ["--log-params-norm", "--log-num-zeros-in-grad"],
        ["--weight-decay", "0.1", "--adam-beta2", "0.95", "--lr-decay-style", "cosine"],
    ],
    ids=["recompute", "per-token-loss", "evaluation", "logged-norms", "weight-decay"],
)
def test_training_features_train_like_ddp(megatron: RankPools, flags: list[str]) -> None:
    reference = _curves(megatron, 2, flags)
    curves = _curves(megatron, 2, fsdp("optim_grads_params", *flags))
    assert _distance(curves.losses, reference.losses) < 1e-6
    assert _distance(curves.grad_norms, reference.grad_norms) < 1e-6
