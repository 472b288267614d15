"""What Megatron's configuration means to `fully_shard`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of
from megatron_fsdp_v2_mcore.flags.options import Options
from megatron_fsdp_v2_mcore.flags.table import DDP_FIELDS, Handling

__all__ = [
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
    for rule in DDP_FIELDS:
        names = [name for name in (rule.argument, rule.name) if name and hasattr(source, name)]
        if rule.handling is not Handling.REJECTED or not names:
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
        for rule in DDP_FIELDS
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
