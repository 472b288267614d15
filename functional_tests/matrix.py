"""The functional matrix as data: what is trained, beside what, and how close it has to come.

A row trains the same tiny model for ten iterations twice with equal parallel sizes: by Megatron's
own DDP, and sharded by this package with each of the row's strategies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.mcore.flags import (
    ALLTOALL,
    CP2,
    DEEPSEEK,
    EP2,
    ETP1,
    FULL_RECOMPUTE,
    HFSDP,
    HSDP,
    LATENT,
    LATENT_SIZES,
    LOW_RANK_QUERIES,
    MAMBA,
    MODEL_FLAGS,
    MODERN,
    MOE,
    MTP,
    MUON,
    NO_SHARD,
    OVERLAP_GRADS,
    OVERLAP_PARAMS,
    PP2,
    SPARSE,
    TP2,
    TP2_SP,
    UNTIED,
    VPP2,
    ZERO1,
    ZERO2,
    ZERO3,
    fsdp,
)

ITERATIONS = 10
SAVED = 4
STRATEGIES = (ZERO3, ZERO2, ZERO1, NO_SHARD)
SHARDED = (ZERO3, ZERO2, ZERO1)

COMMON = [*MODEL_FLAGS, "--global-batch-size", "8", "--train-iters", str(ITERATIONS)]

NORMS = "--log-params-norm --log-num-zeros-in-grad"
FULL = FULL_RECOMPUTE
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn mlp"
PER_TOKEN = "--calculate-per-token-loss"
CLIPPED = "--clip-grad 0.05 --weight-decay 0.1 --adam-beta2 0.95 --lr-decay-style cosine"
EVALUATION = "--eval-interval 3 --eval-iters 2 --manual-gc --manual-gc-interval 2"
FP16 = (
    "--fp16 --initial-loss-scale 1048576 --loss-scale-window 3 --hysteresis 1 "
    "--accumulate-allreduce-grads-in-fp32"
)
DELTA_SIZES = (
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 16 --linear-value-head-dim 16 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4"
)
DELTA_NET = (
    f"--experimental-attention-variant gated_delta_net --linear-attention-freq 2 {DELTA_SIZES} "
    "--swiglu --normalization RMSNorm --disable-bias-linear"
)
EVERY_KIND = (
    "--hybrid-layer-pattern MG+-E --mamba-state-dim 16 --mamba-head-dim 16 --mamba-num-groups 2 "
    f"--num-experts 2 --moe-router-topk 2 {LATENT_SIZES} {DELTA_SIZES} --q-lora-rank 24 "
    "--swiglu --normalization RMSNorm --disable-bias-linear"
)
TE = "--transformer-impl transformer_engine"
UNFUSED_GRADS = "--no-gradient-accumulation-fusion"
GROUPED = f"{ALLTOALL} --moe-grouped-gemm"
META = "--init-model-with-meta-device"
BATCH1 = "--micro-batch-size 1"


@dataclass(frozen=True, slots=True)
class Row:
    """One combination.

    Attributes:
        name: What the row shows; unique.
        world_size: Number of ranks.
        flags: Flags of both sides.
        ours: Flags of the sharded run alone.
        theirs: Flags of the reference alone.
        strategies: Sharding strategies to train with.
        freezes: Patterns; parameters in whose name one is found are frozen on both sides.
        tolerance: Largest relative difference of losses and norms in fp32.
        quick: Whether its first strategy is trained by `make test` as well.
        types: Whether it is also trained through the command line, as a user would.
    """

    name: str
    world_size: int
    flags: str = ""
    ours: str = ""
    theirs: str = ""
    strategies: tuple[str, ...] = (ZERO3,)
    freezes: tuple[str, ...] = ()
    tolerance: float = 1e-6
    quick: bool = False
    types: bool = False

    @property
    def is_low_precision(self) -> bool:
        """Whether its weights are rounded, which decides how close two orders of a sum come."""
        return not {"--bf16", "--fp16"}.isdisjoint(self.flags.split())

    @property
    def reference(self) -> Run:
        """The run of Megatron's own DDP."""
        flags = (*COMMON, *self.flags.split(), *self.theirs.split())
        return Run(self.world_size, flags, self.freezes)

    @property
    def yardsticks(self) -> tuple[Run, Run]:
        """Runs of Megatron's own distributed optimizer, sharded in two ways."""
        run = self.reference
        plain = (*run.flags, "--use-distributed-optimizer")
        cut_small = (*plain, "--overlap-grad-reduce", "--ddp-bucket-size", "20000")
        return (
            Run(run.world_size, plain, run.freezes),
            Run(run.world_size, cut_small, run.freezes),
        )

    def sharded(self, strategy: str) -> Run:
        """The run of this package."""
        flags = (*COMMON, *self.flags.split(), *fsdp(strategy, *self.ours.split()))
        return Run(self.world_size, flags, self.freezes)


