"""Random combinations of Megatron's flags: each trains as DDP does, or is rejected by name.

`python -m tests.mcore.random_flags --cases 200 --seed 7` runs more cases than the tests. A seed
always gives the same combination.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from functional_tests.matrix import STRATEGIES
from tests.mcore.flags import fsdp
from tests.mcore.session import distance
from tests.mcore.trained import trained
from tests.ranks import RankFailure, RankPools, rank_pools

WORLD_SIZE = 2
ITERATIONS = 3
STEPS = f"--global-batch-size 8 --train-iters {ITERATIONS}"
# Sums have different orders, and weights in 16 bits may be rounded differently.
FP32, ROUNDED = 1e-6, 5e-3

ATTENTION: tuple[str, ...] = (
    "",
    "--group-query-attention --num-query-groups 2",
    "--qk-layernorm",
    "--qk-l2-norm",
    "--kv-channels 24",
    "--attention-output-gate",
    "--window-size (8,0)",
    "--softmax-type learnable",
    "--softmax-type off-by-one",
    "--add-qkv-bias",
    "--apply-query-key-layer-scaling",
    "--attention-softmax-in-fp32",
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 12",
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm",
    "--multi-latent-attention --rope-type rope --kv-lora-rank 16",
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 16 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4",
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 "
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 64 "
    "--dsa-indexer-topk 8",
)
EXPERTS: tuple[str, ...] = (
    "",
    "",
    "--num-experts 4 --moe-router-topk 2",
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm",
    "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax --moe-layer-freq [0,1]",
    "--num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 32",
    "--num-experts 4 --moe-router-topk 2 --moe-latent-size 32",
    "--num-experts 4 --moe-router-topk 2 --moe-router-group-topk 1 --moe-router-num-groups 2",
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-dtype fp32",
    "--num-experts 4 --moe-router-topk 2 --moe-expert-capacity-factor 1.5 "
    "--moe-pad-expert-input-to-capacity",
    "--num-experts 4 --moe-router-topk 2 --moe-z-loss-coeff 0.01 --moe-input-jitter-eps 0.01",
)
NORMS = ("", "--normalization RMSNorm", "--apply-layernorm-1p", "--norm-epsilon 1e-6")
POSITIONS = (
    "",
    "--position-embedding-type rope",
    "--position-embedding-type rope --rotary-percent 0.5",
    "--position-embedding-type rope --rotary-interleaved",
    "--position-embedding-type rope --use-rope-scaling",
    "--position-embedding-type none",
    "--position-embedding-type yarn",
)
ACTIVATIONS = ("", "--swiglu", "--squared-relu", "--quick-geglu", "--openai-gelu")
PRECISIONS = ("", "", "--bf16", "--fp16", "--bf16 --accumulate-allreduce-grads-in-fp32")
PARALLEL = (
    "",
    "--tensor-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
)
OTHERS = (
    "--untie-embeddings-and-output-weights",
    "--disable-bias-linear",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective --recompute-modules core_attn layernorm",
    "--recompute-granularity selective --recompute-modules mla_up_proj",
    "--recompute-granularity selective --recompute-modules moe_act",
    "--recompute-granularity selective --recompute-modules mlp",
    "--mtp-num-layers 1",
    "--calculate-per-token-loss",
    "--use-cpu-initialization",
    "--overlap-grad-reduce",
)
GROUPS = (ATTENTION, EXPERTS, NORMS, POSITIONS, ACTIVATIONS, PRECISIONS, PARALLEL)


@dataclass(frozen=True, slots=True)
class Combination:
    """Flags of one case.

    Attributes:
        flags: Flags of both runs.
        strategy: Sharding strategy of the sharded run.
    """

    flags: tuple[str, ...]
    strategy: str

    @property
    def tolerance(self) -> float:
        """Largest relative difference of losses."""
        return ROUNDED if {"--bf16", "--fp16"} & set(self.flags) else FP32


def combination(seed: int) -> Combination:
    """Return the combination of a seed. Defaults are frequent, so that many combinations train."""
    draw = random.Random(seed)
    chosen = [draw.choice(group) if draw.random() < 0.6 else "" for group in GROUPS]
    granularities = 0
    for flag in OTHERS:
        recomputes = "--recompute" in flag
        if draw.random() < 0.25 and not (recomputes and granularities):
            chosen.append(flag)
            granularities += recomputes
    words = " ".join(chosen).split()
    # Without these flags, most combinations would be rejected for the same reason.
    if draw.random() < 0.8:
        words += ["--disable-bias-linear"] if "--num-experts" in words else []
        words += ["--position-embedding-type", "rope"] if "--mtp-num-layers" in words else []
    return Combination(tuple(words), draw.choice(STRATEGIES))


def outcome(pools: RankPools, case: Combination) -> str:
    """Train a combination with DDP and sharded.

    Returns:
        `equal`, or `rejected: ` and the reason.

    Raises:
        AssertionError: Losses differ, or a training fails with another error.
    """
    theirs = _training(pools, case.flags)
    mine = _training(pools, [*case.flags, *fsdp(case.strategy)])
    if isinstance(mine, str):
        return mine
    if isinstance(theirs, str):
        raise AssertionError(f"{case}: trains sharded, and Megatron's DDP is {theirs}")
    assert len(mine.losses) == ITERATIONS
    difference = distance(mine.losses, theirs.losses)
    assert difference <= case.tolerance, f"{case}: losses differ by {difference:.1e}"
    return "equal"


def _training(pools: RankPools, flags: Sequence[str]) -> Any:
    """Return a training, or the reason why its flags are rejected."""
    try:
        return trained(pools, WORLD_SIZE, STEPS, flags)
    except RankFailure as failure:
        lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
        for line in lines:
            kind, _, reason = line.partition(": ")
            if kind.endswith(("FlagError", "RehearsalError")) and reason:
                return f"rejected: {reason}"
        raise AssertionError(f"{' '.join(flags)} ends with {lines[-1]}") from failure


def main() -> int:
    """Run the number of cases of the command line; print the outcome of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    args = parser.parse_args()
    failures = 0
    with rank_pools() as pools:
        for seed in range(args.seed, args.seed + args.cases):
            case = combination(seed)
            try:
                said = outcome(pools, case)
            except AssertionError as error:
                said, failures = f"FAILED: {error}", failures + 1
            sys.stdout.write(f"{seed}: {case.strategy} {' '.join(case.flags)}\n    {said}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{args.cases} combinations, {failures} failures\n")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
