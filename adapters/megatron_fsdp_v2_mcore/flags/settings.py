"""What Megatron's configuration means to `fully_shard`: one table, field by field."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of
from megatron_fsdp_v2_mcore.flags.options import Options

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "FIELDS",
    "FieldRule",
    "Handling",
    "ShardingSettings",
    "check_accumulation",
    "check_hybrid",
    "check_prefetch",
    "check_quantized",
    "notices",
    "quantized_gathers",
    "reject_fields",
    "sharding_settings",
]


class Handling(enum.Enum):
    """What becomes of a configuration field."""

    HONOURED = "supported"
    """It changes what this package does."""
    IMPLIED = "no-op"
    """It asks for what this package does anyway, or tunes something it has no need of."""
    REFUSED = "rejected"
    """A value other than the default ends the start with an error."""


@dataclass(frozen=True, slots=True)
class FieldRule:
    """One field of `DistributedDataParallelConfig`.

    Attributes:
        name: The field.
        flag: What a user types to set it.
        handling: What becomes of it.
        meaning: What it does here, or why it is rejected.
        rejects: Whether a value is rejected; only with `Handling.REFUSED`.
        argument: Attribute of Megatron's arguments the field is made of, if it has another name.
    """

    name: str
    flag: str
    handling: Handling
    meaning: str
    rejects: Callable[[Any], bool] | None = None
    argument: str | None = None


def _supported(name: str, flag: str, meaning: str) -> FieldRule:
    return FieldRule(name, flag, Handling.HONOURED, meaning)


def _no_op(name: str, flag: str, meaning: str) -> FieldRule:
    return FieldRule(name, flag, Handling.IMPLIED, meaning)


def _rejected(
    name: str,
    flag: str,
    meaning: str,
    rejects: Callable[[Any], bool] = bool,
    argument: str | None = None,
) -> FieldRule:
    return FieldRule(name, flag, Handling.REFUSED, meaning, rejects, argument)


_ONE_BUCKET = "a unit's gradients are one bucket; --fsdp-bucket-bytes has small units share one"

FIELDS: tuple[FieldRule, ...] = (
    _supported(
        "data_parallel_sharding_strategy",
        "--data-parallel-sharding-strategy",
        "sharding_strategy of every unit",
    ),
    _supported(
        "num_distributed_optimizer_instances",
        "--num-distributed-optimizer-instances",
        "more than one: an outer data-parallel axis between them, so that parameters are sharded "
        "within an instance",
    ),
    _supported(
        "outer_dp_sharding_strategy",
        "--outer-dp-sharding-strategy",
        "outer_dp_sharding_strategy: no_shard (HSDP) or optim (HFSDP)",
    ),
    _supported("overlap_grad_reduce", "--overlap-grad-reduce", "enable_async_reduce_grad"),
    _supported("overlap_param_gather", "--overlap-param-gather", "enable_unshard_prefetch"),
    _supported(
        "suggested_communication_unit_size",
        "--suggested-communication-unit-size",
        "half of it, as with Megatron-FSDP, is how many elements are gathered ahead at most "
        "(unshard_prefetch_bytes), but one unit always is; below 2 none is. Reductions under way "
        "are limited by --fsdp-max-live-grad-buffers",
    ),
    _supported(
        "grad_reduce_in_fp32",
        "--accumulate-allreduce-grads-in-fp32",
        "grad_comm_dtype and main_grads_dtype, where the Megatron-FSDP dtype flags say 'auto': "
        "fp32 if set, the model's dtype if not",
    ),
    _supported(
        "megatron_fsdp_main_params_dtype",
        "--megatron-fsdp-main-params-dtype",
        "main_params_dtype; 'auto': the model's dtype",
    ),
    _supported(
        "megatron_fsdp_main_grads_dtype",
        "--megatron-fsdp-main-grads-dtype",
        "main_grads_dtype; 'auto': the dtype of the main weights, which the optimizer reads",
    ),
    _supported(
        "megatron_fsdp_grad_comm_dtype",
        "--megatron-fsdp-grad-comm-dtype",
        "grad_comm_dtype; 'auto': see grad_reduce_in_fp32",
    ),
    _supported(
        "check_for_nan_in_grad",
        "--no-check-for-nan-in-loss-and-grad",
        "unless given, reduced gradients are checked before the optimizer steps",
    ),
    _no_op("use_megatron_fsdp", "--use-megatron-fsdp", "selects this package, with its own flag"),
    _no_op("use_custom_fsdp", "--use-megatron-fsdp", "Megatron's older name of the same"),
    _no_op(
        "use_distributed_optimizer",
        "--use-distributed-optimizer",
        "Megatron turns it on; the optimizer steps sharded main weights",
    ),
    _no_op(
        "average_in_collective",
        "--ddp-average-in-collective",
        "collectives only add; the factor of the mean is applied once, to the reduced sum where it "
        "is stored in the main gradient (with fp16 its power of two already to the terms)",
    ),
    _no_op(
        "gradient_reduce_div_fusion",
        "--no-gradient-reduce-div-fusion",
        "as --ddp-average-in-collective: there is no pass for the division alone",
    ),
    _no_op("bucket_size", "--ddp-bucket-size", _ONE_BUCKET),
    _no_op("num_buckets", "--ddp-num-buckets", _ONE_BUCKET),
    _no_op(
        "pad_buckets_for_high_nccl_busbw",
        "--ddp-pad-buckets-for-high-nccl-busbw",
        "shards are of equal size; there are no buckets to pad",
    ),
    _no_op(
        "align_param_gather",
        "--no-align-param-gather",
        "gathers are issued by the units, the same in every pipeline stage",
    ),
    _no_op(
        "fsdp_all_gather_in_start_param_sync",
        "(set for CUDA graphs)",
        "the first gather is issued by the forward",
    ),
    _supported(
        "nccl_ub",
        "--use-nccl-ub",
        "with --fsdp-trace-pool, its memory is NCCL's and registered with the data-parallel "
        "process groups, block by block when it is planned; without, addresses change, and a "
        "notice says that nothing is registered",
    ),
    _no_op(
        "fsdp_manual_registration",
        "--fsdp-manual-registration",
        "memory is registered when it is planned, once",
    ),
    _no_op(
        "disable_symmetric_registration",
        "--disable-symmetric-registration",
        "ranks register for themselves: windows would have to be made by all at one moment, and "
        "gradients may be planned at different ones",
    ),
    _no_op(
        "fsdp_db_use_persist_buf_on_alloc_fail",
        "--fsdp-db-use-persist-buf-on-alloc-fail",
        "only means something with Megatron's own double buffers",
    ),
    _no_op(
        "fsdp_double_buffer",
        "--fsdp-double-buffer",
        "the number of units that are gathered or have full gradient buffers is bounded without "
        "it, and --fsdp-trace-pool keeps their memory between steps at fixed addresses; a notice "
        "says so",
    ),
    _no_op(
        "megatron_fsdp_max_pool_double_buffer",
        "--megatron-fsdp-max-pool-double-buffer",
        "as --fsdp-double-buffer; units may be of any sizes",
    ),
    _no_op(
        "reuse_grad_buf_for_mxfp8_param_ag",
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "Megatron turns it off together with --use-megatron-fsdp",
    ),
    _rejected(
        "check_for_large_grads",
        "--check-for-large-grads",
        "its check reads Megatron's gradient buckets",
    ),
    _supported(
        "reduce_scatter_with_fp32_accumulation",
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "gradients that travel in bf16 or fp16 are reduce-scattered by an all-to-all and a sum in "
        "fp32; all-reduces between optimizer instances stay in the communication dtype, as with "
        "Megatron. Rejected with no_shard, which scatters nothing",
    ),
    _rejected(
        "param_name_patterns_for_fp32_local_accumulation",
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "use --megatron-fsdp-main-grads-dtype fp32 for all parameters instead",
        argument="ddp_param_name_patterns_for_fp32_local_accumulation",
    ),
    _supported(
        "fp8_param_gather",
        "--fp8-param-gather",
        "weights are quantized from fp32 main weights once a step, each rank its rows with the "
        "scales of whole weights, and gathered as bytes",
    ),
    _supported(
        "fp4_param_gather",
        "--fp4-param-gather",
        "as --fp8-param-gather, with two elements to a byte",
    ),
    _supported(
        "keep_fp8_transpose_cache",
        "--keep-fp8-transpose-cache",
        "with sharded weights, quantized and transposed copies outlive the gathered weights that "
        "they are made of: a whole copy in FP8 on every rank; without, they are made again",
    ),
    _supported(
        "delay_wgrad_compute",
        "--delay-wgrad-compute",
        "with --overlap-moe-expert-parallel-comm, which it needs: a unit is reduced after the "
        "gradients of its weights that are made late",
    ),
    _supported(
        "megatron_fsdp_use_decoupled_grad",
        "--use-precision-aware-optimizer",
        "--exp-avg-dtype, --exp-avg-sq-dtype and --main-grads-dtype take effect, see "
        "[optimizers.md](optimizers.md); param.decoupled_grad is another name of param.grad, "
        "which may be of another dtype than the weight anyway. With --optimizer-cpu-offload the "
        "flag changes nothing",
    ),
    _rejected(
        "megatron_fsdp_cuda_graph_mode",
        "--cuda-graph-impl",
        "gathers are issued from the host",
    ),
    _rejected(
        "megatron_fsdp_enable_fine_grained_param_gather",
        "--megatron-fsdp-enable-fine-grained-param-gather",
        "a unit is gathered as a whole",
    ),
)
"""Every field of `DistributedDataParallelConfig`; a test fails when Megatron adds one."""


@dataclass(frozen=True, slots=True)
class ShardingSettings:
    """`fully_shard` arguments that come from Megatron's configuration.

    Attributes:
        sharding_strategy: The inner axis' strategy.
        outer_sharding_strategy: The outer axis' strategy.
        policy: Dtypes.
        enable_unshard_prefetch: See `fully_shard`.
        unshard_prefetch_numel: Elements of weights gathered ahead at most; None for no limit.
        enable_async_reduce_grad: See `fully_shard`.
        checks_grads_for_nan: Whether reduced gradients are checked.
    """

    sharding_strategy: str
    outer_sharding_strategy: str
    policy: MixedPrecisionPolicy
    enable_unshard_prefetch: bool
    unshard_prefetch_numel: int | None
    enable_async_reduce_grad: bool
    checks_grads_for_nan: bool

    def prefetch_bytes(self, options: Options, params_dtype: torch.dtype) -> int | None:
        """`unshard_prefetch_bytes` of `fully_shard`.

        Args:
            options: Our own options.
            params_dtype: Dtype that weights are gathered in.

        Raises:
            FlagError: Both Megatron's flag and ours say it.
        """
        check_prefetch(self.unshard_prefetch_numel, options.unshard_prefetch_bytes)
        if self.unshard_prefetch_numel is None:
            return options.unshard_prefetch_bytes
        return max(1, self.unshard_prefetch_numel * params_dtype.itemsize)


def reject_fields(source: Any) -> None:
    """Reject by name what cannot be supported.

    Args:
        source: A `DistributedDataParallelConfig`, or Megatron's arguments, whose attributes it is
            made of; attributes that are missing are left to the configuration.

    Raises:
        FlagError: A field has a value that cannot be supported; names its flag.
    """
    for rule in FIELDS:
        names = [name for name in (rule.argument, rule.name) if name and hasattr(source, name)]
        if rule.rejects is None or not names:
            continue
        value = getattr(source, names[0])
        if rule.rejects(value):
            raise FlagError(
                f"{rule.flag} (= {value}) cannot be used with --use-fsdp-fully-shard-api: "
                f"{rule.meaning}"
            )


def notices(source: Any, options: Options) -> list[str]:
    """What to say of fields that ask for something that is done in another way here.

    Args:
        source: A `DistributedDataParallelConfig`, or Megatron's arguments.
        options: Our own options.
    """
    return [
        *_about_double_buffers(source, options),
        *_about_registration(source, options),
        *_about_fp8_copies(source),
    ]


def _about_double_buffers(source: Any, options: Options) -> list[str]:
    asked = [
        rule.flag
        for rule in FIELDS
        if rule.name in ("fsdp_double_buffer", "megatron_fsdp_max_pool_double_buffer")
        and getattr(source, rule.name, False)
    ]
    if not asked:
        return []
    if options.uses_trace_pool:
        how = "--fsdp-trace-pool keeps their memory between steps at fixed addresses"
    else:
        how = "add --fsdp-trace-pool to keep their memory between steps at fixed addresses"
    suggested = getattr(source, "suggested_communication_unit_size", None)
    ahead = f"{(options.unshard_prefetch_depth or 1) + 1} units are"
    if options.unshard_prefetch_bytes is not None or suggested is not None:
        ahead = "one unit and what is gathered ahead of it are"
    return [
        f"{' and '.join(asked)}: beside the root no more than {ahead} gathered and "
        f"{options.max_live_grad_buffers} have full gradient buffers at any time as it is; {how}"
    ]


def _about_registration(source: Any, options: Options) -> list[str]:
    if not getattr(source, "nccl_ub", False) or options.uses_trace_pool:
        return []
    return [
        "--use-nccl-ub: nothing is registered, since gathered weights and gradients are at "
        "changing addresses; add --fsdp-trace-pool to have them at fixed ones"
    ]


def _about_fp8_copies(source: Any) -> list[str]:
    is_sharded = source.data_parallel_sharding_strategy == "optim_grads_params"
    if not is_sharded or quantized_gathers(source) or source.keep_fp8_transpose_cache:
        return []
    return [
        f"--{kind}-format: weights are gathered in bf16, and Transformer Engine may keep them "
        f"quantized from one micro-batch to the next, whole, on every rank; add --{kind}"
        f"-param-gather to gather {share} the bytes and keep nothing"
        for kind, share in (("fp8", "half"), ("fp4", "a quarter of"))
        if getattr(source, kind, None)
    ]


def check_prefetch(suggested: int | None, nbytes: int | None) -> None:
    """See that one flag at most says how much is gathered ahead.

    Args:
        suggested: What Megatron's says.
        nbytes: What ours says.

    Raises:
        FlagError: Both say something.
    """
    if suggested is not None and nbytes is not None:
        raise FlagError(
            "--suggested-communication-unit-size and --fsdp-unshard-prefetch-bytes both say how "
            "much is gathered ahead; leave one of them out"
        )


def check_hybrid(source: Any, expert_strategy: str | None = None) -> None:
    """See that there is something to shard between optimizer instances, if that is asked for.

    Args:
        source: A `DistributedDataParallelConfig`, or Megatron's arguments.
        expert_strategy: Sharding strategy of experts, where it is another one.

    Raises:
        FlagError: There is not; names the flags.
    """
    outer = source.outer_dp_sharding_strategy
    if outer == "no_shard":
        return
    if source.num_distributed_optimizer_instances == 1:
        raise FlagError(
            f"--outer-dp-sharding-strategy {outer} shards between optimizer instances, and there "
            "is one; add --num-distributed-optimizer-instances"
        )
    for flag in _replicated_by(source, expert_strategy):
        raise FlagError(
            f"--outer-dp-sharding-strategy {outer} shards further what {flag} shards, and "
            "no_shard shards nothing; use optim, optim_grads or optim_grads_params"
        )


def check_accumulation(source: Any, expert_strategy: str | None = None) -> None:
    """See that there are reduce-scatters, if these are to add up in fp32.

    Args:
        source: A `DistributedDataParallelConfig`, or Megatron's arguments.
        expert_strategy: Sharding strategy of experts, where it is another one.

    Raises:
        FlagError: There are none; names the flags.
    """
    field = "reduce_scatter_with_fp32_accumulation"
    if not (getattr(source, field, False) or getattr(source, f"ddp_{field}", False)):
        return
    for flag in _replicated_by(source, expert_strategy):
        raise FlagError(
            f"{flag} no_shard all-reduces gradients, and "
            "--ddp-reduce-scatter-with-fp32-accumulation is of reduce-scatters; use optim, "
            "optim_grads or optim_grads_params, or --megatron-fsdp-grad-comm-dtype fp32 instead"
        )


def _replicated_by(source: Any, expert_strategy: str | None) -> list[str]:
    """Flags of the strategies that shard nothing."""
    strategies = {
        "--data-parallel-sharding-strategy": source.data_parallel_sharding_strategy,
        "--expert-data-parallel-sharding-strategy": expert_strategy,
    }
    return [flag for flag, strategy in strategies.items() if strategy == "no_shard"]


def quantized_gathers(source: Any) -> str | None:
    """The flag that has weights gathered as quantized bytes, if one is given.

    Args:
        source: A `DistributedDataParallelConfig`, or Megatron's arguments.
    """
    for name in ("fp8_param_gather", "fp4_param_gather"):
        if getattr(source, name):
            return flag_of(name)
    return None


def check_quantized(source: Any) -> None:
    """See that quantized weights have what they need, if they are asked for.

    Args:
        source: A `DistributedDataParallelConfig`, or Megatron's arguments.

    Raises:
        FlagError: They do not; names the flags.
    """
    flag = quantized_gathers(source)
    if flag is None:
        return
    if getattr(source, "use_cpu_initialization", False):
        raise FlagError(
            f"--use-cpu-initialization cannot be used with {flag}: Megatron draws "
            "values into quantized weights then, and what these keep in higher precision is unset"
        )
    main_weights = source.megatron_fsdp_main_params_dtype
    if main_weights not in ("fp32", torch.float32):
        raise FlagError(
            f"{flag} quantizes main weights, and what the optimizer adds to these is "
            "lost where they are no finer than the weights of the model; use "
            f"--megatron-fsdp-main-params-dtype fp32, not {main_weights or 'auto'}"
        )


def sharding_settings(ddp_config: Any) -> ShardingSettings:
    """Map a `DistributedDataParallelConfig` onto `fully_shard` arguments.

    Raises:
        FlagError: A field has a value that cannot be supported; names its flag.
    """
    reject_fields(ddp_config)
    check_hybrid(ddp_config)
    check_quantized(ddp_config)
    check_accumulation(ddp_config)
    wants_fp32 = ddp_config.grad_reduce_in_fp32
    main_grads = ddp_config.megatron_fsdp_main_grads_dtype
    if main_grads is None and wants_fp32:
        main_grads = torch.float32
    suggested = ddp_config.suggested_communication_unit_size
    ahead = None if suggested is None else max(0, suggested // 2)
    return ShardingSettings(
        sharding_strategy=ddp_config.data_parallel_sharding_strategy,
        outer_sharding_strategy=ddp_config.outer_dp_sharding_strategy,
        policy=MixedPrecisionPolicy(
            main_params_dtype=ddp_config.megatron_fsdp_main_params_dtype,
            main_grads_dtype=main_grads,
            grad_comm_dtype=ddp_config.megatron_fsdp_grad_comm_dtype,
            # Megatron's own wrapper casts what needs casting, and leaves rotary tables in fp32.
            cast_forward_inputs=False,
            reduce_scatter_with_fp32_accumulation=ddp_config.reduce_scatter_with_fp32_accumulation,
        ),
        enable_unshard_prefetch=ddp_config.overlap_param_gather and ahead != 0,
        unshard_prefetch_numel=ahead,
        enable_async_reduce_grad=ddp_config.overlap_grad_reduce,
        checks_grads_for_nan=ddp_config.check_for_nan_in_grad,
    )