@dataclass(frozen=True, slots=True)
class Run:
    """A training: equal runs give equal numbers.

    Attributes:
        world_size: Number of ranks.
        flags: All flags but those of the rehearsal.
        freezes: See `Row`.
        exact_norms: Norms of gradients are added up in fp64.
    """

    world_size: int
    flags: tuple[str, ...]
    freezes: tuple[str, ...] = ()
    exact_norms: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A row with one of its strategies."""

    row: Row
    strategy: str

    @property
    def is_quick(self) -> bool:
        """Whether `make test` trains it."""
        return self.row.quick and self.strategy == self.row.strategies[0]


# fmt: off
ROWS: tuple[Row, ...] = (
    # ------------------------------------------------------------------------------------- 2 ranks
    Row("dense", 2, f"{NORMS} {UNTIED}", strategies=STRATEGIES, quick=True),
    Row("dense, bf16", 2, "--bf16", strategies=STRATEGIES),
    Row("GQA, SwiGLU, QK norm, untied", 2, f"{MODERN} {UNTIED}",
        strategies=(ZERO3, ZERO1), quick=True),
    Row("both overlap flags, accumulation", 2, f"{OVERLAP_GRADS} --global-batch-size 16",
        ours=OVERLAP_PARAMS, strategies=STRATEGIES),
    Row("full recompute", 2, FULL, strategies=(ZERO3, ZERO2)),
    Row("selective recompute", 2, f"{SELECTIVE} {MODERN}", strategies=(ZERO3, NO_SHARD)),
    Row("per-token loss", 2, PER_TOKEN, strategies=STRATEGIES),
    Row("clipping, weight decay, cosine", 2, CLIPPED, strategies=STRATEGIES),
    Row("trace pool, evaluation in between", 2, EVALUATION,
        ours=f"{OVERLAP_GRADS} {OVERLAP_PARAMS} --fsdp-trace-pool", strategies=(ZERO3, ZERO1)),
    Row("evaluation in between", 2, EVALUATION, ours=f"{OVERLAP_GRADS} {OVERLAP_PARAMS}",
        strategies=(ZERO3, ZERO1)),
    Row("fp16, dynamic loss scale", 2, FP16, strategies=STRATEGIES),
    Row("frozen embedding and norms", 2, f"{UNTIED} {NORMS}", strategies=STRATEGIES,
        freezes=("embedding", "layernorm")),
    Row("frozen layer, full recompute", 2, FULL, strategies=(ZERO3, ZERO2),
        freezes=(r"layers\.1\.",)),
    Row("random initialization by rank", 2, "--data-parallel-random-init",
        strategies=(ZERO3, ZERO1)),
    Row("multi-token prediction", 2, MTP, strategies=(ZERO3, ZERO2)),
    Row("experts, sequential", 2, MOE, strategies=STRATEGIES),
    Row("experts, grouped", 2, f"{MOE} --moe-grouped-gemm", strategies=(ZERO3, ZERO1)),
    Row("experts, sigmoid router with bias", 2,
        f"{ALLTOALL} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        strategies=(ZERO3, ZERO1)),
    Row("latent attention", 2, f"{LOW_RANK_QUERIES} {NORMS}", strategies=STRATEGIES, quick=True),
    Row("latent attention, full-rank queries, plain rope", 2, f"{LATENT} --rope-type rope",
        strategies=(ZERO3, ZERO1)),
    Row("latent attention, experts, multi-token prediction", 2, f"{DEEPSEEK} --mtp-num-layers 1",
        strategies=STRATEGIES),
    Row("latent attention, experts, recompute of projections", 2,
        f"{DEEPSEEK} --recompute-granularity selective --recompute-modules mla_up_proj moe_act",
        strategies=(ZERO3, ZERO2)),
    Row("experts in a latent space", 2, f"{ALLTOALL} --moe-latent-size 32 "
        "--moe-shared-expert-intermediate-size 64", strategies=(ZERO3, ZERO1)),
    Row("norms around one", 2, f"--apply-layernorm-1p {NORMS}", strategies=STRATEGIES),
    Row("norms around one, latent attention", 2, f"--apply-layernorm-1p {LATENT} {CLIPPED}",
        strategies=(ZERO3, ZERO2)),
    Row("sparse attention", 2, f"{SPARSE} {NORMS}", strategies=(ZERO3, ZERO1)),
    Row("gated delta net", 2, f"{DELTA_NET} --apply-layernorm-1p", strategies=(ZERO3, ZERO2)),
    Row("hybrid of every kind of layer", 2, EVERY_KIND, strategies=(ZERO3,)),
    Row("hybrid Mamba", 2, MAMBA, strategies=(ZERO3, ZERO2)),
    Row("Muon", 2, f"{MODERN} {MUON} {NORMS}", strategies=STRATEGIES),
    Row("default layers", 2, f"{TE} {NORMS}", strategies=STRATEGIES),
    Row("default layers, bf16", 2, f"{TE} --bf16", strategies=(ZERO3, ZERO1)),
    Row("default layers, weight gradients apart", 2, f"{TE} {UNFUSED_GRADS}"),
    Row("default layers, GQA, SwiGLU, QK norm, untied", 2, f"{TE} {MODERN} {UNTIED}"),
    Row("default layers, full recompute", 2, f"{TE} {FULL}"),
    Row("default layers, selective recompute", 2, f"{TE} {SELECTIVE} {MODERN}",
        strategies=(ZERO2,)),
    Row("default layers, grouped experts", 2, f"{TE} {GROUPED}", strategies=(ZERO3, ZERO1)),
    Row("default layers, latent attention", 2, f"{TE} {LOW_RANK_QUERIES}"),
    Row("default layers, multi-token prediction", 2, f"{TE} {MTP}"),
    Row("default layers, PP2, tied", 2, f"{TE} {PP2}"),
    Row("default layers, TP2", 2, f"{TE} {TP2_SP}"),
    Row("default layers, EP2", 2, f"{TE} {GROUPED} {EP2}", strategies=(ZERO2,)),
    Row("default layers, hybrid Mamba", 2, f"{TE} {MAMBA}"),
    Row("default layers, Muon", 2, f"{TE} {MODERN} {MUON}"),
    Row("TP2", 2, f"{TP2} {NORMS}", strategies=(ZERO3, NO_SHARD)),
    Row("PP2, tied", 2, f"{PP2} {NORMS}", strategies=(ZERO3, ZERO1)),
    Row("CP2", 2, CP2, strategies=(ZERO3, ZERO2)),
    Row("EP2", 2, f"{ALLTOALL} {EP2} {NORMS}", strategies=(ZERO3, ZERO2)),
    # ------------------------------------------------------------------------------------- 4 ranks
    Row("DP4, accumulation", 4, "--global-batch-size 16", strategies=(ZERO2,)),
    Row("TP2 x DP2, sequence parallel", 4, f"{TP2_SP} {NORMS}", strategies=STRATEGIES, quick=True,
        types=True),
    Row("TP2 x DP2, sequence parallel, GQA, SwiGLU", 4, f"{TP2_SP} {MODERN} {UNTIED}",
        strategies=(ZERO1,)),
    Row("TP2 x DP2, sequence parallel, bf16", 4, f"{TP2_SP} --bf16"),
    Row("default layers, TP2 x DP2, sequence parallel", 4, f"{TE} {TP2_SP} {MODERN}"),
    Row("PP2 x DP2, tied", 4, f"{PP2} {NORMS}", strategies=STRATEGIES, types=True),
    Row("PP2 x DP2, untied, per-token loss", 4, f"{PP2} {UNTIED} {PER_TOKEN}",
        strategies=(ZERO2,)),
    Row("PP2 x DP2, overlap flags", 4, f"{PP2} {OVERLAP_GRADS} --global-batch-size 16",
        ours=OVERLAP_PARAMS),
    Row("PP2 x DP2, virtual stages", 4, VPP2, strategies=(ZERO3, ZERO2, NO_SHARD)),
    Row("PP2 x DP2, virtual stages, overlap flags", 4, f"{VPP2} {OVERLAP_GRADS}",
        ours=OVERLAP_PARAMS, strategies=(ZERO1,)),
    Row("PP2 x DP2, multi-token prediction", 4, f"{PP2} {MTP}"),
    Row("TP2 x PP2", 4, f"{TP2_SP} {PP2}", strategies=(ZERO1,)),
    Row("CP2 x DP2", 4, f"{CP2} {NORMS}", strategies=STRATEGIES),
    Row("CP2 x DP2, per-token loss, clipping", 4, f"{CP2} {PER_TOKEN} {CLIPPED}"),
    Row("HSDP 2x2", 4, NORMS, ours=HSDP, strategies=STRATEGIES),
    Row("HSDP 2x2, overlap flags, recompute", 4, f"{OVERLAP_GRADS} {FULL} --global-batch-size 16",
        ours=f"{HSDP} {OVERLAP_PARAMS}"),
    Row("HSDP 2x2, bf16", 4, "--bf16", ours=HSDP, strategies=(ZERO1,)),
    Row("HFSDP 2x2", 4, NORMS, ours=HFSDP, strategies=SHARDED),
    Row("HFSDP 2x2, per-token loss, overlap flags", 4,
        f"{PER_TOKEN} {OVERLAP_GRADS} --global-batch-size 16", ours=f"{HFSDP} {OVERLAP_PARAMS}",
        strategies=(ZERO2,)),
    Row("HSDP 2x2, TP2", 4, f"{TP2_SP}", ours=HSDP),
    Row("EP2 x DP2, all-to-all", 4, f"{ALLTOALL} {EP2} {NORMS}", strategies=STRATEGIES,
        types=True),
    Row("EP2 x DP2, all-gather, grouped", 4, f"{MOE} {EP2} --moe-grouped-gemm"),
    Row("EP2 x DP2, shared expert, dense first layer", 4,
        f"{ALLTOALL} {EP2} --moe-shared-expert-intermediate-size 64 --moe-layer-freq [0,1]",
        strategies=(ZERO1,)),
    Row("EP2 x DP2, per-token loss, clipping", 4, f"{ALLTOALL} {EP2} {PER_TOKEN} {CLIPPED}"),
    Row("EP2 x DP2, experts with a strategy of their own", 4, f"{ALLTOALL} {EP2}",
        ours=f"--expert-data-parallel-sharding-strategy {ZERO3}", strategies=(ZERO1,)),
    Row("EP2 x DP2, frozen experts, evaluation", 4, f"{ALLTOALL} {EP2} {EVALUATION} {NORMS}",
        freezes=(r"\.experts\.",)),
    Row("EP2 x DP2, overlap flags, recompute of experts", 4,
        f"{ALLTOALL} {EP2} {OVERLAP_GRADS} --global-batch-size 16 "
        "--recompute-granularity selective --recompute-modules moe",
        ours=OVERLAP_PARAMS),
    Row("EP2 x DP2, bf16", 4, f"{ALLTOALL} {EP2} --bf16", strategies=(ZERO2,)),
    Row("EP2, HSDP 2x2", 4, f"{ALLTOALL} {EP2} {NORMS}", ours=HSDP, strategies=(ZERO3, ZERO2)),
    Row("EP2 x TP2, expert TP1", 4, f"{ALLTOALL} {EP2} {TP2_SP} {ETP1} {NORMS}"),
    Row("TP2 x DP2, expert TP2", 4, f"{ALLTOALL} {TP2_SP}", strategies=(ZERO1,)),
    Row("EP2 x PP2", 4, f"{ALLTOALL} {EP2} {PP2} {UNTIED}", strategies=(ZERO2,)),
    Row("latent attention, TP2 x DP2", 4, f"{LOW_RANK_QUERIES} {TP2_SP} {NORMS}",
        strategies=(ZERO3, NO_SHARD)),
    Row("sparse attention, TP2 x DP2", 4, f"{SPARSE} {TP2_SP}", strategies=(ZERO2,)),
    Row("gated delta net, experts, EP2 x PP2", 4, f"{DELTA_NET} {ALLTOALL} {EP2} {PP2}"),
    Row("latent attention, CP2 x DP2", 4, f"{LATENT} {CP2}", strategies=(ZERO2,)),
    Row("latent attention, experts, EP2 x TP2", 4, f"{DEEPSEEK} {EP2} {TP2_SP} {ETP1} {NORMS}"),
    Row("latent attention, experts, EP2 x PP2, multi-token prediction", 4,
        f"{DEEPSEEK} {EP2} {PP2} --mtp-num-layers 1", strategies=(ZERO3, ZERO1)),
    Row("experts in a latent space, EP2 x TP2", 4,
        f"{ALLTOALL} --moe-latent-size 32 {EP2} {TP2_SP} {ETP1} {NORMS}"),
    Row("norms around one, TP2 x DP2", 4, f"--apply-layernorm-1p {MODERN} {TP2_SP}",
        strategies=(ZERO1,)),
    Row("hybrid Mamba, TP2 x DP2", 4, f"{MAMBA} {TP2_SP}"),
    Row("Muon, TP2 x DP2, whole matrices", 4, f"{MODERN} {TP2_SP} {MUON} --muon-tp-mode duplicated",
        strategies=(ZERO3, ZERO1)),
    Row("Muon, EP2 x DP2", 4, f"{ALLTOALL} {EP2} {MUON}"),
    # ------------------------------------------------------------------------------------- 8 ranks
    Row("TP2 x PP2 x DP2", 8, f"{TP2_SP} {PP2} {NORMS}", strategies=(ZERO3, NO_SHARD)),
    Row("TP2 x CP2 x DP2", 8, f"{TP2_SP} {CP2} {MODERN}"),
    Row("HSDP 2x4", 8, BATCH1, ours=HSDP, strategies=(ZERO1,)),
    Row("HFSDP 2x2, TP2", 8, f"{TP2_SP}", ours=HFSDP, strategies=(ZERO2,)),
    Row("EP2 x DP4, HSDP 2x4", 8, f"{ALLTOALL} {EP2} {BATCH1} {NORMS}", ours=HSDP,
        strategies=(ZERO2,)),
    Row("EP2 x DP4, HFSDP 2x4", 8, f"{ALLTOALL} {EP2} {BATCH1}", ours=HFSDP),
    Row("EP2 x PP2 x DP2, virtual stages", 8, f"{ALLTOALL} {EP2} {VPP2} {BATCH1}"),
    Row("EP2 x TP2 x DP2, expert TP2", 8, f"{ALLTOALL} {EP2} {TP2_SP}"),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Setup:
    """How many ranks share a model, and how.

    Attributes:
        world_size: Number of ranks.
        strategy: Sharding strategy.
        flags: Parallel sizes.
    """

    world_size: int
    strategy: str
    flags: str = ""


@dataclass(frozen=True, slots=True)
class Resume:
    """A run that saves, and one that goes on from there with other parallel sizes.

    Attributes:
        name: What changes; unique.
        flags: Flags of both runs, the model above all.
        saves: The run that saves (and goes on, to be compared with).
        loads: The run that loads.
        tolerance: Largest relative difference of losses.
        quick: Whether `make test` runs it as well.
    """

    name: str
    flags: str
    saves: Setup
    loads: Setup
    tolerance: float = 1e-6
    quick: bool = False

    def saving(self, folder: str) -> Run:
        """The run that saves into a folder."""
        return self._run(self.saves, "--save", folder, "--save-interval", str(SAVED))

    def loading(self, folder: str) -> Run:
        """The run that loads from it, after `SAVED` iterations."""
        return self._run(self.loads, "--load", folder, "--ckpt-step", str(SAVED))

    def _run(self, setup: Setup, *more: str) -> Run:
        words = [*self.flags.split(), *setup.flags.split(), *more]
        return Run(setup.world_size, (*COMMON, *fsdp(setup.strategy, *words)))


# The vocabulary is padded to the same size with every tensor-parallel size.
WHOLE_VOCABULARY = "--make-vocab-size-divisible-by 256"

# fmt: off
RESUMES: tuple[Resume, ...] = (
    Resume("ZeRO-3 at 4 ranks, ZeRO-1 at 2", MODERN, Setup(4, ZERO3), Setup(2, ZERO1), quick=True),
    Resume("tensor parallel, not any more", MODERN,
        Setup(4, ZERO3, TP2_SP), Setup(2, ZERO2, WHOLE_VOCABULARY)),
    Resume("tensor parallel from now on", MODERN,
        Setup(2, ZERO3, WHOLE_VOCABULARY), Setup(4, ZERO3, TP2_SP)),
    Resume("expert parallel, not any more", ALLTOALL, Setup(4, ZERO3, EP2), Setup(2, ZERO1)),
    Resume("expert parallel from now on", ALLTOALL, Setup(2, ZERO2), Setup(4, ZERO3, EP2)),
    Resume("pipeline, not any more", UNTIED, Setup(4, ZERO3, PP2), Setup(2, ZERO3)),
    Resume("pipeline from now on, tied embedding", MODERN, Setup(2, ZERO3), Setup(4, ZERO1, PP2)),
    Resume("virtual stages, not any more", "--num-layers 4",
        Setup(4, ZERO3, VPP2), Setup(2, ZERO2, PP2)),
    Resume("HSDP 2x2, ZeRO-1 at 2 ranks", MODERN, Setup(4, ZERO3, HSDP), Setup(2, ZERO1)),
    Resume("no sharding, HFSDP 2x2", MODERN, Setup(2, NO_SHARD), Setup(4, ZERO3, HFSDP)),
    Resume("context parallel, not any more", MODERN, Setup(4, ZERO3, CP2), Setup(4, ZERO2)),
    Resume("TP2 x PP2 x DP2, 2 ranks", MODERN,
        Setup(8, ZERO3, f"{TP2_SP} {PP2}"), Setup(2, ZERO3, WHOLE_VOCABULARY)),
    Resume("built on the meta device from now on", MODERN,
        Setup(2, ZERO3, WHOLE_VOCABULARY), Setup(4, ZERO3, f"{TP2_SP} {META}")),
    Resume("hybrid Mamba, ZeRO-3 at 2 ranks, HSDP 2x2", MAMBA,
        Setup(2, ZERO3), Setup(4, ZERO3, HSDP)),
    Resume("latent attention, EP2 x TP2, ZeRO-1 at 2 ranks", DEEPSEEK,
        Setup(4, ZERO3, f"{EP2} {TP2_SP} {ETP1}"), Setup(2, ZERO1, WHOLE_VOCABULARY)),
    Resume("EP2 x TP2, EP2 x PP2", ALLTOALL,
        Setup(4, ZERO3, f"{EP2} {TP2_SP} {ETP1}"),
        Setup(4, ZERO3, f"{EP2} {PP2} {WHOLE_VOCABULARY}")),
)
# fmt: on


def cases() -> Iterator[Case]:
    """Every row with every strategy of its own, smallest world first."""
    for row in sorted(ROWS, key=lambda row: row.world_size):
        for strategy in row.strategies:
            yield Case(row, strategy)


_SIZES = {
    "TP": "--tensor-model-parallel-size",
    "PP": "--pipeline-model-parallel-size",
    "CP": "--context-parallel-size",
    "EP": "--expert-model-parallel-size",
}


def sizes(row: Row) -> str:
    """Parallel sizes of a row in words, such as `TP2 PP2 DP2`; those of size 1 are left out."""
    words = [*row.flags.split(), *row.ours.split()]

    def value(flag: str) -> int:
        return int(words[words.index(flag) + 1]) if flag in words else 1

    found = {name: value(flag) for name, flag in _SIZES.items()}
    shown = [f"{name}{size}" for name, size in found.items() if size > 1]
    if "--num-experts" in words and found["TP"] > 1:
        # Experts are cut as everything else is, unless a flag says otherwise.
        shown.append(f"ETP{1 if '--expert-tensor-parallel-size' in words else found['TP']}")
    data_parallel = row.world_size // (found["TP"] * found["PP"] * found["CP"])
    instances = value("--num-distributed-optimizer-instances")
    if instances > 1:
        kind = "HFSDP" if "--outer-dp-sharding-strategy" in words else "HSDP"
        shown.append(f"{kind} {instances}x{data_parallel * found['CP'] // instances}")
    else:
        shown.append(f"DP{data_parallel}")
    return " ".join(shown)
