"""Random combinations of Megatron's flags: each trains as DDP does, or is rejected by name.

In some, a second run loads the checkpoint of the first: it resumes with other sizes, another
strategy, other learning rates or other flags of sharded runs, starts again with the weights, or
evaluates. A third may load what the second saved. `python -m tests.mcore.random_flags --cases 200
--seed 7` runs more cases than the tests. A seed always gives the same combination.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from functional_tests.matrix import DDP, MEGATRONS
from functional_tests.trainings import ZEROS_BY_CHANCE, Difference, difference
from tests.mcore.flags import (
    CP2,
    EP2,
    ETP1,
    HFSDP,
    HSDP,
    MAMBA,
    MOE,
    MUON,
    NO_SHARD,
    OVERLAP,
    PP2,
    STRATEGIES,
    TP2,
    TP2_SP,
    Flags,
    fsdp,
    loading,
    saving,
    words,
)
from tests.mcore.session import Training, impl_of
from tests.mcore.trained import trained
from tests.ranks import RankFailure, RankPools, rank_pools

LOADED, LAST = (2, 3), 4
"""Iterations that the second and the third run load, and the number of iterations."""
SAVED = LOADED[0]
# Tensor-parallel sizes do not change the padding of the vocabulary.
STEPS = "--global-batch-size 8 --make-vocab-size-divisible-by 64"
ITERATIONS = f"--train-iters {LAST} --lr-decay-iters {LAST}"
SAMPLES = f"--train-samples {8 * LAST} --lr-decay-samples {8 * LAST}"

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
    "--dsa-indexer-topk 8 --disable-bias-linear",
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
    "--num-experts 4 --moe-router-topk 2 --moe-router-pre-softmax "
    "--moe-router-topk-scaling-factor 2.5 --moe-enable-routing-replay",
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
_FP32_SUMS = "--accumulate-allreduce-grads-in-fp32"
PRECISIONS = (
    "",
    "",
    "--bf16",
    # Megatron sums gradients of micro-batches in fp16 otherwise, where more of them overflow.
    f"--fp16 --initial-loss-scale 1024 {_FP32_SUMS}",
    f"--fp16 --initial-loss-scale 4096 --loss-scale-window 2 --hysteresis 1 {_FP32_SUMS}",
    "--fp16 --loss-scale 64",
    f"--bf16 {_FP32_SUMS}",
)
# Transformer Engine's layers. No dimension of a weight is smaller than a block of FP8.
FP8 = "--bf16 --hidden-size 128 --ffn-hidden-size 256 --fp8-format hybrid --fp8-recipe"
TE_PRECISIONS = ("", "--bf16", f"{FP8} delayed", f"{FP8} tensorwise", f"{FP8} blockwise")
AUXILIARY = (
    "",
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01",
    "--moe-router-load-balancing-type quantile_balancing --moe-router-quantile-balancing-ema 0.9",
)
HYBRIDS = (
    MAMBA,
    f"{MAMBA} --hybrid-layer-pattern M*-E {MOE}",
    f"{MAMBA} --hybrid-layer-pattern M*-M/*-",
)
MUONS = (
    f"{MUON} --muon-tp-mode blockwise",
    f"{MUON} --muon-no-split-qkv --muon-scale-mode unit_rms_norm --weight-decay 0.2 "
    "--muon-tp-mode blockwise",
    f"{MUON} --muon-tp-mode duplicated --muon-nesterov --muon-momentum 0.8",
    f"{MUON} --muon-tp-mode distributed --muon-num-ns-steps 3",
    f"{MUON} --muon-scalar-optimizer lion --muon-tp-mode duplicated",
)
OPTIMIZERS = ("", "", *MUONS, "--optimizer lion --lr 1e-4")
BATCHES = (
    "",
    "",
    "--global-batch-size 16",
    "--micro-batch-size 1",
    "--micro-batch-size 1 --rampup-batch-size 4 4 8",
    "--global-batch-size 16 --rampup-batch-size 8 8 16",
)
SCHEDULES = (
    "--decoupled-lr 2e-3 --decoupled-min-lr 1e-4 --lr-decay-style linear",
    "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.3",
    "--lr-decay-style cosine --lr-warmup-iters 2 --min-lr 1e-4",
)
_VPP = "--num-layers-per-virtual-pipeline-stage 1"
_ALLTOALL = "--moe-token-dispatcher-type alltoall"
_PP4 = "--pipeline-model-parallel-size 4"
_EP4 = "--expert-model-parallel-size 4"
_UNEVEN = f"{PP2} --decoder-first-pipeline-num-layers 1"
_LAYOUT = f"{PP2} --pipeline-model-parallel-layout Et|t|t|tL"
# The first of six stages has an embedding alone, and the last an output layer.
_ALONE = (
    f"{PP2} --num-virtual-stages-per-pipeline-rank 3 "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
)
_OF_TWO = (
    *("", TP2, TP2_SP, PP2, f"{PP2} {_VPP}", _UNEVEN, _LAYOUT, _ALONE, CP2),
    *(EP2, f"{EP2} {_ALLTOALL}"),
)
PARALLEL = {
    1: ("",),
    2: _OF_TWO,
    4: (
        *_OF_TWO,
        f"{_LAYOUT} {TP2_SP}",
        f"{_EP4} {_ALLTOALL}",
        f"{EP2} {TP2_SP} {_ALLTOALL}",
        f"{EP2} {TP2_SP} {ETP1} {_ALLTOALL}",
        f"{EP2} --expert-tensor-parallel-size 2 {_ALLTOALL}",
        f"{EP2} {PP2} {_ALLTOALL}",
        f"{EP2} {PP2} {_VPP}",
        f"{EP2} {CP2} {_ALLTOALL}",
        f"{PP2} {TP2_SP}",
        f"{PP2} {_VPP} {CP2}",
        f"{TP2_SP} {CP2}",
        "--tensor-model-parallel-size 4 --sequence-parallel",
        _PP4,
    ),
}
OTHERS = (
    "--untie-embeddings-and-output-weights",
    "--disable-bias-linear",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "--recompute-granularity selective --recompute-modules core_attn layernorm",
    "--recompute-granularity selective --recompute-modules mla_up_proj",
    "--recompute-granularity selective --recompute-modules moe_act",
    "--recompute-granularity selective --recompute-modules moe shared_experts",
    "--recompute-granularity selective --recompute-modules mlp",
    "--mtp-num-layers 1",
    "--mtp-num-layers 1 --mtp-detach-heads",
    "--mtp-num-layers 2 --mtp-use-repeated-layer",
    "--calculate-per-token-loss",
    "--use-cpu-initialization",
    "--overlap-grad-reduce",
    "--moe-shared-expert-overlap",
    "--cross-entropy-loss-fusion",
    "--log-params-norm --log-num-zeros-in-grad",
    "--clip-grad 0.05",
    "--clip-grad 0",
    "--attention-dropout 0.1 --hidden-dropout 0.1",
    "--use-mup --mup-width-mult 2",
    "--apply-wd-to-qk-layernorm --qk-layernorm",
    "--fp32-residual-connection",
    "--glu-linear-offset 1.0 --activation-func-clamp-value 7.0",
    "--moe-shared-expert-gate",
    "--use-tp-pp-dp-mapping",
    "--rerun-mode validate_results",
    "--mlp-chunks-for-training 2",
    "--data-parallel-random-init",
    "--no-gradient-accumulation-fusion",
    "--first-last-layers-bf16",
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "--moe-layer-recompute",
    "--apply-residual-connection-post-layernorm",
    "--iterations-to-skip 3",
)
FROZEN = ("embedding", "layernorm", r"layers\.1\.", r"\.experts\.", "router", "mlp")
# Flags of sharded runs.
SHARDED = (
    OVERLAP,
    f"{OVERLAP} --fsdp-trace-pool",
    "--fsdp-trace-pool",
    f"{OVERLAP} --fsdp-unshard-prefetch-depth 3 --fsdp-max-live-grad-buffers 1",
    f"{OVERLAP} --fsdp-unshard-prefetch-bytes 64KiB",
    "--fsdp-unit-bytes 16MiB",
    "--suggested-communication-unit-size 100001",
    "--no-fsdp-flat-optimizer",
    "--create-all-gather-group",
    "--log-per-param-norm",
    "--check-weight-hash-across-dp-replicas-interval 1",
    "--async-save --use-persistent-ckpt-worker",
    "--fp8-param-gather",
    "--keep-fp8-transpose-cache",
    "--optimizer-cpu-offload",
    "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d",
    "--optimizer-cpu-offload --optimizer-offload-fraction 0.3 --no-pin-cpu-grads "
    "--use-torch-optimizer-for-cpu-offload",
)
# Flags that change no result of a dense model with one loss, for runs that load.
WHEN_LOADED = (
    "--micro-batch-size 1",
    "--calculate-per-token-loss",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--init-method-std 0.3",
    "--use-cpu-initialization",
)
GROUPS = (ATTENTION, EXPERTS, NORMS, POSITIONS, ACTIVATIONS)
# Megatron rejects the first flag without the second.
NEEDS = {
    "mla_up_proj": "--multi-latent-attention",
    "moe_act": "--moe-grouped-gemm",
    "moe ": "--num-experts",
    "--moe-layer-recompute": "--num-experts",
    _LAYOUT: "--num-layers",
    _ALONE: "--num-layers",
    EP2: "--num-experts",
    _EP4: "--num-experts",
    _VPP: "--num-layers",
    "--fp32-residual": "--bf16",
    "modules mlp": "--disable-bias-linear",
    _PP4: "--num-layers",
    _UNEVEN: "--num-layers",
    "--glu": "--swiglu",
    "--first-last": "--fp8-format",
    "fp8": "--fp8-format",
    "fusion": "transformer_engine",
    "aware": "transformer_engine",
    "repeated": "--position-embedding-type",
    "shared": "--moe-shared-expert-intermediate-size",
}
REJECTED_TOGETHER = (
    ("--fp16", "--optimizer "),
    ("lion", "--optimizer-cpu-offload"),
    ("dsa", CP2),
    # Megatron's DDP waits for gradients that an indexer without a loss does not have.
    ("dsa", "--overlap-grad-reduce"),
    ("--recompute-granularity full", "--moe-layer-recompute"),
    ("--mtp-num-layers", _LAYOUT),
    ("--mtp-num-layers", _ALONE),
    ("hybrid", _LAYOUT),
    ("hybrid", _ALONE),
    ("--suggested-communication-unit-size", "--fsdp-unshard-prefetch-bytes"),
    ("--fp8-param-gather", "--optimizer-cpu-offload"),
    ("--fp8-param-gather", "--use-cpu-initialization"),
    ("--init-model-with-meta-device", "--use-cpu-initialization"),
    ("--exp-avg-dtype", "--optimizer "),
    ("--exp-avg-dtype", "--optimizer-cpu-offload"),
    # Each of Megatron's chained optimizers has a loss scale of its own.
    ("--loss-scale-window", "--num-experts"),
    # Too few steps are taken.
    ("--loss-scale-window", "--skip-train"),
    ("--multi-latent-attention", "--rotary-interleaved"),
    ("hybrid", _VPP),
    ("hybrid", "--mtp-num-layers"),
    # Reentrant recomputation of a layer without an input that requires a gradient has none.
    ("--recompute-granularity full", "freezes ('embedding'"),
    ("transformer_engine", CP2),
    ("transformer_engine", "--mlp-chunks-for-training"),
    ("transformer_engine", "--mtp-use-repeated-layer"),
    ("gated_delta_net", "--tensor-model-parallel-size"),
    ("recipe delayed", "--recompute-modules"),
)
# Random numbers, dropped tokens and auxiliary losses depend on the tokens of a rank.
DEPEND_ON_SIZES = {
    "--moe-input-jitter-eps",
    "--moe-expert-capacity-factor",
    "--hidden-dropout",
    "global_aux_loss",
    "blockwise",
}


@dataclass(frozen=True, slots=True)
class Change:
    """What a second run does not take from the checkpoint.

    Attributes:
        flags: Flags of the second run.
        whole: Flags of an uninterrupted run with the learning rates of both. Megatron's own
            optimizers cannot resume with others.
        starts_again: Whether the second run is compared with a second run of DDP, rather than with
            the uninterrupted one.
    """

    flags: str
    whole: str = ""
    starts_again: bool = False


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
STARTS_AGAIN = {
    "finetune": Change("--finetune", starts_again=True),
    "no optimizer": Change("--no-load-optim", starts_again=True),
}
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
EVALUATIONS = f"--eval-interval {SAVED} --eval-iters 1"
EVALUATE = Change("--skip-train")
EVALUATED = f"--train-iters {SAVED} --eval-iters 2"


@dataclass(frozen=True, slots=True)
class Run:
    """Ranks and sharding of a run.

    Attributes:
        strategy: Sharding strategy, or `DDP`: Megatron's own DDP, with `torch_dist` checkpoints.
        world_size: Number of ranks.
        parallel: Flags of parallel sizes.
        ours: Flags that only this run has.
    """

    strategy: str
    world_size: int = 2
    parallel: str = ""
    ours: str = ""


@dataclass(frozen=True, slots=True)
class Combination:
    """Flags of one case.

    Attributes:
        flags: Flags of all runs.
        first: The run that trains, and saves if there is a second one.
        second: The run that loads, and saves if there is a third one.
        third: A run that loads what the second one saved.
        change: What the second run does with the checkpoint.
        freezes: Regular expressions of the names of frozen parameters.
    """

    flags: tuple[str, ...]
    first: Run
    second: Run | None = None
    third: Run | None = None
    change: Change = UNCHANGED
    freezes: tuple[str, ...] = ()

    @property
    def runs(self) -> list[Run]:
        """The runs in their order."""
        return [run for run in (self.first, self.second, self.third) if run is not None]

    @property
    def kinds(self) -> set[str]:
        """What the second run does."""
        if self.second is None:
            return {"train"}
        if self.change == EVALUATE:
            return {"evaluate"}
        changes = (CHANGES | STARTS_AGAIN).items()
        found = {"resume", *(name for name, change in changes if change == self.change)}
        found |= {"twice"} if self.third else set()
        if self.first.strategy == DDP:
            found.add("from Megatron")
        for name in ("strategy", "world_size", "parallel"):
            if getattr(self.first, name) != getattr(self.second, name):
                found.add(name)
        return found - {""}

    @property
    def rounds(self) -> bool:
        """Whether weights are rounded to 16 bits."""
        return not {"--bf16", "--fp16"}.isdisjoint(self.flags)

    @property
    def bounds(self) -> Difference:
        """Largest relative differences of losses and norms."""
        if "--fp8-format" in self.flags:
            return Difference(5e-3, 5e-2)
        if self.rounds:
            return Difference(5e-3, 5e-2) if "muon" in str(self) else Difference(5e-4, 5e-3)
        return Difference(1e-6, 1e-5)

    def __str__(self) -> str:
        loads = "".join(f"; {self.change.flags} {run}" for run in self.runs[1:])
        frozen = f" freezes {self.freezes}" if self.freezes else ""
        return f"{' '.join(self.flags)}{frozen} {self.first}{loads}"


def combination(seed: int) -> Combination:
    """Return the combination of a seed. Defaults are frequent, so that many combinations train."""
    draw = random.Random(seed)
    # Most combinations would be rejected for the same reasons.
    avoids_rejections = draw.random() < 0.95
    while True:
        case = _draw(draw, avoids_rejections)
        if not avoids_rejections or not _is_rejected(case):
            return case


def _is_rejected(case: Combination) -> bool:
    """Whether a combination is rejected for a well-known reason."""
    together = any(first in str(case) and other in str(case) for first, other in REJECTED_TOGETHER)
    # Instances divide the ranks with different data, and experts over all ranks have none.
    undivided = any(
        HSDP in run.ours and ("4" in run.parallel or run.parallel.count("-size ") != 1)
        for run in case.runs
        if run.parallel
    )
    return together or undivided


def _draw(draw: random.Random, avoids_rejections: bool) -> Combination:
    chosen = [draw.choice(group) if draw.random() < 0.5 else "" for group in GROUPS]
    if draw.random() < 0.1:
        chosen = [draw.choice(HYBRIDS)]
    uses_te = draw.random() < 0.2
    precisions = TE_PRECISIONS if uses_te else PRECISIONS
    chosen.append(draw.choice(precisions) if draw.random() < 0.6 else "")
    if uses_te:
        chosen.append("--transformer-impl transformer_engine")
    flags = words(*chosen)
    if "--num-experts" in flags:
        flags += draw.choice(AUXILIARY).split()
    if "--moe-layer-freq" not in flags and MAMBA not in chosen and draw.random() < 0.5:
        flags += ["--num-layers", "4"]
    flags += draw.choice(OPTIMIZERS).split() if draw.random() < 0.4 else []
    flags += draw.choice(BATCHES).split()
    schedule = draw.choice(SCHEDULES).split() if draw.random() < 0.3 else []
    if not schedule and "--global-batch-size" not in flags and draw.random() < 0.15:
        schedule = SAMPLES.split()
    flags += schedule
    exclusive = set()
    for flag in OTHERS:
        name = flag.split()[0]
        if draw.random() < 0.13 and name not in exclusive:
            if avoids_rejections and not _has_needs(flag, flags):
                continue
            flags += flag.split()
            exclusive.add(name)
    world_size = draw.choice((2, 4))
    if avoids_rejections:
        flags += ["--disable-bias-linear"] if "--num-experts" in flags else []
        flags += ["--position-embedding-type", "rope"] if "--mtp-num-layers" in flags else []
    parallel = _parallel(draw, flags, world_size, avoids_rejections)
    # Stages and tensor-parallel ranks hold different parts of these.
    if "--mtp-detach-heads" in flags and draw.random() < 0.5:
        parallel = PP2
        flags.append("--untie-embeddings-and-output-weights")
    elif "--softmax-type" in flags and draw.random() < 0.8:
        parallel = TP2_SP if "--num-experts" in flags else TP2
    freezes = (draw.choice(FROZEN),) if draw.random() < 0.15 else ()
    first = _run(draw, flags, world_size, parallel)
    case = Combination(tuple(flags), first, freezes=freezes)
    kind = draw.choice(("train", "resume", "resume", "resume", "evaluate"))
    if kind == "train" or (kind == "evaluate" and "--train-samples" in flags):
        return case
    if kind == "resume" and draw.random() < 0.2:
        flags += EVALUATIONS.split()
        case = replace(case, flags=tuple(flags))
    # Megatron cannot save before a step is taken, or Muon of layers that predict further tokens.
    is_unsaved = "--loss-scale-window" in flags or {"--optimizer", "--mtp-num-layers"} <= {*flags}
    if kind == "resume" and draw.random() < 0.2 and not is_unsaved:
        # Muon and Lion have no distributed optimizer; with stages, Megatron's misplaces the moments
        # of an embedding that predicts further tokens.
        written = "" if {"--optimizer", "--mtp-num-layers"} & set(flags) else DISTRIBUTED
        case = replace(case, first=Run(DDP, world_size, parallel, written))
    second = _run(draw, flags, world_size, parallel, loads=True)
    if kind == "evaluate":
        return replace(case, second=second, change=EVALUATE)
    if draw.random() < 0.7 and not DEPEND_ON_SIZES & set(flags):
        world_size = draw.choice((1, 2, 4))
        parallel = _parallel(draw, flags, world_size, avoids_rejections)
        # Megatron divides the loss of MTP by the tokens of a rank's part of the sequence.
        if "--mtp-num-layers" not in flags or CP2 not in f"{first.parallel} {parallel}":
            second = _run(draw, flags, world_size, parallel, loads=True)
    changing = {"--num-experts", "--mtp-num-layers", "--fp8-format", "--fp16", *DEPEND_ON_SIZES}
    if not changing & set(flags):
        names = [flag for flag in WHEN_LOADED if flag.split()[0] not in flags]
        second = replace(second, ours=f"{second.ours} {draw.choice(names)}".strip())
    if draw.random() < 0.15 and not is_unsaved:
        return replace(case, second=second, change=draw.choice(list(STARTS_AGAIN.values())))
    change = "" if schedule else draw.choice(list(CHANGES))
    case = replace(case, second=second, change=CHANGES[change])
    if draw.random() < 0.4:
        case = replace(case, third=_run(draw, flags, first.world_size, first.parallel, loads=True))
    return case


def _parallel(draw: random.Random, flags: Sequence[str], world_size: int, avoids: bool) -> str:
    """Draw flags of parallel sizes, that are not rejected for well-known reasons if `avoids`."""
    sizes = PARALLEL[world_size]
    if avoids:
        # Experts need sequence parallelism with tensor parallelism, and without it Megatron trains
        # the replicas of latent attention apart.
        needing = {"--num-experts", "--multi-latent-attention"}
        without = None if needing.isdisjoint(flags) else TP2
        sizes = tuple(s for s in sizes if s != without and _has_needs(s, flags))
    return draw.choice(sizes) if draw.random() < 0.8 else ""


def _run(
    draw: random.Random, flags: Sequence[str], world_size: int, parallel: str, loads: bool = False
) -> Run:
    """Draw the strategy and the flags of a sharded run, which may load a checkpoint."""
    strategy = draw.choice(STRATEGIES)
    ours = [flag for flag in SHARDED if draw.random() < 0.1 and _has_needs(flag, flags)]
    if "--num-experts" in flags and draw.random() < 0.3:
        ours.append(f"--expert-data-parallel-sharding-strategy {draw.choice(STRATEGIES)}")
    if loads and strategy != NO_SHARD and draw.random() < 0.15:
        ours.append("--init-model-with-meta-device")
    instances = draw.random()
    if world_size == 4 and instances < 0.4:
        ours.append(HSDP if instances < 0.2 or NO_SHARD in {strategy, *words(*ours)} else HFSDP)
    return Run(strategy, world_size, parallel, " ".join(ours))


def _has_needs(flag: str, flags: Sequence[str]) -> bool:
    return all(need in flags for word, need in NEEDS.items() if word in flag)


EQUAL, REJECTED, FAILS = "equal:", "rejected:", "fails with"
"""Beginnings of outcomes."""
PoolsFor = Callable[[Sequence[str]], RankPools]
"""Returns the process groups that support a command line."""
Train = Callable[[int, Flags], Training | str]
"""Trains on a number of ranks, or returns why the flags are rejected."""


def outcome(pools_for: PoolsFor, case: Combination) -> str:
    """Train a combination sharded and with DDP; load its checkpoint if it has further runs.

    Returns:
        `equal` and the largest differences; `rejected: ` and the reason; or `fails with ` and an
        error that Megatron's DDP raises too.

    Raises:
        AssertionError: Measurements differ, or a training fails with another error.
    """
    length = "" if "--train-samples" in case.flags else ITERATIONS
    evaluated = EVALUATED if case.change == EVALUATE else ""
    steps = words(STEPS, length, case.flags, evaluated)
    train = partial(_training, pools_for(steps), case)
    mine = _in_turn(train, case, case.runs, steps)
    if isinstance(mine, str):
        return mine
    if "--use-precision-aware-optimizer" in steps:
        steps.append("--use-distributed-optimizer")
    again = case.change.starts_again
    written = DISTRIBUTED if again and "--optimizer" not in case.flags else ""
    runs = [Run(DDP, run.world_size, run.parallel, written) for run in case.runs]
    theirs = _in_turn(train, case, runs if again else runs[:1], words(steps, case.change.whole))
    if isinstance(theirs, str):
        raise AssertionError(f"{case}: trains sharded, and Megatron's DDP is {theirs}")
    if again:
        compared = list(zip(mine, theirs, strict=True))
    else:
        # The first run trains on after the save, with its own learning rates.
        compared = [] if case.change.whole else [(mine[0], theirs[0])]
        if case.change == EVALUATE:
            saved, loaded = (run.evaluations for run in mine)
            assert len(saved) == 2, case
            assert saved == loaded, f"{case}: evaluations {loaded} after a load, before {saved}"
        elif case.second:
            joined = mine[0]
            for after, resumed in zip(LOADED, mine[1:], strict=False):
                joined = _joined(joined, resumed, after)
            compared.append((joined, theirs[0]))
    found = Difference(0, 0)
    for training, other in compared:
        if case.change.whole:
            # An iteration logs the learning rate of the next one.
            training.learning_rates = other.learning_rates
        found = difference(training, other, len(other.skipped), ZEROS_BY_CHANCE)
        assert found.within(case.bounds), f"{case}: {found}"
    return f"{EQUAL} {found}"


def _in_turn(
    train: Train, case: Combination, runs: Sequence[Run], steps: Flags
) -> list[Training] | str:
    """Train runs, each of which loads what the one before saved; or return why one does not."""
    done = []
    with tempfile.TemporaryDirectory() as folder:
        for position, run in enumerate(runs):
            selected = MEGATRONS if run.strategy == DDP else fsdp(run.strategy)
            flags = words(steps, run.parallel, selected, run.ours)
            if position:
                flags += words(loading(folder, LOADED[position - 1]), case.change.flags)
            if position + 1 < len(runs):
                # The second run replaces a checkpoint of the first, of other sizes.
                flags += saving(folder, 1 if len(runs) > 2 else SAVED)
            result = train(run.world_size, flags)
            if isinstance(result, str):
                if result.startswith(FAILS):
                    others = train(run.world_size, words(steps, run.parallel))
                    assert result == others, f"{' '.join(flags)} {result}"
                return result
            done.append(result)
    return done


def _joined(first: Training, second: Training, after: int) -> Training:
    """Return the measurements of a run until an iteration, and of the run that continues."""
    taken = after - sum(first.skipped[:after])
    cuts = dict.fromkeys(("losses", "params_norms", "learning_rates"), after)
    # Evaluations at the saved iteration, at the end, and on test data.
    cuts["evaluations"] = len(first.evaluations) // 4
    cuts |= dict.fromkeys(("loss_scales", "skipped"), after)
    cuts |= dict.fromkeys(("grad_norms", "num_zeros"), taken)
    parts = {name: getattr(first, name)[:cut] + getattr(second, name) for name, cut in cuts.items()}
    return replace(second, **parts)


def _training(pools: RankPools, case: Combination, world_size: int, flags: Flags) -> Training | str:
    """Return a training, or the reason why its flags are rejected."""
    try:
        return trained(pools, world_size, flags, exact_norms=case.rounds, freezes=case.freezes)
    except RankFailure as failure:
        lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
        for line in lines:
            kind, _, reason = line.partition(": ")
            if kind.endswith(("FlagError", "RehearsalError")) and reason:
                return f"{REJECTED} {reason}"
        # The error of one rank, which names the rank that failed first.
        return f"{FAILS} {failure.__context__}"


def main() -> int:
    """Run the number of cases of the command line; print the outcome of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    args = parser.parse_args()
    failures = 0
    with rank_pools() as local, rank_pools(["tests.mcore.preloaded_te"]) as te:
        for seed in range(args.seed, args.seed + args.cases):
            case = combination(seed)
            try:
                said = outcome(lambda flags: local if impl_of(flags) == "local" else te, case)
            except AssertionError as error:
                said, failures = f"FAILED: {error}", failures + 1
            sys.stdout.write(f"{seed}: {case}\n    {said}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{args.cases} combinations, {failures} failures\n")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
