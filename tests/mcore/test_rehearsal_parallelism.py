"""A rehearsal runs every parallelism of Megatron's own, with the results of one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cpu_rehearsal.context_parallel import chunks_of_rank
from tests.cases import quick_only
from tests.mcore import flags as f
from tests.mcore.session import Training, distance, enter_rehearsal
from tests.mcore.trained import TIMEOUT_S, assert_close, assert_equal, trained
from tests.ranks import RankFailure, RankPools

# At every tensor-parallel size, weights drawn on the CPU are those of the full model, and the
# vocabulary is padded to the same size.
WHOLE = "--use-cpu-initialization --make-vocab-size-divisible-by 512"
TENSOR = f"--use-cpu-initialization --make-vocab-size-divisible-by 256 {f.TP2}"
SEQUENCE = f"{TENSOR} --sequence-parallel"

QK_NORM = "--normalization RMSNorm --qk-layernorm --swiglu"
# The attention creates the mask; by default, Megatron reads it with the data.
NO_MASK = "--no-create-attention-mask-in-dataloader"
WINDOW = f"{NO_MASK} --window-size 5,0"
GQA = f"{f.GATED} --position-embedding-type rope"
EXPERTS = f"{f.ALLTOALL} {f.EP2}"
BY_ALL_GATHER = f"{f.MOE} {f.EP2} --moe-token-dispatcher-type allgather"
# With two and with four ranks, every rank has micro-batches of every global batch.
SHARED_EXPERT = f"{EXPERTS} --global-batch-size 16 --moe-shared-expert-intermediate-size 64"
GROUPED = "--moe-grouped-gemm"
EXPERT_TENSOR = f"{GROUPED} --global-batch-size 16 {f.TP2_SP} --expert-tensor-parallel-size 2"
LATENT_EXPERTS = "--num-experts 2 --moe-router-topk 2 --moe-latent-size 32 --disable-bias-linear"
# A zero-centered norm stores a factor of one as zero, which weight decay does not change.
UNDECAYED = f"{f.LATENT} --weight-decay 0"
FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy"

# Ranks and flags of two runs with the same results.
ALIKE: dict[str, tuple[int, str, int, str]] = {
    "two-ranks": (2, "", 1, ""),
    "distributed-optimizer": (2, "--use-distributed-optimizer", 2, ""),
    "megatrons-own-fsdp-zero3": (2, f"{FSDP} optim_grads_params", 2, ""),
    "tensor-and-sequence": (2, SEQUENCE, 1, WHOLE),
    "tensor-and-sequence-qk-norm": (2, f"{SEQUENCE} {QK_NORM}", 1, f"{WHOLE} {QK_NORM}"),
    "full-recompute": (2, f"{SEQUENCE} {f.FULL_RECOMPUTE}", 2, SEQUENCE),
    "context-window": (2, f"{f.CP2} {WINDOW}", 1, WINDOW),
    "context-and-data": (4, f"{f.CP2} {GQA}", 1, GQA),
    "dispatchers": (2, EXPERTS, 2, BY_ALL_GATHER),
    "grouped-experts-and-data": (4, f"{SHARED_EXPERT} {GROUPED}", 2, f"{SHARED_EXPERT} {GROUPED}"),
    "expert-tensor": (4, f"{EXPERTS} {EXPERT_TENSOR}", 4, f"{BY_ALL_GATHER} {EXPERT_TENSOR}"),
    "hybrid-context": (2, f"{f.MAMBA} {f.CP2}", 1, f.MAMBA),
    "latent-attention": (2, f"{SEQUENCE} {f.LOW_RANK_QUERIES}", 1, f"{WHOLE} {f.LOW_RANK_QUERIES}"),
    "sparse-attention": (2, f"{SEQUENCE} {f.SPARSE}", 1, f"{WHOLE} {f.SPARSE}"),
    "zero-centered-norms": (
        2,
        f"{SEQUENCE} {UNDECAYED} --apply-layernorm-1p",
        1,
        f"{WHOLE} {UNDECAYED}",
    ),
    "latent-experts": (2, f"{SEQUENCE} {LATENT_EXPERTS}", 1, f"{WHOLE} {LATENT_EXPERTS}"),
}

# One expert per rank: grouped and sequential experts draw its weights in the same order.
ONE_EACH = (
    f"--num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax {f.EP2} "
    "--moe-token-dispatcher-type alltoall"
)
GLU = "--disable-bias-linear --swiglu"
MOE_ACT = "--recompute-granularity selective --recompute-modules moe_act"

# Flags of two runs of two ranks that are bitwise identical.
EQUAL: dict[str, tuple[str, str]] = {
    "grouped-gated-experts": (f"{ONE_EACH} {GLU} {GROUPED}", f"{ONE_EACH} {GLU}"),
    "recompute-of-experts": (f"{EXPERTS} {GROUPED} {MOE_ACT}", f"{EXPERTS} {GROUPED}"),
}


def _train(pools: RankPools, world_size: int, *flags: f.Flags, **options: Any) -> Training:
    result = trained(pools, world_size, "--train-iters 5", *flags, iterations=5, **options)
    assert all(math.isfinite(number) for number in (*result.losses, *result.grad_norms))
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_only([*ALIKE], "two-ranks", "distributed-optimizer"))
def test_two_parallelisms_of_the_same_model_match(megatron: RankPools, name: str) -> None:
    ranks, flags, others, their_flags = ALIKE[name]
    mine = _train(megatron, ranks, flags, once=True)
    # The order of sums differs, which a norm over all gradients shows first.
    assert_close(mine, _train(megatron, others, their_flags, once=True), norms=1e-5)


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.functional
def test_equivalent_flags_are_bitwise_identical(megatron: RankPools, name: str) -> None:
    mine, theirs = EQUAL[name]
    assert_equal(_train(megatron, 2, mine), _train(megatron, 2, theirs))


@pytest.mark.functional
def test_context_parallel_ranks_exchange_predicted_tokens(megatron: RankPools) -> None:
    flags = f"{GQA} --mtp-num-layers 1"
    mine, alone = _train(megatron, 2, f.CP2, flags), _train(megatron, 1, flags)
    assert distance(mine.losses[:1], alone.losses[:1]) < 1e-6
    # Megatron divides by the tokens of a rank; the rank with the sequence's end has fewer.
    assert distance(mine.losses, alone.losses) < 1e-4


def test_context_parallel_rank_has_an_early_and_a_late_chunk() -> None:
    assert [chunks_of_rank(rank, 2) for rank in range(2)] == [(0, 3), (1, 2)]
    held = [chunk for rank in range(3) for chunk in chunks_of_rank(rank, 3)]
    assert sorted(held) == list(range(6))


def _layers(model: list[Any], optimizer: Any) -> list[str]:
    return [type(layer).__name__ for layer in model[0].module.decoder.layers]


@pytest.mark.functional
def test_hybrid_pattern_determines_the_layers_of_a_pipeline_stage(megatron: RankPools) -> None:
    experts = "--num-experts 2 --moe-router-topk 2 --disable-bias-linear"
    flags = f"{f.MAMBA} --hybrid-layer-pattern M*|-ME {f.PP2} {experts}"
    result = _train(megatron, 2, flags, probe=_layers)
    assert result.losses[-1] < result.losses[0]
    assert result.extras == [
        ["MambaLayer", "TransformerLayer"],
        ["MLPLayer", "MambaLayer", "MoETransformerLayer"],
    ]


def _fail_on_the_last_stage() -> None:
    enter_rehearsal()
    from megatron_fsdp_v2_mcore.prove import session

    stages = dist.new_group()
    with session.training(f.MODEL_FLAGS, rehearses=True):
        if dist.get_rank() == 1:
            raise ValueError("of the last stage")
        dist.recv(torch.zeros(1), src=1, group=stages)


@pytest.mark.functional
def test_error_of_one_pipeline_stage_is_reported(megatron: RankPools) -> None:
    with pytest.raises(RankFailure) as failure:
        megatron(2).run(_fail_on_the_last_stage, timeout_s=TIMEOUT_S)
    assert "rank 1: Traceback" in str(failure.value) and "of the last stage" in str(failure.value)
