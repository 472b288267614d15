"""The trainings of a proof: Megatron's DDP, this package, and one rank of the same model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_cpu_rehearsal.flags import (
    CPU_FLAGS,
    GPU_FLAGS,
    IMPL_FLAG,
    LOCAL,
    LOCAL_UNLESS_ASKED,
    TRANSFORMER_ENGINE,
    why_no_kernels,
)
from megatron_cpu_rehearsal.te import load
from megatron_fsdp_v2_mcore.flags.arguments import API_FLAG, supported_on_cpu
from megatron_fsdp_v2_mcore.flags.errors import flag_of
from megatron_fsdp_v2_mcore.flags.precision import DTYPE_OPTIONS
from megatron_fsdp_v2_mcore.flags.table import OWN_FLAGS
from megatron_fsdp_v2_mcore.prove.shrink import (
    AXES,
    QUANTIZED,
    Flags,
    ShrunkRun,
    as_words,
    drop_axis,
    number,
    without,
)

FSDP = "--use-megatron-fsdp"
STRATEGY = "--data-parallel-sharding-strategy"
ZERO3 = "optim_grads_params"
WRAPPERS = {FSDP, "--use-torch-fsdp2", STRATEGY}
"""Flags of the wrapper and its sharding, which the comparison replaces."""

CHECKPOINT_FORMAT = "--ckpt-format"
"""Megatron's `--use-megatron-fsdp` supports only `fsdp_dtensor`."""

OF_ANOTHER_FORMAT = "--verify-integrity"
"""A flag that Megatron supports with `torch_dist` only."""

RANDOM_ROUTING = "--moe-router-force-load-balancing"
"""Megatron does not restore its random numbers from a checkpoint."""

_NOT_OF_DDP = """
--init-model-with-meta-device --megatron-fsdp-grad-comm-dtype --megatron-fsdp-main-grads-dtype
--megatron-fsdp-main-params-dtype --no-use-layer-wise-param-layout
--num-distributed-optimizer-instances --outer-dp-sharding-strategy --overlap-param-gather
--overlap-param-gather-with-optimizer-step --use-distributed-optimizer --fp8-param-gather
--fp4-param-gather --keep-fp8-transpose-cache --fsdp-double-buffer --fsdp-manual-registration
--suggested-communication-unit-size --reuse-grad-buf-for-mxfp8-param-ag --no-pin-cpu-grads
--no-pin-cpu-params --optimizer-cpu-offload --optimizer-offload-fraction
--overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
--use-torch-optimizer-for-cpu-offload
"""
STATE_DTYPES = {flag_of(name) for name in DTYPE_OPTIONS}
"""Flags of the dtypes of main weights, their gradients and the optimizer's state."""
NOT_OF_DDP = {
    *(*_NOT_OF_DDP.split(), API_FLAG, RANDOM_ROUTING),
    *(*STATE_DTYPES, *(flag.flag for flag in OWN_FLAGS)),
}
"""Flags of sharded weights and optimizer state."""

_SAVING = """
--async-ckpt-use-cpu-shm --async-save --async-strategy --ckpt-assume-constant-structure
--ckpt-format --ckpt-fully-parallel-load --ckpt-fully-parallel-save
--dist-ckpt-optim-fully-reshardable --dist-ckpt-strictness --no-ckpt-fully-parallel-save
--use-persistent-ckpt-worker --verify-integrity
"""
SAVING = set(_SAVING.split())
"""Flags of checkpoints, which the reference does not write."""

_QUANTIZATION = """
--first-last-layers-bf16 --fp8-amax-compute-algo --fp8-amax-history-len --fp8-format --fp8-interval
--fp8-margin --fp8-param-gather --fp8-recipe --fp8-wgrad --fp4-format --fp4-param
--fp4-param-gather --fp4-recipe --keep-fp8-transpose-cache --num-layers-at-end-in-bf16
--num-layers-at-start-in-bf16 --reuse-grad-buf-for-mxfp8-param-ag
--moe-router-padding-for-fp8 --moe-router-padding-for-quantization
"""
QUANTIZATION = set(_QUANTIZATION.split())
"""Flags of weights and products in 8 and 4 bits."""

