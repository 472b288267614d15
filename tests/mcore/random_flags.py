"""Random combinations of Megatron's flags: each trains as DDP does, or is rejected by name.

In some, a second run loads the checkpoint of the first: it resumes with other sizes, another
strategy or other learning rates, or evaluates. `python -m tests.mcore.random_flags --cases 200
--seed 7` runs more cases than the tests. A seed always gives the same combination.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from functional_tests.matrix import STRATEGIES
from tests.mcore.flags import CP2, EP2, PP2, TP2, TP2_SP, Flags, fsdp, loading, saving, words
from tests.mcore.session import Training, distance
from tests.mcore.trained import trained
from tests.ranks import RankFailure, RankPools, rank_pools

WORLD_SIZE = 2
SAVED, LAST = 2, 4
"""The saved iteration, and the number of iterations."""
STEPS = f"--global-batch-size 8 --train-iters {LAST} --lr-decay-iters {LAST}"
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
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --swiglu",
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
PRECISIONS = (
    "",
    "",
    "--bf16",
    "--fp16 --initial-loss-scale 1024",
    "--bf16 --accumulate-allreduce-grads-in-fp32",
)
PARALLEL = ("", TP2, TP2_SP, PP2, CP2, f"{EP2} --moe-token-dispatcher-type alltoall")
OTHERS = (
    "--untie-embeddings-and-output-weights",
    "--disable-bias-linear",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective --recompute-modules core_attn layernorm",
    "--recompute-granularity selective --recompute-modules mla_up_proj",
    "--recompute-granularity selective --recompute-modules moe_act",
    "--recompute-granularity selective --recompute-modules mlp",
    "--mtp-num-layers 1",
    "--mtp-num-layers 1 --mtp-detach-heads",
    "--calculate-per-token-loss",
    "--use-cpu-initialization",
    "--overlap-grad-reduce",
)
GROUPS = (ATTENTION, EXPERTS, NORMS, POSITIONS, ACTIVATIONS, PRECISIONS)
# Megatron rejects the first flag without the second.
NEEDS = {
    "mla_up_proj": "--multi-latent-attention",
    "moe_act": "--moe-grouped-gemm",
    EP2: "--num-experts",
}
# Random numbers and dropped tokens depend on the tokens of a rank.
DEPEND_ON_SIZES = {"--moe-input-jitter-eps", "--moe-expert-capacity-factor"}


@dataclass(frozen=True, slots=True)
class Change:
    """Learning rates of a second run.

    Attributes:
        flags: Flags of the second run.
        whole: Flags of an uninterrupted run with the learning rates of both. Megatron's own
            optimizers cannot resume with others.
    """

    flags: str
    whole: str = ""


UNCHANGED = Change("")
CHANGES = {
    "": UNCHANGED,
    "override": Change(
        "--override-opt_param-scheduler --lr 2.5e-4",
        f"--lr-decay-style WSD --min-lr 2.5e-4 --lr-decay-iters {SAVED} --lr-wsd-decay-iters 1 "
        "--lr-wsd-decay-style linear",
    ),
    "from file": Change("--use-checkpoint-opt_param-scheduler --lr 2.5e-4 --lr-decay-style linear"),
}
EVALUATE = Change("--skip-train")
EVALUATED = f"--train-iters {SAVED} --eval-iters 2"


@dataclass(frozen=True, slots=True)
class Run:
    """Ranks and sharding of a run.

    Attributes:
        strategy: Sharding strategy.
        world_size: Number of ranks.
        parallel: Flags of parallel sizes.
    """

    strategy: str
    world_size: int = WORLD_SIZE
    parallel: str = ""


@dataclass(frozen=True, slots=True)
class Combination:
    """Flags of one case.

    Attributes:
        flags: Flags of all runs.
        first: The run that trains, and saves if there is a second one.
        second: The run that loads.
        change: What the second run does with the checkpoint.
    """

    flags: tuple[str, ...]
    first: Run
    second: Run | None = None
    change: Change = UNCHANGED

    @property
    def kinds(self) -> set[str]:
        """What the second run does."""
        if self.second is None:
            return {"train"}
        if self.change == EVALUATE:
            return {"evaluate"}
        found = {"resume", *(name for name, change in CHANGES.items() if change == self.change)}
        for name in ("strategy", "world_size", "parallel"):
            if getattr(self.first, name) != getattr(self.second, name):
                found.add(name)
        return found - {""}

    @property
    def tolerance(self) -> float:
        """Largest relative difference of losses."""
        return ROUNDED if {"--bf16", "--fp16"} & set(self.flags) else FP32

    def __str__(self) -> str:
        second = f"; {self.change.flags} {self.second}" if self.second else ""
        return f"{' '.join(self.flags)} {self.first}{second}"


def combination(seed: int) -> Combination:
    """Return the combination of a seed. Defaults are frequent, so that many combinations train."""
    draw = random.Random(seed)
    chosen = [draw.choice(group) if draw.random() < 0.6 else "" for group in GROUPS]
    flags = words(*chosen)
    # Most combinations would be rejected for the same reasons.
    avoids_rejections = draw.random() < 0.8
    granularities = 0
    for flag in OTHERS:
        recomputes = "--recompute" in flag
        if draw.random() < 0.25 and not (recomputes and granularities):
            if avoids_rejections and not _has_needs(flag, flags):
                continue
            flags += flag.split()
            granularities += recomputes
    sizes = PARALLEL
    if avoids_rejections:
        # Experts need sequence parallelism with tensor parallelism.
        without = TP2 if "--num-experts" in flags else None
        sizes = [s for s in PARALLEL if s != without and _has_needs(s, flags)]
        flags += ["--disable-bias-linear"] if "--num-experts" in flags else []
        flags += ["--position-embedding-type", "rope"] if "--mtp-num-layers" in flags else []
    parallel = draw.choice(sizes) if draw.random() < 0.6 else ""
    # Stages and tensor-parallel ranks hold different parts of these.
    if "--mtp-detach-heads" in flags and draw.random() < 0.5:
        parallel = PP2
        flags.append("--untie-embeddings-and-output-weights")
    elif "--softmax-type" in flags and draw.random() < 0.8:
        parallel = TP2_SP if "--num-experts" in flags else TP2
    first = Run(draw.choice(STRATEGIES), WORLD_SIZE, parallel)
    kind = draw.choice(("train", "resume", "resume", "evaluate"))
    if kind == "train":
        return Combination(tuple(flags), first)
    second = Run(draw.choice(STRATEGIES), WORLD_SIZE, parallel)
    if kind == "evaluate":
        return Combination(tuple(flags), first, second, EVALUATE)
    if draw.random() < 0.6 and not DEPEND_ON_SIZES & set(flags):
        alone = draw.random() < 0.3
        parallel = "" if alone else draw.choice(sizes)
        # Megatron divides the loss of MTP by the tokens of a rank's part of the sequence.
        if "--mtp-num-layers" not in flags or CP2 not in {first.parallel, parallel}:
            second = Run(second.strategy, 1 if alone else WORLD_SIZE, parallel)
    return Combination(tuple(flags), first, second, CHANGES[draw.choice(list(CHANGES))])


def _has_needs(flag: str, flags: Sequence[str]) -> bool:
    return all(need in flags for word, need in NEEDS.items() if word in flag)


def outcome(pools: RankPools, case: Combination) -> str:
    """Train a combination sharded and with DDP; load its checkpoint if it has a second run.

    Returns:
        `equal`, or `rejected: ` and the reason.

    Raises:
        AssertionError: Losses differ, or a training fails with another error.
    """
    steps = [STEPS, case.flags, EVALUATED if case.change == EVALUATE else ""]
    runs = [case.first] if case.second is None else [case.first, case.second]
    mine = Training()
    with tempfile.TemporaryDirectory() as folder:
        more: Flags = [] if case.second is None else saving(folder, SAVED)
        for run in runs:
            found = _training(pools, run.world_size, *steps, run.parallel, fsdp(run.strategy), more)
            if isinstance(found, str):
                return found
            # The first run trains on after the save, with its own learning rates.
            mine.losses = mine.losses[:SAVED] + found.losses
            mine.evaluations += found.evaluations
            more = words(loading(folder, SAVED), case.change.flags)
    theirs = _training(pools, WORLD_SIZE, *steps, case.first.parallel, case.change.whole)
    if isinstance(theirs, str):
        raise AssertionError(f"{case}: trains sharded, and Megatron's DDP is {theirs}")
    assert len(mine.losses) == (SAVED if case.change == EVALUATE else LAST), case
    difference = distance(mine.losses, theirs.losses)
    if case.change == EVALUATE:
        saved, loaded = mine.evaluations[:2], mine.evaluations[2:]
        assert saved == loaded, f"{case}: evaluations {loaded} after a load, before {saved}"
        difference = max(difference, distance(saved, theirs.evaluations))
    assert difference <= case.tolerance, f"{case}: losses differ by {difference:.1e}"
    return "equal"


def _training(pools: RankPools, world_size: int, *flags: Flags) -> Training | str:
    """Return a training, or the reason why its flags are rejected."""
    try:
        return trained(pools, world_size, *flags)
    except RankFailure as failure:
        lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
        for line in lines:
            kind, _, reason = line.partition(": ")
            if kind.endswith(("FlagError", "RehearsalError")) and reason:
                return f"rejected: {reason}"
        raise AssertionError(f"{' '.join(words(*flags))} ends with {lines[-1]}") from failure


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
            sys.stdout.write(f"{seed}: {case}\n    {said}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{args.cases} combinations, {failures} failures\n")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
