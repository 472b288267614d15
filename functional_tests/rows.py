"""Rows of the matrices: trainings compared with Megatron's DDP or other flags, and resumes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from functional_tests import probes
from functional_tests.matrix import DDP, STRATEGIES, TOLERANCE, Resume, Row, Setup
from tests.mcore import flags as f
from tests.mcore.flags import NO_SHARD, ZERO1, ZERO2, ZERO3

NORMS = "--log-params-norm --log-num-zeros-in-grad"
FULL = f.FULL_RECOMPUTE
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
    f"--num-experts 2 --moe-router-topk 2 {f.LATENT_SIZES} {DELTA_SIZES} --q-lora-rank 24 "
    "--swiglu --normalization RMSNorm --disable-bias-linear"
)
TE = "--transformer-impl transformer_engine"
UNFUSED_GRADS = "--no-gradient-accumulation-fusion"
GROUPED = f"{f.ALLTOALL} --moe-grouped-gemm"
META = "--init-model-with-meta-device"
BATCH1 = "--micro-batch-size 1"
REDUCED_IN_BF16 = f"{BATCH1} --grad-reduce-in-bf16"
SINKHORN = (
    "--num-experts 4 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn "
    "--moe-ffn-hidden-size 64 --disable-bias-linear"
)
# The vocabulary is padded to the same size with every tensor-parallel size.
WHOLE_VOCABULARY = "--make-vocab-size-divisible-by 256"

OFFLOAD = "--optimizer-cpu-offload"
OFFLOADS = (
    f"{OFFLOAD} --optimizer-offload-fraction 0",
    f"{OFFLOAD} --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d",
    f"{OFFLOAD} --use-precision-aware-optimizer --no-pin-cpu-grads --no-pin-cpu-params",
    f"{OFFLOAD} --optimizer-offload-fraction 0.25 --use-torch-optimizer-for-cpu-offload",
)
PLAIN = "--no-fsdp-flat-optimizer"
AWARE = "--use-precision-aware-optimizer"
BF16_STATE = f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
DISTRIBUTED = "--use-distributed-optimizer"
WHOLE_MATRICES = f"{f.TP2_SP} --muon-tp-mode duplicated"
OVERLAPPING = (
    f"{GROUPED} {f.EP2} --overlap-moe-expert-parallel-comm --moe-router-load-balancing-type none "
    "--global-batch-size 16"
)

# fmt: off
ROWS: tuple[Row, ...] = (
    # ------------------------------------------------------------------------------- 2 ranks
    Row("dense", 2, f"{NORMS} {f.UNTIED} {EVALUATION} --decoupled-lr 2e-3 --decoupled-min-lr 0",
        strategies=STRATEGIES, iterations=6, quick=2),
    Row("dense, bf16", 2, "--bf16", strategies=(ZERO3, ZERO1)),
    Row("both overlap flags, accumulation", 2, f"{f.OVERLAP_GRADS} --global-batch-size 16",
        ours=f.OVERLAP_PARAMS, strategies=(ZERO3, ZERO2)),
    # One micro-batch, since DDP adds those of a rank in bf16. Two ranks round their sum once.
    Row("gradients reduced in bf16", 2, "--bf16 --global-batch-size 4 --grad-reduce-in-bf16",
        strategies=(ZERO3, NO_SHARD), quick=1),
    # Sinkhorn's routing shows a single rounded weight. The flag lets DDP add micro-batches in fp32,
    # as this package does.
    Row("gradients summed in fp32, reduced in bf16", 2, f"--bf16 {REDUCED_IN_BF16} {SINKHORN}",
        theirs="--ddp-param-name-patterns-for-fp32-local-accumulation all",
        strategies=(NO_SHARD, ZERO1), iterations=4),
    # The gradients of a rank are in bf16 already.
    Row("gradients communicated in bf16, summed in fp32", 2, "--bf16 --global-batch-size 4",
        ours="--megatron-fsdp-grad-comm-dtype bf16 --ddp-reduce-scatter-with-fp32-accumulation",
        strategies=(ZERO3, ZERO1), quick=1),
    Row("full recompute", 2, FULL, strategies=(ZERO3, ZERO2)),
    Row("selective recompute", 2, f"{SELECTIVE} {f.MODERN}", strategies=(ZERO3, NO_SHARD)),
    Row("per-token loss", 2, PER_TOKEN, strategies=(ZERO3, NO_SHARD)),
    Row("clipping, weight decay, cosine", 2, CLIPPED, strategies=(ZERO2, NO_SHARD)),
    Row("trace pool, evaluation in between", 2, EVALUATION,
        ours=f"{f.OVERLAP_GRADS} {f.OVERLAP_PARAMS} --fsdp-trace-pool", strategies=(ZERO3, ZERO1)),
    # Exact norms: otherwise, the order of the sum would change the last bit of the clipping factor.
    Row("fp16, dynamic loss scale", 2, FP16, strategies=(ZERO3, NO_SHARD), quick=1),
    Row("frozen embedding and norms", 2, f"{f.UNTIED} {NORMS}", strategies=(ZERO3, NO_SHARD),
        freezes=("embedding", "layernorm")),
    Row("frozen layer, full recompute", 2, FULL, freezes=(r"layers\.1\.",)),
    Row("random initialization by rank", 2, "--data-parallel-random-init",
        strategies=(ZERO3, ZERO1)),
    Row("latent attention", 2, f"{f.LOW_RANK_QUERIES} {NORMS}", quick=1),
    Row("latent attention without a query latent, layer norm", 2,
        f"{f.LATENT} --normalization LayerNorm", iterations=3),
    Row("gated delta net, layer norm", 2, f"{DELTA_NET} --normalization LayerNorm", iterations=3),
    Row("latent attention, experts, recompute of projections", 2,
        f"{f.DEEPSEEK} --recompute-granularity selective --recompute-modules mla_up_proj moe_act"),
    Row("hybrid of every kind of layer", 2, EVERY_KIND, strategies=(ZERO3,)),
    Row("Muon", 2, f"{f.MODERN} {f.UNTIED} {f.MUON} {NORMS} --make-vocab-size-divisible-by 512",
        strategies=(ZERO3, ZERO1), quick=1),
    Row("default layers", 2, f"{TE} {NORMS}", strategies=(ZERO3, NO_SHARD)),
    Row("default layers, bf16", 2, f"{TE} --bf16", strategies=(ZERO1,)),
    # Fused weight gradients accumulate in fp32: DDP sums micro-batches first, and then ranks.
    Row("default layers, bf16, one micro-batch", 2, f"{TE} --bf16 --global-batch-size 4"),
    Row("default layers, unfused weight gradients", 2, f"{TE} {UNFUSED_GRADS}"),
    Row("default layers, selective recompute", 2, f"{TE} {SELECTIVE} {f.MODERN}",
        strategies=(ZERO2,)),
    Row("default layers, grouped experts", 2, f"{TE} {GROUPED}", quick=1),
    Row("default layers, latent attention", 2, f"{TE} {f.LOW_RANK_QUERIES}"),
    Row("default layers, multi-token prediction", 2, f"{TE} {f.MTP}"),
    Row("default layers, PP2, tied", 2, f"{TE} {f.PP2}"),
    Row("default layers, EP2", 2, f"{TE} {GROUPED} {f.EP2}", strategies=(ZERO2,)),
    Row("default layers, hybrid Mamba", 2, f"{TE} {f.MAMBA}"),
    Row("default layers, Muon", 2, f"{TE} {f.MODERN} {f.MUON}"),
    Row("TP2", 2, f"{f.TP2} {NORMS}", strategies=(ZERO3, NO_SHARD)),
    Row("PP2, tied", 2, f"{f.PP2} {NORMS}"),
    # Only the first stage has a gradient of the embedding that both hold.
    Row("PP2, untied, multi-token prediction with detached heads", 2,
        f"{f.PP2} {f.UNTIED} {f.MTP} --mtp-detach-heads {NORMS}", strategies=(ZERO3, NO_SHARD),
        iterations=4, quick=1),
    # ------------------------------------------------------------------------------- 4 ranks
    # Zeros of an untied embedding: a tied one has a gradient everywhere.
    Row("TP2 x DP2, sequence parallel", 4, f"{f.TP2_SP} {f.UNTIED} {NORMS}", strategies=STRATEGIES,
        quick=1),
    Row("TP2 x DP2, sequence parallel, bf16", 4, f"{f.TP2_SP} --bf16"),
    Row("default layers, TP2 x DP2, sequence parallel", 4, f"{TE} {f.TP2_SP} {f.MODERN}"),
    Row("PP2 x DP2, tied", 4, f"{f.PP2} {NORMS}", strategies=(ZERO3, NO_SHARD)),
    Row("PP2 x DP2, untied, per-token loss", 4, f"{f.PP2} {f.UNTIED} {PER_TOKEN}",
        strategies=(ZERO2,)),
    Row("PP2 x DP2, virtual stages", 4, f.VPP2, strategies=(ZERO2, NO_SHARD)),
    Row("PP2 x DP2, virtual stages, overlap flags", 4, f"{f.VPP2} {f.OVERLAP_GRADS}",
        ours=f.OVERLAP_PARAMS, strategies=(ZERO1,)),
    Row("CP2 x DP2", 4, f"{f.CP2} {NORMS}", strategies=(ZERO2, NO_SHARD)),
    Row("CP2 x DP2, per-token loss, clipping", 4, f"{f.CP2} {PER_TOKEN} {CLIPPED}"),
    Row("HSDP 2x2, two micro-batches", 4, f"{f.UNTIED} {NORMS} --global-batch-size 16",
        ours=f.HSDP, strategies=(ZERO3, NO_SHARD)),
    Row("HSDP 2x2, overlap flags, recompute", 4, f"{f.OVERLAP_GRADS} {FULL} --global-batch-size 16",
        ours=f"{f.HSDP} {f.OVERLAP_PARAMS}"),
    Row("HSDP 2x2, bf16", 4, "--bf16", ours=f.HSDP, strategies=(ZERO1,)),
    Row("HFSDP 2x2", 4, NORMS, ours=f.HFSDP, strategies=(ZERO3, ZERO1)),
    Row("HFSDP 2x2, per-token loss, overlap flags", 4,
        f"{PER_TOKEN} {f.OVERLAP_GRADS} --global-batch-size 16",
        ours=f"{f.HFSDP} {f.OVERLAP_PARAMS}", strategies=(ZERO2,)),
    Row("EP2 x DP2, all-to-all", 4, f"{f.ALLTOALL} {f.EP2} {f.UNTIED} {NORMS}",
        strategies=(ZERO3, NO_SHARD)),
    Row("EP2 x PP2, tied", 4, f"{f.ALLTOALL} {f.EP2} {f.PP2}", iterations=4),
    Row("EP2 x DP2, all-gather, grouped", 4, f"{f.MOE} {f.EP2} --moe-grouped-gemm"),
    Row("EP2 x DP2, per-token loss, clipping", 4, f"{f.ALLTOALL} {f.EP2} {PER_TOKEN} {CLIPPED}"),
    Row("EP2 x DP2, separate strategy of experts", 4, f"{f.ALLTOALL} {f.EP2}",
        ours=f"--expert-data-parallel-sharding-strategy {ZERO3}", strategies=(ZERO1,)),
    Row("EP2 x DP2, frozen experts, evaluation", 4, f"{f.ALLTOALL} {f.EP2} {EVALUATION} {NORMS}",
        freezes=(r"\.experts\.",)),
    Row("EP2 x DP2, overlap flags, recompute of experts", 4,
        f"{f.ALLTOALL} {f.EP2} {f.OVERLAP_GRADS} --global-batch-size 16 "
        "--recompute-granularity selective --recompute-modules moe",
        ours=f.OVERLAP_PARAMS),
    Row("EP2 x DP2, bf16", 4, f"{f.ALLTOALL} {f.EP2} --bf16", strategies=(ZERO2,)),
    Row("sparse attention, TP2 x DP2", 4, f"{f.SPARSE} {f.TP2_SP}", strategies=(ZERO2,)),
    Row("gated delta net, experts, EP2 x PP2", 4,
        f"--apply-layernorm-1p {DELTA_NET} {f.ALLTOALL} {f.EP2} {f.PP2}"),
    Row("latent attention, CP2 x DP2", 4, f"{f.LATENT} {f.CP2}", strategies=(ZERO2,)),
    Row("latent attention, experts, EP2 x TP2", 4,
        f"{f.DEEPSEEK} {f.EP2} {f.TP2_SP} {f.ETP1} {NORMS}"),
    Row("latent attention, experts, EP2 x PP2, multi-token prediction", 4,
        f"{f.DEEPSEEK} {f.EP2} {f.PP2} --mtp-num-layers 1", strategies=(ZERO3, NO_SHARD)),
    Row("experts in a latent space, shared expert, EP2 x TP2", 4,
        f"{f.ALLTOALL} --moe-latent-size 32 --moe-shared-expert-intermediate-size 64 {f.EP2} "
        f"{f.TP2_SP} {f.ETP1} {NORMS}", strategies=(ZERO1,)),
    Row("zero-centered norms, GQA, SwiGLU, TP2 x DP2", 4,
        f"--apply-layernorm-1p {f.MODERN} {f.UNTIED} {f.TP2_SP}", strategies=(ZERO1,)),
    Row("hybrid Mamba, TP2 x DP2", 4, f"{f.MAMBA} {f.TP2_SP}", strategies=(ZERO2,)),
    # ------------------------------------------------------------------------------- 8 ranks
    Row("TP2 x PP2 x DP2", 8, f"{f.TP2_SP} {f.PP2} {NORMS}", strategies=(ZERO3, NO_SHARD)),
    Row("TP2 x CP2 x DP2", 8, f"{f.TP2_SP} {f.CP2} {f.MODERN}"),
    Row("HSDP 2x4", 8, BATCH1, ours=f.HSDP, strategies=(ZERO1,)),
    Row("HFSDP 2x2, TP2", 8, f"{f.TP2_SP}", ours=f.HFSDP, strategies=(ZERO2,)),
    Row("EP2 x DP4, HSDP 2x4", 8, f"{f.ALLTOALL} {f.EP2} {BATCH1} {NORMS}", ours=f.HSDP,
        strategies=(ZERO2,)),
    Row("EP2 x DP4, HFSDP 2x4", 8, f"{f.ALLTOALL} {f.EP2} {BATCH1}", ours=f.HFSDP),
    Row("EP2 x PP2 x DP2, virtual stages", 8, f"{f.ALLTOALL} {f.EP2} {f.VPP2} {BATCH1}"),
    Row("EP2 x TP2 x DP2, expert TP2", 8, f"{f.ALLTOALL} {f.EP2} {f.TP2_SP}"),
    # -------------------------------------------------------------------- other numbers of ranks
    Row("one rank", 1, EVALUATION, strategies=(ZERO3, NO_SHARD)),
    Row("three ranks", 3, "--global-batch-size 12", strategies=(ZERO3, NO_SHARD)),
    # --------------------------------------------------------------------------------- bitwise
    Row("bf16, evaluation in between", 2, f"--bf16 --num-layers 4 {EVALUATION}", iterations=8),
    Row("Muon, default precision, one micro-batch, not clipped", 2,
        "--optimizer muon --global-batch-size 4 --clip-grad 0", strategies=(ZERO3, NO_SHARD),
        iterations=8, tolerance=0, norms=TOLERANCE),
    # ------------------------------------------------------------------------------- optimizers
    *(
        Row(f"no clipping: {name}", 2, f"--clip-grad 0 --log-num-zeros-in-grad {flags}",
            ours=ours, iterations=3)
        for name, flags, ours in (
            ("Adam", "", ""),
            ("Adam per parameter", "", PLAIN),
            ("Adam, offloaded", "", OFFLOAD),
            ("Lion", "--optimizer lion --lr 1e-4", ""),
            ("Muon", f.MUON, ""),
        )
    ),
    Row("fp16, dynamic loss scale, half offloaded", 2, FP16, ours=OFFLOADS[1]),
    Row("Muon options", 2, f"{f.GATED} {f.MUON} --muon-nesterov --muon-momentum 0.8 "
        "--muon-scale-mode unit_rms_norm --lion-beta1 0.8 --muon-num-ns-steps 3 "
        "--muon-extra-scale-factor 0.5 --muon-coefficient-type simple --muon-no-split-qkv "
        "--weight-decay 0.2"),
    Row("Muon, bf16", 2, f"{f.GATED} {f.MUON} --muon-fp32-matmul-prec medium --bf16",
        tolerance=5e-4, norms=5e-2),
    *(
        Row(f"Muon, TP2 x DP2, {mode}", 4, f"{f.GATED} {f.MUON} {f.TP2} --muon-tp-mode {mode}",
            strategies=strategies)
        for mode, strategies in (
            ("blockwise", (ZERO3,)),
            ("duplicated", (ZERO1,)),
            ("distributed", (ZERO3, NO_SHARD)),
        )
    ),
    *(
        Row(f"Muon, {name}", 4, f"{f.GATED} {f.MUON} {flags}", ours=ours)
        for name, flags, ours in (
            ("HFSDP", "", f.HFSDP),
            ("TP2 x PP2", f"{f.PP2} {WHOLE_MATRICES}", ""),
            ("virtual stages", f.VPP2, ""),
            ("EP2", f"{f.ALLTOALL} {f.EP2}", ""),
            ("EP2, experts not sharded", f"{f.ALLTOALL} {f.EP2}",
             f"--expert-data-parallel-sharding-strategy {NO_SHARD}"),
            ("EP2 x TP2", f"{f.ALLTOALL} {f.EP2} {WHOLE_MATRICES}", ""),
            ("Lion for scalar parameters", "--muon-scalar-optimizer lion", ""),
            ("Lion for all parameters", "--optimizer lion", ""),
            ("per-token loss, loss scale", f"{PER_TOKEN} --loss-scale 8", ""),
        )
    ),
    Row("default layers, bf16 state", 2, f"{TE} {BF16_STATE}", theirs=DISTRIBUTED,
        strategies=(ZERO3, ZERO1), iterations=4),
    *(
        Row(f"default layers, state in {first} and {second}", 1,
            f"{TE} {AWARE} --exp-avg-dtype {first} --exp-avg-sq-dtype {second}",
            theirs=DISTRIBUTED, iterations=4, probe=probes.moment_bytes_per_element, finds=nbytes)
        for first, second, nbytes in (("fp16", "fp16", 4), ("fp8", "fp16", 3), ("fp8", "fp8", 2))
    ),
    # ---------------------------------------------------------------------- overlapped experts
    Row("overlapped experts", 2, OVERLAPPING, strategies=(ZERO3, ZERO1), iterations=2),
    *(
        Row(f"overlapped experts: {flags} {ours}", 4, f"{OVERLAPPING} {flags}", ours=ours,
            iterations=3)
        for flags, ours in (
            ("--global-batch-size 32",
             f"{f.OVERLAP} --fsdp-unshard-prefetch-depth 2 --fsdp-trace-pool"),
            ("", f.HSDP),
            (f.VPP2, f.OVERLAP),
            (f"{f.TP2_SP} {f.ETP1}", ""),
            ("--num-layers 3 --moe-layer-freq [0,1,1]", f.OVERLAP),
            ("--moe-shared-expert-intermediate-size 64 --ep-overlap-early-attn-memory-release",
             f.OVERLAP),
            ("--recompute-granularity selective --recompute-modules layernorm moe_act", f.OVERLAP),
            (f.MTP, f.OVERLAP),
            (f"--eval-interval 1 --eval-iters 1 {PER_TOKEN}", ""),
        )
    ),
    Row("overlapped experts, bf16", 2, f"{OVERLAPPING} --bf16", iterations=3),
    Row("overlapped shared expert", 2,
        f"{f.ALLTOALL} {f.EP2} --moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate "
        "--moe-shared-expert-overlap", iterations=3, norms=1e-5),
    # ------------------------------------------------------------- features of Megatron's loop
    *(
        Row(f"feature: {flags}", 2, flags, iterations=6)
        for flags in (
            "--iterations-to-skip 3 5 --use-cpu-initialization --dataloader-type cyclic",
            "--train-sync-interval 2 --empty-unused-memory-level 2 --check-for-spiky-loss "
            "--timing-log-level 2 --log-throughput --log-memory-interval 2",
            "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2",
            "--eval-interval 3 --eval-iters 2 --eval-micro-batch-size 1 --eval-global-batch-size 4",
        )
    ),
)

# Trainings that differ only in flags: bitwise identical, unless a row has a tolerance.
SAME: tuple[Row, ...] = tuple(replace(
    row, is_reference_sharded=True, tolerance=row.tolerance or 0, iterations=min(row.iterations, 4)
) for row in (
    Row("overlap flags", 2, EVALUATION, ours=f.OVERLAP, quick=1),
    # --------------------------------------------------------------- order of gathers, reductions
    *(
        Row(f"gathers and reductions: {flags}", 2, f.OVERLAP, ours=flags,
            probe=probes.prefetch_limits, finds=finds, tolerance=tolerance,
            quick=int("--use-nccl-ub" not in flags))
        for flags, finds, tolerance in (
            ("--fsdp-unshard-prefetch-depth 2 --fsdp-max-live-grad-buffers 3",
             (5, 2, None, 3), 0),
            ("--fsdp-unshard-prefetch-bytes 1MiB", (5, None, 1 << 20, 2), 0),
            # Both layers form one unit; half of the elements, 4 bytes each, limit the prefetch.
            # The order of sums in norms depends on the flat buffers.
            ("--suggested-communication-unit-size 100001 --fsdp-unit-bytes 400000",
             (4, None, 200_000, 2), TOLERANCE),
            # The default: small layers form one unit.
            ("--fsdp-unit-bytes 16MiB", (4, 1, None, 2), TOLERANCE),
            ("--fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail",
             (5, 1, None, 2), 0),
            ("--use-nccl-ub --disable-symmetric-registration --fsdp-trace-pool",
             (5, 1, None, 2), 0),
        )
    ),
    *(
        Row(f"separate all-gather groups: {name}", ranks, flags,
            ours="--create-all-gather-group", probe=probes.separate_gather_groups, finds=finds,
            quick=is_quick)
        for name, ranks, flags, finds, is_quick in (
            ("dense", 2, f.OVERLAP, [True], 1),
            ("experts", 4, f"{f.ALLTOALL} {f.EP2}", [True, True], 0),
            ("instances", 4, f"{f.HSDP} {f.OVERLAP_GRADS}", [True], 0),
        )
    ),
    *(
        Row(f"trace pool: {flags}", ranks, flags, ours="--fsdp-trace-pool", quick=is_quick)
        for ranks, flags, is_quick in (
            (2, f"{EVALUATION} {f.OVERLAP} --global-batch-size 16", 1),
            (4, f"{f.PP2} --num-layers 4 --global-batch-size 16 {f.FULL_RECOMPUTE}", 0),
            (4, f"{f.ALLTOALL} {f.EP2} --bf16 --accumulate-allreduce-grads-in-fp32", 0),
        )
    ),
    # ---------------------------------------------------------------------------- optimizers
    Row("Adam on flat tensors", 2, f"--bf16 {f.OVERLAP}", theirs=PLAIN, strategies=(NO_SHARD,),
        probe=probes.steps_flat_tensors, finds=True, quick=1),
    Row("Adam on flat tensors, sharded", 2, f"--bf16 {f.OVERLAP}", theirs=PLAIN,
        strategies=(ZERO3, ZERO1)),
    Row("fused Adam on flat tensors, experts", 2, f"{TE} --bf16 {f.OVERLAP} {f.MOE}", theirs=PLAIN),
    # Every strategy, and every way at two numbers of ranks.
    *(
        Row(f"{way}, {world_size} ranks", world_size,
            "--clip-grad 0.5 --log-params-norm --global-batch-size 12", ours=way,
            strategies=strategies, probe=partial(probes.offloads, fraction=share), finds=True,
            quick=int(len(strategies) == 2))
        for way, share, rows in zip(
            OFFLOADS,
            (0.0, 0.5, 1.0, 0.25),
            (
                {2: (NO_SHARD,), 3: (ZERO1,)},
                {1: (ZERO1,), 2: (ZERO3, ZERO1)},
                {1: (NO_SHARD,), 3: (ZERO2,)},
                {2: (ZERO2,), 3: (ZERO3,)},
            ),
            strict=True,
        )
        for world_size, strategies in rows.items()
    ),
    *(
        Row(f"{OFFLOADS[way]}: {flags}", 2, flags, ours=OFFLOADS[way])
        for way, flags in (
            (2, f"--num-experts 4 {f.EP2}"),
            (1, f.TP2),
            (1, f.HFSDP),
            (2, f"{f.PP2} {META}"),
            (2, f"--global-batch-size 24 {f.OVERLAP} --fsdp-trace-pool"),
        )
    ),
    # With these layers FusedAdam steps the device's part, unless told to leave it to torch's Adam.
    Row("default layers, offloaded or not, FusedAdam", 2, f"{TE} --bf16", ours=OFFLOADS[0]),
    Row("default layers, offloaded or not, torch's Adam", 2, f"{TE} --bf16", ours=OFFLOAD,
        theirs=f"{OFFLOADS[0]} --use-torch-optimizer-for-cpu-offload"),
    Row("Muon, its Adam offloaded", 2, "--optimizer muon", ours=OFFLOAD,
        probe=partial(probes.offloads, fraction=1.0), finds=True),
    *(
        Row(f"default layers, {flags} {others}", 2, f"{TE} --bf16 {others}", ours=flags,
            tolerance=1e-2 if others else 1e-3, norms=1.0)
        for flags, others in (
            ("--megatron-fsdp-main-params-dtype bf16", ""),
            ("--megatron-fsdp-main-params-dtype bf16 --megatron-fsdp-main-grads-dtype bf16", ""),
            ("--megatron-fsdp-main-grads-dtype bf16", ""),
            # The result of Newton-Schulz on nearly singular gradients depends on their last bits.
            ("--megatron-fsdp-main-params-dtype bf16", "--optimizer muon"),
            ("--megatron-fsdp-main-grads-dtype bf16", "--optimizer adaptive_muon"),
            ("--megatron-fsdp-main-params-dtype bf16 --optimizer-cpu-offload", ""),
        )
    ),
    # ------------------------------------------------------------------------ weight gradients
    # apex's kernel computes the output layer's gradient. Tied weights would sum in another order.
    *(
        Row(f"fused weight gradients: {flags}", ranks, f"{TE} {f.UNTIED} {flags}",
            theirs=UNFUSED_GRADS, strategies=strategies)
        for ranks, flags, strategies in (
            (1, "--global-batch-size 8", (ZERO3,)),
            (2, f"--global-batch-size 16 {f.OVERLAP}", (ZERO2, NO_SHARD)),
            (2, f"--global-batch-size 16 {f.FULL_RECOMPUTE} {GROUPED}", (ZERO3,)),
            (2, f.TP2_SP, (ZERO3,)),
        )
    ),
    # With delayed weight gradients, autograd's gradients are uninitialized memory.
    *(
        Row(f"delayed weight gradients {fusion}", 2,
            f"{TE} {GROUPED} {f.EP2} --overlap-moe-expert-parallel-comm --bf16 {fusion}",
            ours="--delay-wgrad-compute")
        for fusion in ("", UNFUSED_GRADS)
    ),
))

BIASED = (f"{f.ALLTOALL} --moe-router-enable-expert-bias --moe-router-score-function sigmoid "
    "--moe-router-load-balancing-type none --moe-shared-expert-intermediate-size 32")

# Evaluations with `--skip-train`, bitwise identical to those of the run that saved.
EVALUATED: tuple[Row, ...] = tuple(replace(row, iterations=2) for row in (
    Row("dense", 2, f.GATED, strategies=(ZERO3, NO_SHARD), quick=1),
    Row("bf16, trace pool, overlap flags", 2, "--bf16", ours=f"{f.OVERLAP} --fsdp-trace-pool",
        strategies=(ZERO1,)),
    Row("PP2, tied", 2, f"--swiglu {f.PP2}", quick=1),
    Row("virtual stages", 2, f.VPP2, strategies=(ZERO2,)),
    Row("TP2, attention sinks", 2, f"{f.TP2_SP} --softmax-type learnable"),
    Row("EP2", 2, f"{BIASED} {f.EP2}", strategies=(ZERO3, ZERO2), quick=1),
    Row("multi-token prediction, PP2, built on the meta device", 2, f"{f.MTP} {f.PP2} {META}"),
    Row("hybrid Mamba", 2, f.MAMBA),
    Row("HSDP 2x2", 4, f.MODERN, ours=f.HSDP),
    Row("EP2 x PP2", 4, f"{f.ALLTOALL} {f.EP2} {f.PP2} --bf16"),
))

_parallel = partial(Resume, values=True)
MEGATRON = f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"
# A learning rate that changes shows whether the schedule was loaded.
SCHEDULED = "--swiglu --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 0.5"
LOW_STATE = f"--bf16 {AWARE} --main-grads-dtype bf16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"
MIXED = f"{f.ALLTOALL} --moe-layer-freq [0,1]"
DEEP = "--num-layers 4"

RESUMES: tuple[Resume, ...] = (
    # ------------------------------------------------ other sizes; values are compared bitwise
    _parallel("ZeRO-3 at 4 ranks, ZeRO-1 at 2", f.MODERN, Setup(4, ZERO3), Setup(2, ZERO1),
        quick=True),
    *(
        _parallel(f"expert parallel, {load}", BIASED, Setup(4, ZERO3, f.EP2), load)
        for load in (
            Setup(2, ZERO1, f.PP2), Setup(4, ZERO3, "--expert-model-parallel-size 4"),
        )
    ),
    _parallel("to expert parallel", f.ALLTOALL, Setup(2, ZERO2), Setup(4, ZERO3, f.EP2)),
    _parallel("to pipeline, tied embedding", f.MODERN, Setup(2, ZERO3),
        Setup(4, ZERO1, f.PP2)),
    _parallel("pipeline, to tensor parallel, tied embedding", "",
        Setup(4, ZERO3, f"{f.PP2} {WHOLE_VOCABULARY}"), Setup(4, ZERO3, f"{f.TP2} {f.PP2}")),
    *(
        _parallel(f"virtual stages, {load}", DEEP, Setup(4, ZERO3, f.VPP2), load)
        for load in (Setup(2, ZERO2, f.PP2), Setup(4, ZERO1, f.VPP2))
    ),
    _parallel("virtual stages, experts, one rank", f"{f.ALLTOALL} {DEEP}", Setup(2, ZERO3, f.VPP2),
        Setup(1, ZERO3)),
    _parallel("to virtual stages", f"{DEEP} {f.UNTIED}", Setup(2, ZERO3),
        Setup(2, ZERO3, f.VPP2)),
    _parallel("multi-token prediction, from pipeline", f.MTP, Setup(2, ZERO3, f.PP2),
        Setup(1, ZERO3)),
    _parallel("multi-token prediction, to pipeline", f.MTP, Setup(2, ZERO3),
        Setup(2, ZERO3, f.PP2)),
    _parallel("HSDP 2x2, no sharding", f.MODERN, Setup(4, ZERO3, f.HSDP), Setup(2, NO_SHARD)),
    _parallel("no sharding, HFSDP", f.MODERN, Setup(2, NO_SHARD), Setup(4, ZERO3, f.HFSDP)),
    _parallel("from context parallel", f.MODERN, Setup(4, ZERO3, f.CP2), Setup(4, ZERO2)),
    _parallel("TP2 x PP2 x DP2, 2 ranks", f.MODERN,
        Setup(8, ZERO3, f"{f.TP2_SP} {f.PP2}"), Setup(2, ZERO3, WHOLE_VOCABULARY)),
    _parallel("to a model built on the meta device", f.MODERN,
        Setup(2, ZERO3, WHOLE_VOCABULARY), Setup(4, ZERO3, f"{f.TP2_SP} {META}")),
    _parallel("hybrid Mamba, ZeRO-3 at 2 ranks, HSDP 2x2", f.MAMBA,
        Setup(2, ZERO3), Setup(4, ZERO3, f.HSDP)),
    _parallel("latent attention, EP2 x TP2, ZeRO-1 at 2 ranks", f.DEEPSEEK,
        Setup(4, ZERO3, f"{f.EP2} {f.TP2_SP} {f.ETP1}"), Setup(2, ZERO1, WHOLE_VOCABULARY)),
    _parallel("attention sinks, TP2, 1 rank", "--softmax-type learnable",
        Setup(2, ZERO3, f.TP2), Setup(1, ZERO1, WHOLE_VOCABULARY), quick=True),
    *(
        _parallel(f"EP2 x TP2, {load}", f"{f.ALLTOALL} --normalization RMSNorm",
            Setup(4, ZERO3, f"{f.EP2} {f.TP2_SP} {f.ETP1}"), load)
        for load in (
            Setup(4, ZERO3, f"{f.EP2} {f.PP2} {WHOLE_VOCABULARY}"), Setup(4, ZERO3, f.TP2_SP),
        )
    ),
    Resume("interleaved experts, from tensor parallel",
        f"{TE} {GROUPED} --swiglu --moe-mlp-glu-interleave-size 4",
        Setup(2, ZERO3, f.TP2_SP), Setup(2, ZERO3, WHOLE_VOCABULARY)),
    _parallel("frozen layers, from pipeline", "--swiglu", Setup(2, ZERO3, f.PP2),
        Setup(2, ZERO3), freezes=("mlp",)),
    *(
        Resume(f"ZeRO-3 at 2 ranks, {load}", "--swiglu --global-batch-size 12", Setup(2, ZERO3),
            load, tolerance=0 if load == Setup(2, ZERO3) else TOLERANCE)
        for load in (Setup(1, ZERO3), Setup(2, ZERO3), Setup(3, ZERO1), Setup(3, NO_SHARD))
    ),
    # -------------------------------------------------------- bitwise identical at the same sizes
    *(
        Resume(f"bitwise: {flags or 'data parallel'}",
            f"--bf16 {f.DROPOUT} --lr-decay-style cosine --lr-warmup-iters 3",
            Setup(2, ZERO3, flags), Setup(2, ZERO3, flags), tolerance=0)
        for flags in ("", f.PP2, f.TP2)
    ),
    *(
        Resume(f"bitwise: {flags}, {setup}", flags, setup, setup, tolerance=0, quick=is_quick)
        for flags, setup, is_quick in (
            ("--fp16 --initial-loss-scale 1024 --loss-scale-window 3", Setup(2, ZERO3), False),
            (f"{f.GATED} {f.MUON}", Setup(2, ZERO3), False),
            (f"{f.MUON} --muon-scalar-optimizer lion", Setup(2, ZERO3), False),
            ("--optimizer lion", Setup(2, NO_SHARD), False),
            (f"{TE} {LOW_STATE}", Setup(2, ZERO3), True),
            (f"{TE} {f.TP2}", Setup(4, ZERO1), False),
            (f"--softmax-type learnable {f.TP2_SP}", Setup(4, ZERO3), False),
            (f"--async-save --optimizer muon --swiglu --num-experts 4 {f.EP2} {f.PP2} "
             "--moe-token-dispatcher-type alltoall", Setup(4, ZERO3), False),
            # Megatron's own DDP, in a rehearsal.
            (f"{GROUPED} {f.EP2}", Setup(2, DDP), False),
            (f"{f.MAMBA} {f.TP2_SP}", Setup(2, DDP), False),
        )
    ),
    Resume("grouped to sequential experts, Megatron's own DDP", f"{f.ALLTOALL} {f.EP2}",
        Setup(2, DDP, "--moe-grouped-gemm"), Setup(2, DDP), tolerance=0),
    # ----------------------------------------------------------------------------- optimizers
    *(
        Resume(f"{optimizer}, TP2 x DP2, {load}", f"{f.GATED} {f.MUON} --optimizer {optimizer} "
            "--muon-tp-mode duplicated", Setup(4, ZERO3, f.TP2), load,
            # Some of the first updates are signs, which rounding may flip.
            tolerance=TOLERANCE if optimizer == "muon" else 1e-4)
        for optimizer, load in (
            ("muon", Setup(1, ZERO1, WHOLE_VOCABULARY)),
            ("muon", Setup(2, ZERO2, f.TP2)),
            ("adaptive_muon", Setup(2, NO_SHARD, f"{f.PP2} {WHOLE_VOCABULARY}")),
            ("adaptive_muon", Setup(4, ZERO3, f"{f.HFSDP} {WHOLE_VOCABULARY}")),
            ("lion", Setup(1, ZERO1, WHOLE_VOCABULARY)),
        )
    ),
    Resume("flat tensors, to per parameter", f.UNTIED, Setup(2, NO_SHARD), Setup(2, ZERO3, PLAIN)),
    Resume("per parameter, to flat tensors", f.UNTIED, Setup(2, ZERO3, PLAIN), Setup(2, NO_SHARD)),
    Resume("fused Adam, from flat tensors, experts", f"{TE} {f.MOE}",
        Setup(2, ZERO3), Setup(2, ZERO3, PLAIN)),
    *(
        Resume(f"scaled state, {load}", f"{TE} --global-batch-size 12", Setup(2, ZERO3, LOW_STATE),
            load, tolerance=1e-4)
        for load in (
            Setup(3, ZERO1, LOW_STATE), Setup(2, ZERO1, f"{LOW_STATE} {f.PP2}"),
            Setup(2, ZERO1, f"--bf16 {BF16_STATE}"),
        )
    ),
    *(
        Resume(f"offloaded, {way or 'to the device'}", "--bf16", Setup(2, ZERO3, OFFLOADS[1]),
            Setup(2, ZERO3, way), tolerance=0)
        for way in ("", OFFLOADS[2], OFFLOADS[3])
    ),
    # On the CPU, Adam is torch's implementation.
    Resume("fused Adam, to half offloaded", TE,
        Setup(2, ZERO3), Setup(2, ZERO3, OFFLOADS[1])),
    # Different kernels would step the embedding that both stages hold; a save compares them.
    Resume("fused Adam, half offloaded, tied stages", f"{TE} {f.PP2}",
        Setup(2, NO_SHARD, OFFLOADS[1]), Setup(2, ZERO3)),
    Resume("fused Adam, from half offloaded", TE, Setup(2, ZERO3, OFFLOADS[1]), Setup(2, ZERO3)),
    Resume("to offloaded", "--bf16", Setup(2, ZERO3), Setup(2, ZERO3, OFFLOAD),
        tolerance=0),
    *(
        Resume(f"offloaded, {load}", "--global-batch-size 12", Setup(2, ZERO3, OFFLOADS[1]), load)
        for load in (
            Setup(1, ZERO1, OFFLOADS[2]), Setup(2, NO_SHARD), Setup(3, ZERO3, OFFLOADS[3]),
        )
    ),
    # ------------------------------------------------------------------ from Megatron's own DDP
    *(
        Resume(f"from Megatron: {flags} {saved}, {load}", flags, Setup(2, DDP, saved), load)
        for flags, saved, loads in (
            (SCHEDULED, MEGATRON, (
                Setup(1, ZERO1), Setup(2, NO_SHARD), Setup(4, ZERO3, f.HFSDP),
                Setup(2, ZERO3, f.TP2), Setup(2, DDP, MEGATRON),
            )),
            (SCHEDULED, f"{MEGATRON} {f.TP2}", (Setup(2, ZERO3), Setup(4, ZERO2, f.TP2_SP))),
            ("--normalization RMSNorm --qk-layernorm --swiglu", "", (Setup(2, ZERO3),)),
            (f.ALLTOALL, f"{MEGATRON} {f.EP2}", (Setup(2, ZERO3), Setup(4, ZERO3, f.EP2))),
            (DEEP, f"{MEGATRON} {f.PP2}", (Setup(2, ZERO3), Setup(4, ZERO3, f.PP2))),
            (MIXED, MEGATRON, (Setup(2, ZERO3, f.EP2),)),
            (f.MAMBA, f"{MEGATRON} {f.TP2}", (Setup(2, ZERO3),)),
            ("--softmax-type learnable", f"{MEGATRON} {f.TP2}", (Setup(2, ZERO3, f.TP2),)),
            (f"{SCHEDULED} --add-qkv-bias {f.UNTIED}", MEGATRON, (Setup(2, ZERO3),)),
            (f"{BIASED} --moe-grouped-gemm", MEGATRON, (Setup(2, ZERO3),)),
            (f"{f.MTP} --num-experts 4 --disable-bias-linear", MEGATRON, (Setup(2, ZERO3),)),
            # Adam's small steps must start from main weights, not from weights rounded to bf16.
            (f"{f.ALLTOALL} --bf16", MEGATRON, (Setup(2, ZERO3),)),
            (f"{f.ALLTOALL} --bf16", "", (Setup(2, ZERO3),)),
            (f"{f.GATED} {f.MUON}", "", (Setup(2, ZERO3),)),
        )
        for load in loads
    ),
    Resume("from Megatron: Muon in bf16", f"{f.GATED} {f.MUON} --bf16", Setup(2, DDP),
        Setup(2, ZERO3), tolerance=5e-4),
    # -------------------------------------------------------------------- to Megatron's own DDP
    *(
        Resume(f"to Megatron: {flags}, {saves}, {sizes}", flags, saves,
            Setup(2, DDP, f"{MEGATRON} {sizes}"))
        for flags, saves, sizes in (
            (SCHEDULED, Setup(2, ZERO3), f.TP2),
            (SCHEDULED, Setup(4, ZERO3, f.TP2), ""),
            (f.ALLTOALL, Setup(2, ZERO3, f.EP2), f.EP2),
            (DEEP, Setup(2, ZERO3, f.PP2), ""),
            (f"{f.DROPOUT} --normalization RMSNorm --qk-layernorm --swiglu", Setup(2, ZERO3), ""),
            (f"{f.MTP} --swiglu", Setup(2, ZERO3), ""),
            (MIXED, Setup(2, ZERO3), ""),
            (f.MAMBA, Setup(2, ZERO3, f.TP2), ""),
            ("--softmax-type learnable", Setup(2, ZERO3, f.TP2), ""),
            (f"{BIASED} --moe-grouped-gemm", Setup(2, ZERO3), ""),
        )
    ),
)
# fmt: on
