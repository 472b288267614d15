"""Flags of test trainings: a small model, its variants, parallel sizes, checkpoints.

A constant has one or several flags in one string; `words` makes a command line of such strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
NO_SHARD, ZERO1, ZERO2, ZERO3 = STRATEGIES

_MODEL = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 12
--lr 1e-3 --lr-decay-style constant --eval-interval 1000 --eval-iters 0 --log-interval 1 --seed 1
--attention-dropout 0 --hidden-dropout 0
--mock-data --tokenizer-type NullTokenizer --vocab-size 256
"""
LOCAL = ["--transformer-impl", "local"]
TRANSFORMER_ENGINE = ["--transformer-impl", "transformer_engine"]
MODEL_FLAGS = [*_MODEL.split(), *LOCAL]
"""A tiny model of Megatron's own layers; append `TRANSFORMER_ENGINE` for the default layers."""

# Every layer of the tiny models is a unit. By default, all of them would be one unit.
_FSDP = """
--use-megatron-fsdp --use-fsdp-fully-shard-api --ckpt-format fsdp_dtensor --fsdp-unit-bytes 1
--data-parallel-sharding-strategy
"""

GATED = "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2"
MODERN = f"{GATED} --qk-layernorm --disable-bias-linear --position-embedding-type rope"
UNTIED = "--untie-embeddings-and-output-weights"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
MTP = "--mtp-num-layers 1 --position-embedding-type rope"
MAMBA = "--hybrid-layer-pattern M*-M --mamba-state-dim 16 --mamba-head-dim 16 --mamba-num-groups 2"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --swiglu --moe-ffn-hidden-size 64 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
)
ALLTOALL = f"{MOE} --moe-token-dispatcher-type alltoall"
LATENT_SIZES = "--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12"
LATENT = (
    f"--multi-latent-attention {LATENT_SIZES} --qk-layernorm --normalization RMSNorm --swiglu "
    f"--disable-bias-linear {UNTIED} --position-embedding-type rope"
)
LOW_RANK_QUERIES = f"{LATENT} --q-lora-rank 24"
DEEPSEEK = (
    f"{LOW_RANK_QUERIES} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 "
    "--moe-shared-expert-intermediate-size 64 --moe-layer-freq [0,1] --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.001"
)
SPARSE = (
    f"{LOW_RANK_QUERIES} --experimental-attention-variant dsa --dsa-indexer-n-heads 2 "
    "--dsa-indexer-head-dim 16 --dsa-indexer-topk 8 --dsa-indexer-loss-coeff 0.01"
)

TP2 = "--tensor-model-parallel-size 2"
TP2_SP = f"{TP2} --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
CP2 = "--context-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"
ETP1 = "--expert-tensor-parallel-size 1"
HSDP = "--num-distributed-optimizer-instances 2"
HFSDP = f"{HSDP} --outer-dp-sharding-strategy optim"
OVERLAP_GRADS = "--overlap-grad-reduce"
OVERLAP_PARAMS = "--overlap-param-gather"
OVERLAP = f"{OVERLAP_GRADS} {OVERLAP_PARAMS}"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# Newton-Schulz in fp32, which the command line calls `high`.
MUON = "--optimizer muon --muon-fp32-matmul-prec high"

Flags = str | Sequence[str]


def words(*flags: Flags) -> list[str]:
    """Split strings into words and concatenate them with the words of lists."""
    return [
        word for part in flags for word in (part.split() if isinstance(part, str) else list(part))
    ]


def fsdp(strategy: str = ZERO3, *more: Flags) -> list[str]:
    """Return the flags that select this package."""
    return words(_FSDP, strategy, *more)


def saving(folder: Path | str, every: int) -> list[str]:
    """Return the flags that save to a folder at an interval."""
    return ["--save", str(folder), "--save-interval", str(every)]


def loading(folder: Path | str, iteration: int | None = None) -> list[str]:
    """Return the flags that load an iteration from a folder; the latest if None."""
    step = [] if iteration is None else ["--ckpt-step", str(iteration)]
    return ["--load", str(folder), *step]
