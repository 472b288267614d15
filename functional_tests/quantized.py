"""Rows of trainings with weights quantized to 8 or 4 bits, gathered in bf16 or quantized."""

from __future__ import annotations

from functools import partial

from functional_tests.matrix import TOLERANCE, Resume, Row, Setup
from tests.mcore import flags as f
from tests.mcore.flags import NO_SHARD, ZERO1, ZERO2, ZERO3

# No weight dimension is smaller than 128, the block size of FP8.
MODEL = (
    "--transformer-impl transformer_engine --bf16 --hidden-size 128 --ffn-hidden-size 256 "
    "--seq-length 64 --max-position-embeddings 64"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 128 "
    "--disable-bias-linear --swiglu --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall --moe-router-padding-for-"
)
RECIPES = ("delayed", "tensorwise", "blockwise")
FORMATS = {
    **{name: f"--fp8-format hybrid --fp8-recipe {name}" for name in (*RECIPES, "mxfp8")},
    "nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4",
}
GATHERS = {name: "--fp8-param-gather" for name in FORMATS} | {"nvfp4": "--fp4-param-gather"}
"""Flags by recipe: `FORMATS` selects a format; `GATHERS` gathers weights in this format."""
# Megatron gathers MXFP8 weights in bf16 and quantizes them on every rank.
MEGATRONS = {"mxfp8": "--reuse-grad-buf-for-mxfp8-param-ag"}
# For bf16 runs: without --fp8-format, this flag only selects the rehearsed GPU.
BLACKWELL = "--fp8-recipe mxfp8"
# Gradients are divided by a number of tokens that is not a power of two.
PER_TOKEN = (
    "--calculate-per-token-loss --micro-batch-size 1 --seq-length 96 --max-position-embeddings 96"
)

# The order of a norm's sum would change its last bit, and with it bf16 and FP8 weights.
_row = partial(Row, iterations=4, exact_norms=True, tolerance=TOLERANCE)


def _model(recipe: str, *more: str) -> str:
    return " ".join((MODEL, FORMATS[recipe], *more))


def _norms(recipe: str) -> float | None:
    """Return the bound of gradient norms: larger with small blocks, where rank order matters."""
    return None if recipe in RECIPES else 1e-2


