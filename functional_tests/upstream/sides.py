"""The two trainings of a configuration: sharded by this package, and Megatron's DDP."""

from __future__ import annotations

from collections.abc import Sequence

from functional_tests.matrix import Run
from functional_tests.upstream.shrink import Shrunk
from megatron_fsdp_v2_mcore.plan.source import without_gpu_flags
from tests.mcore.flags import fsdp

WRAPPERS = {"--use-megatron-fsdp", "--use-torch-fsdp2", "--data-parallel-sharding-strategy"}
"""Which wrapper is used, and how it shards: what the comparison is about."""

CHECKPOINT_FORMAT = "--ckpt-format"
"""Megatron's own `--use-megatron-fsdp` takes no other one than `fsdp_dtensor`."""

OF_ANOTHER_FORMAT = "--verify-integrity"
"""Megatron takes it with `torch_dist` alone."""

_NOT_OF_DDP = """
--init-model-with-meta-device --megatron-fsdp-grad-comm-dtype --megatron-fsdp-main-grads-dtype
--megatron-fsdp-main-params-dtype --no-use-layer-wise-param-layout
--num-distributed-optimizer-instances --outer-dp-sharding-strategy --overlap-param-gather
--overlap-param-gather-with-optimizer-step --use-distributed-optimizer
"""
NOT_OF_DDP = set(_NOT_OF_DDP.split())
"""What only sharded weights or optimizer state have."""

_SAVING = """
--async-ckpt-use-cpu-shm --async-save --async-strategy --ckpt-assume-constant-structure
--ckpt-format --ckpt-fully-parallel-load --ckpt-fully-parallel-save
--dist-ckpt-optim-fully-reshardable --dist-ckpt-strictness --no-ckpt-fully-parallel-save
--use-persistent-ckpt-worker --verify-integrity
"""
SAVING = set(_SAVING.split())
"""How checkpoints are written, of which there are none: many configurations have one reference."""

_FP8 = """
--first-last-layers-bf16 --fp8-format --fp8-param-gather --fp8-recipe --keep-fp8-transpose-cache
--num-layers-at-end-in-bf16 --num-layers-at-start-in-bf16
"""
FP8 = set(_FP8.split())
"""What only Transformer Engine's layers have; `docs/fp8.md` says what of it is compared where."""

GRADS_IN_FP32 = "--accumulate-allreduce-grads-in-fp32"
"""What Megatron does by itself with bf16, and not with fp16."""

PRECISION = {"--bf16", "--fp16", "--grad-reduce-in-bf16"}


def _without(words: Sequence[str], names: set[str]) -> list[str]:
    """A command line without some flags and their values."""
    kept: list[str] = []
    keeps = True
    for word in words:
        if word.startswith("--"):
            keeps = word not in names
        if keeps:
            kept.append(word)
    return kept


def asked(shrunk: Shrunk) -> list[str]:
    """What a user of this package would type, on GPUs."""
    names = {*WRAPPERS, CHECKPOINT_FORMAT, OF_ANOTHER_FORMAT}
    return [*_without(shrunk.flags, names), *fsdp()]


def _on_cpu(words: Sequence[str]) -> tuple[str, ...]:
    kept = without_gpu_flags(words)
    if "--moe-flex-dispatcher-backend" in kept:
        # The flexible dispatcher exchanges tokens as this one does.
        kept = _without(kept, {"--moe-flex-dispatcher-backend"})
        kept += ["--moe-token-dispatcher-type", "alltoall"]
    kept = _without(kept, FP8)
    # Whose layers they are makes no difference to what is compared; Megatron's own are faster.
    return (*kept, "--transformer-impl", "local")


def sharded(shrunk: Shrunk) -> Run:
    """The run of this package, on a CPU."""
    return Run(shrunk.world_size, _on_cpu(asked(shrunk)))


def reference(shrunk: Shrunk) -> Run:
    """The run of Megatron's own DDP, which every rank steps all weights of."""
    names = {*WRAPPERS, *NOT_OF_DDP, *SAVING}
    return Run(shrunk.world_size, _on_cpu(_without(shrunk.flags, names)))


def is_low_precision(shrunk: Shrunk) -> bool:
    """Whether weights are rounded."""
    return not PRECISION.isdisjoint(shrunk.flags)


def in_fp32(run: Run) -> Run:
    """The same in fp32."""
    return Run(run.world_size, tuple(_without(run.flags, PRECISION)))


def in_own_precision(run: Run) -> Run:
    """The same, without what Megatron rounds by chance, or more than there is need to.

    The norm of all gradients is added up in fp32, in an order that follows from who holds what. Its
    last digit is in the factor of clipping, hence in every weight, some of which are then rounded
    to the next bf16: 1e-7 becomes 1e-5. Both sides add it up in fp64.

    With fp16 weights Megatron adds up gradients of micro-batches in fp16, where this package has
    fp32 shards, and the norm of the weights; here gradients are fp32 on both sides, and that norm
    is one of fp32 weights.
    """
    flags = run.flags
    if "--fp16" in flags:
        names = {"--log-params-norm", GRADS_IN_FP32}
        flags = (*_without(flags, names), GRADS_IN_FP32)
    return Run(run.world_size, flags, exact_norms=True)
