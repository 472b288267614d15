"""Rows of trainings with weights quantized to 8 or 4 bits, gathered in bf16 or quantized."""

from __future__ import annotations

from functools import partial

from functional_tests.matrix import SHARDED, STRATEGIES, TOLERANCE, Resume, Row, Setup
from tests.mcore.flags import (
    ALLTOALL,
    EP2,
    FULL_RECOMPUTE,
    GATED,
    HFSDP,
    HSDP,
    MUON,
    NO_SHARD,
    OVERLAP,
    PP2,
    TP2,
    TP2_SP,
    VPP2,
    ZERO1,
    ZERO2,
    ZERO3,
)

# FP8 has blocks of 128 elements, so that no dimension is smaller.
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
"""Flags by recipe: the format of weights, and gathers in this format."""
# Megatron gathers MXFP8 weights in bf16 and quantizes them on every rank.
MEGATRONS = {"mxfp8": "--reuse-grad-buf-for-mxfp8-param-ag"}
# For bf16: without --fp8-format, this flag only determines the rehearsed GPU.
BLACKWELL = "--fp8-recipe mxfp8"
# Gradients are divided by a number of tokens that is not a power of two.
PER_TOKEN = (
    "--calculate-per-token-loss --micro-batch-size 1 --seq-length 96 --max-position-embeddings 96"
)

# Norms summed in another order would differ in the last bit, and so would bf16 and FP8 weights.
_row = partial(Row, iterations=4, exact_norms=True, tolerance=TOLERANCE)


def _model(recipe: str, *more: str) -> str:
    return " ".join((MODEL, FORMATS[recipe], *more))


def _norms(recipe: str) -> float | None:
    """Bound of norms of gradients, whose small blocks are quantized in another order of ranks."""
    return None if recipe in RECIPES else 1e-2


# fmt: off
QUANTIZED: tuple[Row, ...] = (
    *(
        _row(f"{recipe} {gathers}", 2, _model(recipe, "--log-params-norm"), ours=gathers,
             strategies=STRATEGIES, norms=_norms(recipe),
             quick=int(recipe == "tensorwise" and not gathers))
        for recipe in FORMATS
        for gathers in ("", GATHERS[recipe])
    ),
    *(
        _row(f"{recipe}, random initialization by rank", 2,
             _model(recipe, "--data-parallel-random-init --log-params-norm"), ours=GATHERS[recipe],
             strategies=(ZERO3, ZERO1), norms=_norms(recipe), quick=int(recipe == "tensorwise"))
        for recipe in FORMATS
    ),
    # Bitwise identical with one micro-batch on two ranks: a sum of two terms has one order.
    *(
        _row(f"{recipe}, Megatron's distributed optimizer {overlap}", 2,
             _model(recipe, GATHERS[recipe], "--global-batch-size 4", overlap),
             theirs=f"--use-distributed-optimizer {MEGATRONS.get(recipe, '')}",
             strategies=SHARDED, tolerance=0, quick=int(recipe == "tensorwise" and not overlap))
        for recipe in FORMATS
        for overlap in ("", OVERLAP)
    ),
    # Bitwise identical if gradients are reduced once per step, as under DDP. ZeRO-2 and ZeRO-3
    # reduce every micro-batch and sum the results: the last bit of a gradient occasionally changes
    # an FP8 value. The last bit of the norm has the same effect in Megatron, whose distributed
    # optimizer differs from its DDP by up to 3e-5 (seeds 2 to 7, norms summed in fp32).
    *(
        _row(f"{recipe}, per-token loss {gathers}, {tolerance}", 2, _model(recipe, PER_TOKEN),
             ours=gathers, strategies=strategies, tolerance=tolerance, norms=norms)
        for recipe in RECIPES
        for gathers in ("", GATHERS[recipe])
        for strategies, tolerance, norms in (
            ((ZERO1, NO_SHARD), 0, None), ((ZERO3, ZERO2), 1e-4, 1e-2),
        )
    ),
    *(
        _row(f"{recipe}, {name}", ranks, _model(recipe, flags), ours=GATHERS[recipe], norms=1e-2)
        for recipe, ranks, name, flags in (
            ("tensorwise", 2, "recompute", FULL_RECOMPUTE),
            ("tensorwise", 2, "TP2 SP", TP2_SP),
            ("tensorwise", 4, "TP2 SP, DP2", TP2_SP),
            ("delayed", 2, "MoE", f"{EXPERTS}fp8"),
            ("tensorwise", 2, "MoE", f"{EXPERTS}fp8"),
            ("delayed", 2, "GQA SwiGLU", f"{GATED} --disable-bias-linear"),
            ("delayed", 2, "PP2", PP2),
            ("tensorwise", 4, "PP2, DP2", PP2),
            ("mxfp8", 2, "recompute", FULL_RECOMPUTE),
            ("mxfp8", 2, "MoE", f"{EXPERTS}fp8"),
            ("mxfp8", 2, "PP2", PP2),
            ("nvfp4", 2, "recompute", FULL_RECOMPUTE),
            ("nvfp4", 2, "MoE", f"{EXPERTS}quantization"),
            ("nvfp4", 2, "PP2", PP2),
            ("nvfp4", 4, "DP4", ""),
            ("nvfp4", 2, "GQA SwiGLU", f"{GATED} --disable-bias-linear"),
            ("nvfp4", 2, "TP2", TP2),
        )
    ),
    # Weights gathered in bf16 are then quantized again in the backward, with the same result.
    *(
        _row(f"nvfp4, weight gradients apart {gathers}", 2,
             _model("nvfp4", "--no-gradient-accumulation-fusion"), ours=gathers, norms=1e-2)
        for gathers in ("", GATHERS["nvfp4"])
    ),
)