# fmt: off
QUANTIZED: tuple[Row, ...] = (
    *(
        _row(f"{recipe} {gathers}", 2, _model(recipe, "--log-params-norm"), ours=gathers,
             strategies=strategies, norms=_norms(recipe))
        for recipe in FORMATS
        for gathers, strategies in ((GATHERS[recipe], (ZERO3, NO_SHARD)), ("", (ZERO3,)))
    ),
    *(
        _row(f"{recipe}, random initialization by rank", 2,
             _model(recipe, "--data-parallel-random-init --log-params-norm"), ours=GATHERS[recipe],
             norms=_norms(recipe))
        for recipe in ("delayed", "nvfp4")
    ),
    # Bitwise identical with one micro-batch on two ranks: a sum of two terms has one order.
    *(
        _row(f"{recipe}, Megatron's distributed optimizer {overlap}", 2,
             _model(recipe, GATHERS[recipe], "--global-batch-size 4", overlap),
             theirs=f"--use-distributed-optimizer {MEGATRONS.get(recipe, '')}",
             strategies=strategies, tolerance=0,
             quick=int(recipe == "tensorwise" and not overlap))
        for recipe in FORMATS
        for overlap, strategies in (("", (ZERO3, ZERO1)), (f.OVERLAP, (ZERO2,)))
    ),
    # Bitwise identical if gradients are reduced once per step, as under DDP. ZeRO-2 and ZeRO-3
    # reduce every micro-batch and sum the results: the last bit of a gradient occasionally changes
    # an FP8 value. The last bit of the norm has the same effect in Megatron, whose distributed
    # optimizer differs from its DDP by up to 3e-5 (seeds 2 to 7, norms summed in fp32).
    *(
        _row(f"{recipe}, per-token loss {gathers}, {tolerance}", 2, _model(recipe, PER_TOKEN),
             ours=gathers, strategies=strategies, tolerance=tolerance, norms=norms)
        for recipe in RECIPES
        for gathers, strategies, tolerance, norms in (
            ("", (ZERO1,), 0, None), (GATHERS[recipe], (ZERO3,), 1e-4, 1e-2),
        )
    ),
    *(
        _row(f"{recipe}, {name}", ranks, _model(recipe, flags), ours=GATHERS[recipe], norms=1e-2)
        for recipe, ranks, name, flags in (
            ("tensorwise", 2, "recompute", f.FULL_RECOMPUTE),
            ("tensorwise", 4, "TP2 SP, DP2", f.TP2_SP),
            ("delayed", 2, "MoE", f"{EXPERTS}fp8"),
            ("delayed", 2, "GQA SwiGLU", f"{f.GATED} --disable-bias-linear"),
            ("tensorwise", 4, "PP2, DP2", f.PP2),
            ("mxfp8", 2, "recompute", f.FULL_RECOMPUTE),
            ("mxfp8", 2, "MoE", f"{EXPERTS}fp8"),
            ("nvfp4", 2, "recompute", f.FULL_RECOMPUTE),
            ("nvfp4", 2, "MoE", f"{EXPERTS}quantization"),
            ("nvfp4", 4, "PP2, DP2", f.PP2),
            ("nvfp4", 2, "GQA SwiGLU", f"{f.GATED} --disable-bias-linear"),
            ("nvfp4", 2, "TP2", f.TP2),
        )
    ),
    *(
        _row(f"{recipe}, EP2 x DP2, experts at ZeRO-1", 4,
             _model(recipe, f"{EXPERTS}fp8 {f.EP2}"), norms=1e-2,
             ours=f"{GATHERS[recipe]} --expert-data-parallel-sharding-strategy {ZERO1}")
        for recipe in ("tensorwise", "mxfp8")
    ),
    # Weights gathered in bf16 are then quantized again in the backward, with the same result.
    *(
        _row(f"nvfp4, unfused weight gradients {gathers}", 2,
             _model("nvfp4", "--no-gradient-accumulation-fusion"), ours=gathers, norms=1e-2)
        for gathers in ("", GATHERS["nvfp4"])
    ),
)

_same = partial(_row, is_reference_sharded=True, tolerance=0)

QUANTIZED_SAME: tuple[Row, ...] = (
    *(
        _same(f"{recipe} {flags}", 2, _model(recipe, GATHERS[recipe]), ours=flags)
        for recipe in ("delayed", "nvfp4")
        for flags in (
            f"{f.OVERLAP} --fsdp-trace-pool",
            "--keep-fp8-transpose-cache",
            "--init-model-with-meta-device",
        )
    ),
    *(
        _same(f"{recipe}, quantized gathers: {flags}", 2, _model(recipe, flags),
              ours=GATHERS[recipe])
        for recipe, flags in (
            ("tensorwise", "--first-last-layers-bf16 --num-layers 4"),
            ("tensorwise", f.MUON),
            ("tensorwise", f.GATED),
            ("nvfp4", "--first-last-layers-bf16 --num-layers 4"),
            ("nvfp4", f.MUON),
        )
    ),
    # Four ranks sum in another order; on the CPU, Adam is torch's implementation.
    *(
        _same(f"delayed {flags}", ranks, _model("delayed", GATHERS["delayed"]), ours=flags,
              tolerance=1e-3, norms=1.0)
        for ranks, flags in (
            (4, f.HSDP), (2, "--optimizer-cpu-offload --use-precision-aware-optimizer"),
        )
    ),
    # Gradients are reduce-scattered, not all-reduced, along the outer axis, with equal sums.
    *(
        _same(f"{recipe}, HFSDP", 4, _model(recipe, GATHERS[recipe]), ours=f.HFSDP, theirs=f.HSDP,
              strategies=strategies, tolerance=TOLERANCE, norms=1e-2)
        for recipe, strategies in (
            ("delayed", (ZERO2, ZERO1)), ("mxfp8", (ZERO3,)), ("nvfp4", (ZERO3,)),
        )
    ),
)

_FP8, _MX, _FP4 = (f"{FORMATS[name]} {GATHERS[name]}" for name in ("tensorwise", "mxfp8", "nvfp4"))
# Two steps of two micro-batches fill the history before the checkpoint.
HISTORY = f"{FORMATS['delayed']} --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
DELAYED_GATHERED = f"{HISTORY} {GATHERS['delayed']}"
# Each rank evaluates its own samples; their maxima are not reduced before the checkpoint is saved.
EVALUATED = "--eval-interval 2 --eval-iters 1"

