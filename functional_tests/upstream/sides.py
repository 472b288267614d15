"""The two trainings of a configuration: sharded by this package, and Megatron's DDP."""

from __future__ import annotations

from collections.abc import Sequence

from functional_tests.matrix import Run
from functional_tests.upstream.shrink import Shrunk
from megatron_fsdp_v2_mcore.plan.source import without_gpu_flags
from tests.mcore.flags import fsdp

WRAPPERS = {"--use-megatron-fsdp", "--use-torch-fsdp2", "--data-parallel-sharding-strategy"}
"""Flags of the wrapper and its sharding, which the comparison replaces."""

CHECKPOINT_FORMAT = "--ckpt-format"
"""Megatron's `--use-megatron-fsdp` supports only `fsdp_dtensor`."""

OF_ANOTHER_FORMAT = "--verify-integrity"
"""A flag that Megatron supports with `torch_dist` only."""

_NOT_OF_DDP = """
--init-model-with-meta-device --megatron-fsdp-grad-comm-dtype --megatron-fsdp-main-grads-dtype
--megatron-fsdp-main-params-dtype --no-use-layer-wise-param-layout
--num-distributed-optimizer-instances --outer-dp-sharding-strategy --overlap-param-gather
--overlap-param-gather-with-optimizer-step --use-distributed-optimizer
"""
NOT_OF_DDP = set(_NOT_OF_DDP.split())
"""Flags of sharded weights and optimizer state."""

_SAVING = """
--async-ckpt-use-cpu-shm --async-save --async-strategy --ckpt-assume-constant-structure
--ckpt-format --ckpt-fully-parallel-load --ckpt-fully-parallel-save
--dist-ckpt-optim-fully-reshardable --dist-ckpt-strictness --no-ckpt-fully-parallel-save
--use-persistent-ckpt-worker --verify-integrity
"""
SAVING = set(_SAVING.split())
"""Flags of checkpoints, which these runs do not write; without them, references are shared."""

_FP8 = """
--first-last-layers-bf16 --fp8-format --fp8-param-gather --fp8-recipe --keep-fp8-transpose-cache
--num-layers-at-end-in-bf16 --num-layers-at-start-in-bf16
"""
FP8 = set(_FP8.split())
"""Flags of Transformer Engine's layers; `docs/fp8.md` lists the tests of FP8."""

GRADS_IN_FP32 = "--accumulate-allreduce-grads-in-fp32"
"""Megatron's default with bf16, but not with fp16."""

PRECISION = {"--bf16", "--fp16", "--grad-reduce-in-bf16"}


def _without(words: Sequence[str], names: set[str]) -> list[str]:
    """Return a command line without some flags and their values."""
    kept: list[str] = []
    keeps = True
    for word in words:
        if word.startswith("--"):
            keeps = word not in names
        if keeps:
            kept.append(word)
    return kept


def user_flags(shrunk: Shrunk) -> list[str]:
    """Return the command line of a user of this package, on GPUs."""
    names = {*WRAPPERS, CHECKPOINT_FORMAT, OF_ANOTHER_FORMAT}
    return [*_without(shrunk.flags, names), *fsdp()]


def _on_cpu(words: Sequence[str]) -> tuple[str, ...]:
    kept = without_gpu_flags(words)
    if "--moe-flex-dispatcher-backend" in kept:
        # The flexible dispatcher exchanges the same tokens.
        kept = _without(kept, {"--moe-flex-dispatcher-backend"})
        kept += ["--moe-token-dispatcher-type", "alltoall"]
    kept = _without(kept, FP8)
    # Megatron's own layers are faster on a CPU.
    return (*kept, "--transformer-impl", "local")


def sharded(shrunk: Shrunk) -> Run:
    """Return the run of this package, on a CPU."""
    return Run(shrunk.world_size, _on_cpu(user_flags(shrunk)))


def reference(shrunk: Shrunk) -> Run:
    """Return the run of Megatron's own DDP, in which every rank steps all weights."""
    names = {*WRAPPERS, *NOT_OF_DDP, *SAVING}
    return Run(shrunk.world_size, _on_cpu(_without(shrunk.flags, names)))


def is_low_precision(shrunk: Shrunk) -> bool:
    """Return whether weights or reduced gradients are in 16 bits."""
    return not PRECISION.isdisjoint(shrunk.flags)


def in_fp32(run: Run) -> Run:
    """Return a run in fp32."""
    return Run(run.world_size, tuple(_without(run.flags, PRECISION)))


def in_own_precision(run: Run) -> Run:
    """Return a run in its own precision, without differences in Megatron's rounding.

    Megatron sums the norm of all gradients in fp32, in an order that depends on the sharding. The
    last bit of the norm changes the clipping factor and with it every weight, some of which round
    to the next bf16 value: a difference of 1e-7 becomes 1e-5. Both sides sum the norm in fp64.

    With fp16 weights, Megatron accumulates gradients of micro-batches and the parameter norm in
    fp16, where this package has fp32 shards. Both sides accumulate gradients in fp32 and do not
    log the parameter norm.
    """
    flags = run.flags
    if "--fp16" in flags:
        names = {"--log-params-norm", GRADS_IN_FP32}
        flags = (*_without(flags, names), GRADS_IN_FP32)
    return Run(run.world_size, flags, exact_norms=True)
