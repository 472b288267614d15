"""A rehearsal runs every parallelism of Megatron's own, and computes what one rank computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.mcore.session import MODEL_FLAGS, Training, curves, distance, train
from tests.ranks import RankFailure, RankPools

# Weights drawn on the CPU are those of the whole model, whatever the tensor-parallel size; the
# vocabulary is padded to the same size by every tensor-parallel size.
SAME_WEIGHTS = ["--use-cpu-initialization"]
PADDED_TO_512 = {1: "512", 2: "256"}

_MOE = """
--num-experts 4 --moe-router-topk 2 --disable-bias-linear --swiglu
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
"""


def _train(
    pools: RankPools, world_size: int, *flags: str, probe: Any = None, iterations: int = 5
) -> Training:
    words = [*MODEL_FLAGS, "--train-iters", "5", *flags]
    result = curves(pools(world_size).run(train, words, probe))
    assert len(result.losses) == len(result.grad_norms) == iterations
    assert all(math.isfinite(number) for number in (*result.losses, *result.grad_norms))
    return result


def _same(mine: Training, theirs: Training) -> None:
    # Sums are taken in another order: a norm over all gradients shows that first.
    assert distance(mine.losses, theirs.losses) < 1e-6
    assert distance(mine.grad_norms, theirs.grad_norms) < 1e-5


def _tensor_parallel(size: int) -> list[str]:
    divisor = ["--make-vocab-size-divisible-by", PADDED_TO_512[size]]
    return [*SAME_WEIGHTS, *divisor, "--tensor-model-parallel-size", str(size)]


@pytest.fixture(scope="module")
def by_two_ranks(megatron: RankPools) -> Training:
    """What Megatron's own DDP makes of the model on two ranks."""
    return _train(megatron, 2)


def test_ddp_trains_on_two_ranks_as_on_one(megatron: RankPools, by_two_ranks: Training) -> None:
    _same(by_two_ranks, _train(megatron, 1))


@pytest.mark.functional
def test_ddp_trains_on_three_ranks_as_on_two(megatron: RankPools, by_two_ranks: Training) -> None:
    _same(_train(megatron, 3), by_two_ranks)


def test_the_distributed_optimizer_trains_like_ddp(
    megatron: RankPools, by_two_ranks: Training
) -> None:
    _same(_train(megatron, 2, "--use-distributed-optimizer"), by_two_ranks)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="layernorm"),
        pytest.param(["--normalization", "RMSNorm", "--qk-layernorm", "--swiglu"], id="rmsnorm-qk"),
    ],
)
@pytest.mark.functional
def test_tensor_and_sequence_parallel_train_like_one_rank(
    megatron: RankPools, flags: list[str]
) -> None:
    alone = _train(megatron, 1, *_tensor_parallel(1), *flags)
    _same(_train(megatron, 2, *_tensor_parallel(2), *flags), alone)
    _same(_train(megatron, 2, *_tensor_parallel(2), "--sequence-parallel", *flags), alone)


@pytest.mark.functional
def test_both_token_dispatchers_compute_the_same(megatron: RankPools) -> None:
    flags = [*_MOE.split(), "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type"]
    _same(_train(megatron, 2, *flags, "alltoall"), _train(megatron, 2, *flags, "allgather"))


PARALLEL: dict[str, tuple[int, str]] = {
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "ep2-shared-expert": (
        2,
        _MOE + " --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
        " --moe-shared-expert-intermediate-size 64",
    ),
    "multi-token-prediction": (2, "--mtp-num-layers 1 --position-embedding-type rope"),
    "multi-token-prediction-pp2": (
        2,
        "--mtp-num-layers 1 --position-embedding-type rope --pipeline-model-parallel-size 2"
        " --untie-embeddings-and-output-weights",
    ),
    "pp2-virtual": (
        4,
        "--num-layers 4 --pipeline-model-parallel-size 2"
        " --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 16",
    ),
    "tp2-ep2-sequence-parallel": (
        4,
        _MOE + " --tensor-model-parallel-size 2 --sequence-parallel"
        " --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    ),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}


@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.functional
def test_a_parallel_run_learns(megatron: RankPools, name: str) -> None:
    world_size, flags = PARALLEL[name]
    result = _train(megatron, world_size, *flags.split())
    assert result.losses[-1] < result.losses[0]


@pytest.mark.functional
def test_recompute_under_sequence_parallelism_changes_nothing(megatron: RankPools) -> None:
    flags = [*_tensor_parallel(2), "--sequence-parallel"]
    recompute = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
    plain = _train(megatron, 2, *flags)
    _same(_train(megatron, 2, *flags, *recompute, "--recompute-num-layers", "1"), plain)


@pytest.mark.functional
def test_an_overflow_in_fp16_skips_iterations_and_halves_the_scale(megatron: RankPools) -> None:
    scale = 2.0**40
    flags = ["--fp16", "--initial-loss-scale", str(scale), "--hysteresis", "1"]
    flags += ["--min-loss-scale", "1", "--train-iters", "2"]
    result = megatron(2).run(train, [*MODEL_FLAGS, *flags])[0]
    assert result.grad_norms == []
    assert result.loss_scales[-1] < scale


def test_tensorboard_gets_what_megatron_logs(megatron: RankPools, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="Megatron logs to it only if it is there")
    _train(megatron, 2, "--tensorboard-dir", str(tmp_path), "--log-params-norm")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"lm loss", "grad-norm", "params-norm"} <= set(events.Tags()["scalars"])
    assert len(events.Scalars("lm loss")) == 5


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.functional
def test_megatrons_own_fsdp_trains_like_ddp(megatron: RankPools, strategy: str) -> None:
    flags = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"]
    flags += ["--data-parallel-sharding-strategy", strategy]
    _same(_train(megatron, 2, *flags), _train(megatron, 2))


def test_a_failed_training_leaves_the_session_usable(
    megatron: RankPools, by_two_ranks: Training
) -> None:
    with pytest.raises(RankFailure, match="cannot be used on a CPU"):
        megatron(2).run(train, [*MODEL_FLAGS, "--attention-backend", "flash"])
    with pytest.raises(RankFailure, match="num_attention_heads"):
        megatron(2).run(train, [*MODEL_FLAGS, "--train-iters", "1", "--num-attention-heads", "5"])
    after = _train(megatron, 2)
    assert (after.losses, after.grad_norms) == (by_two_ranks.losses, by_two_ranks.grad_norms)