_QUICK = Setup(2, ZERO3, f"{DELAYED_GATHERED} {EVALUATED}")

# Checkpoints contain main weights, so runs with and without quantized weights load them.
QUANTIZED_EVALUATED: tuple[Row, ...] = tuple(
    Row(f"{recipe} {gathers}", 2, _model(recipe), ours=gathers, iterations=2,
        strategies=strategies, quick=int(recipe == "delayed"))
    for recipe, gathers, strategies in (
        ("delayed", GATHERS["delayed"], (ZERO3, NO_SHARD)),
        ("tensorwise", GATHERS["tensorwise"], (ZERO1,)),
        ("blockwise", "", (ZERO3,)),
        ("mxfp8", GATHERS["mxfp8"], (ZERO2,)),
        ("nvfp4", GATHERS["nvfp4"], (ZERO3,)),
    )
)

QUANTIZED_RESUMES: tuple[Resume, ...] = (
    *(
        Resume(name, MODEL, saves, loads, tolerance, exact_norms=True)
        for name, saves, loads, tolerance in (
            ("FP8", Setup(2, ZERO3, _FP8), Setup(2, ZERO3, _FP8), 0),
            ("FP8, to bf16 gathers",
             Setup(2, ZERO3, _FP8), Setup(2, ZERO3, FORMATS["tensorwise"]), 0),
            ("FP8, Muon",
             Setup(2, ZERO3, f"{_FP8} {f.MUON}"), Setup(2, ZERO3, f"{_FP8} {f.MUON}"), 0),
            ("MXFP8", Setup(2, ZERO3, _MX), Setup(2, ZERO3, _MX), 0),
            ("MXFP8, Muon",
             Setup(2, ZERO1, f"{_MX} {f.MUON}"), Setup(2, ZERO1, f"{_MX} {f.MUON}"), 0),
            ("FP8, four ranks", Setup(2, ZERO3, _FP8), Setup(4, ZERO3, _FP8), 1e-4),
            ("FP8, to bf16", Setup(2, ZERO3, _FP8), Setup(2, ZERO3), 1e-3),
            ("FP8, to tensor parallel",
             Setup(2, ZERO3, _FP8), Setup(2, ZERO3, f"{_FP8} {f.TP2_SP}"), 1e-3),
            ("bf16, to FP8", Setup(2, ZERO3), Setup(2, ZERO3, _FP8), 1e-3),
            ("NVFP4", Setup(2, ZERO3, _FP4), Setup(2, ZERO3, _FP4), 0),
            ("NVFP4, one rank", Setup(2, ZERO3, _FP4), Setup(1, ZERO3, _FP4), 1e-2),
            ("NVFP4, to bf16", Setup(2, ZERO3, _FP4), Setup(2, ZERO1, BLACKWELL), 1e-2),
            ("delayed, to bf16", Setup(2, ZERO3, DELAYED_GATHERED), Setup(2, ZERO3), 1e-2),
            ("bf16, to delayed", Setup(2, ZERO3), Setup(2, ZERO3, DELAYED_GATHERED), 1e-2),
        )
    ),
    # The checkpoint contains scales and amax histories of delayed scaling.
    *(
        Resume(f"bitwise: {setup}", MODEL, setup, setup, tolerance=0, quick=setup == _QUICK)
        for setup in (
            _QUICK,
            *(
                Setup(2, ZERO3, f"{DELAYED_GATHERED} {flags}")
                for flags in (
                    "--async-save", f.TP2_SP, f.VPP2, f.FULL_RECOMPUTE,
                    f"{f.ALLTOALL} {f.EP2} --moe-grouped-gemm "
                    "--moe-router-load-balancing-type none",
                    f"{f.ALLTOALL} {f.EP2}",
                )
            ),
            Setup(2, ZERO3, HISTORY),
            Setup(4, ZERO3, f"{DELAYED_GATHERED} {f.TP2_SP} {EVALUATED}"),
        )
    ),
)
# fmt: on