_same = partial(_row, beside_itself=True, tolerance=0)

QUANTIZED_SAME: tuple[Row, ...] = (
    *(
        _same(f"{recipe} {flags}", 2, _model(recipe, GATHERS[recipe]), ours=flags)
        for recipe in ("delayed", "nvfp4")
        for flags in (
            f"{OVERLAP} --fsdp-trace-pool",
            "--keep-fp8-transpose-cache",
            "--init-model-with-meta-device",
        )
    ),
    *(
        _same(f"{recipe}, gathered so: {flags}", 2, _model(recipe, flags), ours=GATHERS[recipe])
        for recipe, flags in (
            ("tensorwise", "--first-last-layers-bf16 --num-layers 4"),
            ("tensorwise", MUON),
            ("tensorwise", GATED),
            ("nvfp4", "--first-last-layers-bf16 --num-layers 4"),
            ("nvfp4", MUON),
        )
    ),
    # Sums over four ranks have another order; on the CPU, Adam is torch's implementation.
    *(
        _same(f"delayed {flags}", ranks, _model("delayed", GATHERS["delayed"]), ours=flags,
              tolerance=1e-3, norms=1.0)
        for ranks, flags in (
            (4, HSDP), (2, "--optimizer-cpu-offload --use-precision-aware-optimizer"),
        )
    ),
    # Gradients are reduce-scattered, not all-reduced, along the outer axis, with equal sums.
    *(
        _same(f"{recipe}, HFSDP", 4, _model(recipe, GATHERS[recipe]), ours=HFSDP, theirs=HSDP,
              strategies=SHARDED if recipe in RECIPES else (ZERO3,), tolerance=TOLERANCE,
              norms=1e-2)
        for recipe in FORMATS
    ),
)

_FP8, _FP4 = (f"{FORMATS[name]} {GATHERS[name]}" for name in ("tensorwise", "nvfp4"))
# Two steps of two micro-batches before the checkpoint: all of a history counts.
HISTORY = f"{FORMATS['delayed']} --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
DELAYED_GATHERED = f"{HISTORY} {GATHERS['delayed']}"
# Ranks evaluate samples of their own, whose maxima are not reduced before the checkpoint is saved.
EVALUATED = "--eval-interval 2 --eval-iters 1"

_QUICK = Setup(2, ZERO3, f"{DELAYED_GATHERED} {EVALUATED}")

# Checkpoints contain main weights, so runs with and without quantized weights load them.
QUANTIZED_RESUMES: tuple[Resume, ...] = (
    *(
        Resume(name, MODEL, saves, loads, tolerance, exact_norms=True, quick=name == "FP8")
        for name, saves, loads, tolerance in (
            ("FP8", Setup(2, ZERO3, _FP8), Setup(2, ZERO3, _FP8), 0),
            ("FP8, gathered in bf16 from now on",
             Setup(2, ZERO3, _FP8), Setup(2, ZERO3, FORMATS["tensorwise"]), 0),
            ("FP8, ZeRO-1 at one rank", Setup(2, ZERO3, _FP8), Setup(1, ZERO1, _FP8), 1e-4),
            ("FP8, four ranks", Setup(2, ZERO3, _FP8), Setup(4, ZERO3, _FP8), 1e-4),
            ("FP8, bf16 from now on", Setup(2, ZERO3, _FP8), Setup(2, ZERO3), 1e-3),
            ("FP8, tensor parallel from now on",
             Setup(2, ZERO3, _FP8), Setup(2, ZERO3, f"{_FP8} {TP2_SP}"), 1e-3),
            ("bf16, FP8 from now on", Setup(2, ZERO3), Setup(2, ZERO3, _FP8), 1e-3),
            ("NVFP4", Setup(2, ZERO3, _FP4), Setup(2, ZERO3, _FP4), 0),
            ("NVFP4, one rank", Setup(2, ZERO3, _FP4), Setup(1, ZERO3, _FP4), 1e-2),
            ("NVFP4, bf16 from now on", Setup(2, ZERO3, _FP4), Setup(2, ZERO1, BLACKWELL), 1e-2),
            ("NVFP4, bf16 at one rank", Setup(2, ZERO3, _FP4), Setup(1, ZERO1, BLACKWELL), 1e-2),
            ("delayed, bf16 from now on", Setup(2, ZERO3, DELAYED_GATHERED), Setup(2, ZERO3), 1e-2),
            ("bf16, delayed from now on", Setup(2, ZERO3), Setup(2, ZERO3, DELAYED_GATHERED), 1e-2),
        )
    ),
    # The checkpoint contains scales and amax histories of delayed scaling.
    *(
        Resume(f"to the bit: {setup}", MODEL, setup, setup, tolerance=0, quick=setup == _QUICK)
        for setup in (
            _QUICK,
            *(
                Setup(2, ZERO3, f"{DELAYED_GATHERED} {flags}")
                for flags in (
                    "--async-save", TP2_SP, PP2, VPP2, FULL_RECOMPUTE,
                    f"{ALLTOALL} --moe-router-load-balancing-type none --moe-grouped-gemm {EP2}",
                    f"{ALLTOALL} {EP2}",
                )
            ),
            Setup(2, ZERO3, HISTORY),
            Setup(4, ZERO3, f"{DELAYED_GATHERED} {TP2_SP} {EVALUATED}"),
        )
    ),
)
# fmt: on