GRADS_IN_FP32 = "--accumulate-allreduce-grads-in-fp32"
"""Megatron's default with bf16, but not with fp16."""

PRECISION = {"--bf16", "--fp16", "--grad-reduce-in-bf16"}
_ROUNDED = {
    *(PRECISION | QUANTIZATION),
    *("--megatron-fsdp-grad-comm-dtype", "--megatron-fsdp-main-grads-dtype"),
    "--megatron-fsdp-main-params-dtype",
}
_DROPOUT = ("--attention-dropout", "--hidden-dropout")
_RECIPES = ("--fp8-format", "--fp8-recipe", "--fp4-format")
_FLEX = ("--moe-flex-dispatcher-backend", "--moe-enable-deepep")


@dataclass(frozen=True)
class Side:
    """A training of a proof.

    Attributes:
        world_size: Number of ranks.
        flags: All flags except those of the rehearsal.
        exact_norms: Whether gradient norms are summed in fp64, where the order does not matter.
    """

    world_size: int
    flags: Flags
    exact_norms: bool = False


def user_flags(flags: Flags) -> Flags:
    """Return the flags of a user of this package: his own, or ZeRO-3 if he does not use FSDP."""
    names = {CHECKPOINT_FORMAT, OF_ANOTHER_FORMAT, "--use-torch-fsdp2", RANDOM_ROUTING}
    chosen = {FSDP: (), API_FLAG: (), CHECKPOINT_FORMAT: ("fsdp_dtensor",)}
    default = {} if FSDP in flags else {STRATEGY: (ZERO3,)}
    # Every layer of the tiny models is a unit. By default, all of them would be one unit.
    return {"--fsdp-unit-bytes": ("1",)} | default | without(flags, names) | chosen


def needs_transformer_engine(flags: Flags) -> bool:
    """Whether a job uses products or an Adam that only Transformer Engine has."""
    main_grads = flags.get("--megatron-fsdp-main-grads-dtype", ("auto",))[0]
    return not QUANTIZED.isdisjoint(flags) or main_grads not in ("auto", "fp32")


def layers_of(flags: Flags) -> tuple[str, str]:
    """Return the implementation of layers that rehearsals of a job use, described for the report.

    They are those of the job, if a CPU has them: Transformer Engine's are Megatron's default.

    Args:
        flags: The job's flags.
    """
    if flags.get(IMPL_FLAG) == (LOCAL,):
        reason = f"{IMPL_FLAG} {LOCAL}"
    elif why_not := load.why_not_installed() or why_no_kernels(as_words(flags)):
        reason = f"not Transformer Engine's: {why_not}"
    elif not (needs_transformer_engine(flags) or flags.keys().isdisjoint(LOCAL_UNLESS_ASKED)):
        reason = "not Transformer Engine's, whose layers of this kind are not tested on a CPU"
    else:
        return TRANSFORMER_ENGINE, "Transformer Engine's, over reference kernels"
    return LOCAL, f"Megatron's own ({reason})"


def recipe_of(flags: Flags, impl: str | None) -> tuple[str, ...]:
    """Return the flags that determine the rehearsed GPU."""
    named = {name: values for name, values in flags.items() if name in _RECIPES}
    return as_words(named) if impl == TRANSFORMER_ENGINE else ()


def needs_gpu(flags: Flags, impl: str) -> Iterator[tuple[str, str]]:
    """Yield the flags of a command line that a CPU does not support, with the reason."""
    ours = supported_on_cpu(as_words(flags))
    for flag in GPU_FLAGS:
        values = None if flag.name in ours else flags.get(flag.name)
        unsupported = values is not None and (not flag.values or " ".join(values) in flag.values)
        if unsupported and (impl == LOCAL or not flag.only_local):
            yield flag.name, flag.reason
    for default in CPU_FLAGS:
        if default.value not in (None, "0") and flags.get(default.name, (default.value,)) != (
            default.value,
        ):
            yield default.name, default.reason


def on_cpu(flags: Flags, impl: str) -> Flags:
    """Return flags without those that need a GPU."""
    dropped = {name for name, _ in needs_gpu(flags, impl)} | {flag.name for flag in CPU_FLAGS}
    if impl == TRANSFORMER_ENGINE:
        # Its layers would draw other initial weights than those of the reference.
        dropped.add("--init-model-with-meta-device")
    if impl == LOCAL:
        # Dtypes of Transformer Engine's Adam.
        dropped |= QUANTIZATION | STATE_DTYPES
    kept = without(flags, {*dropped, *_FLEX, IMPL_FLAG})
    if not flags.keys().isdisjoint(_FLEX) or "flex" in flags.get("--moe-token-dispatcher-type", ()):
        # The flexible dispatcher exchanges the same tokens.
        kept["--moe-token-dispatcher-type"] = ("alltoall",)
    return kept | {IMPL_FLAG: (impl,)}


def sharded(run: ShrunkRun) -> Side:
    """Return the training of this package."""
    return Side(run.world_size, user_flags(run.flags))


def reference(run: ShrunkRun) -> Side:
    """Return the training of Megatron's own DDP, in which every rank steps all weights."""
    return Side(run.world_size, without(run.flags, {*WRAPPERS, *NOT_OF_DDP, *SAVING}))


def on_one_rank(side: Side) -> Side:
    """Return a training without parallelism. The samples of an iteration are the same."""
    flags = dict(side.flags)
    for axis in AXES[:-1]:
        if number(flags, axis) > 1:
            drop_axis(flags, axis)
    return Side(1, flags, side.exact_norms)


def without_dropout(side: Side) -> Side:
    """Return a training without dropout, whose random numbers depend on the number of ranks."""
    flags = side.flags | {name: ("0",) for name in _DROPOUT}
    return Side(side.world_size, flags, side.exact_norms)


def has_dropout(flags: Flags) -> bool:
    """Whether a training drops activations; Megatron's default is a probability of 0.1."""
    return any(float(flags.get(name, ("0.1",))[0]) > 0 for name in _DROPOUT)


def is_low_precision(flags: Flags) -> bool:
    """Whether weights or reduced gradients have fewer than 32 bits."""
    return not flags.keys().isdisjoint(_ROUNDED)


def in_fp32(side: Side) -> Side:
    """Return a training in fp32."""
    flags = without(side.flags, _ROUNDED)
    if "--muon-fp32-matmul-prec" in flags or "muon" in "".join(flags.get("--optimizer", ())):
        # Otherwise Newton-Schulz would multiply in bf16.
        flags["--muon-fp32-matmul-prec"] = ("high",)
    return Side(side.world_size, flags, side.exact_norms)


def with_fp32_state(side: Side) -> Side:
    """Return a training whose optimizer keeps its state in fp32."""
    return Side(side.world_size, without(side.flags, STATE_DTYPES), side.exact_norms)


def in_own_precision(side: Side) -> Side:
    """Return a training in its own precision, without differences in Megatron's rounding.

    Megatron sums the norm of all gradients in fp32, in an order that depends on the sharding. The
    last bit of the norm changes the clipping factor and with it every weight, some of which round
    to the next bf16 value: a difference of 1e-7 becomes 1e-5. Both sides sum the norm in fp64.

    With fp16 weights, Megatron accumulates gradients of micro-batches and the parameter norm in
    fp16, where this package has fp32 shards. Both sides accumulate gradients in fp32 and do not
    log the parameter norm.
    """
    flags = side.flags
    if "--fp16" in flags:
        flags = {**without(flags, {"--log-params-norm"}), GRADS_IN_FP32: ()}
    return Side(side.world_size, flags, exact_norms=True)
