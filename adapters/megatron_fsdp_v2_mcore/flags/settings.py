"""Arguments of `fully_shard` from Megatron's configuration."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fsdp_v2 import MixedPrecisionPolicy, RuntimeOptions
from megatron_fsdp_v2.runtime.api import SMALL_UNIT_BYTES
from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of
from megatron_fsdp_v2_mcore.flags.options import Options
from megatron_fsdp_v2_mcore.flags.table import rejected_by

__all__ = [
    "ShardingSettings",
    "check_accumulation",
    "check_hybrid",
    "check_prefetch",
    "check_quantized",
    "notices",
    "quantized_gathers",
    "reject",
    "sharding_settings",
]


@dataclass(frozen=True, slots=True)
class ShardingSettings:
    """Arguments of `fully_shard` and `plan_units` that come from Megatron's configuration.

    Attributes:
        policy: Mixed-precision policy.
        runtime: Options that all units of a model chunk share.
        unit_bytes: Maximum bytes of parameters of consecutive layers that form one unit.
    """

    policy: MixedPrecisionPolicy
    runtime: RuntimeOptions
    unit_bytes: int


def reject(source: Any, *, ignored: Sequence[str] = ()) -> None:
    """Reject unsupported options by name.

    Args:
        source: Megatron's arguments, or one of the configuration objects built from them.
        ignored: Names of fields that are not checked.

    Raises:
        FlagError: The value of a field is not supported. The message names its flag.
    """
    for flag, value in rejected_by(source):
        if flag.name in ignored:
            continue
        if isinstance(source, argparse.Namespace):
            given = f"{flag.flag} cannot be" if value is True else f"{flag.flag} {value} cannot be"
            raise FlagError(f"{given} used with --use-fsdp-fully-shard-api: {flag.meaning}")
        raise FlagError(
            f"{type(source).__name__}.{flag.name} = {value!r} ({flag.flag}) cannot be used with "
            f"sharded parameters: {flag.meaning}"
        )


def notices(source: Any, options: Options) -> list[str]:
    """Return notices about options that this package implements in a different way.

    Args:
        source: A `DistributedDataParallelConfig`, or Megatron's arguments.
        options: Options of this package.
    """
    return [
        *_about_double_buffers(source, options),
        *_about_registration(source, options),
        *_about_fp8_copies(source),
    ]


def _about_double_buffers(source: Any, options: Options) -> list[str]:
    fields = ("fsdp_double_buffer", "megatron_fsdp_max_pool_double_buffer")
    asked = [flag_of(name) for name in fields if getattr(source, name, False)]
    if not asked:
        return []
    if options.runtime.enable_trace_pool:
        how = "--fsdp-trace-pool keeps their memory at fixed addresses between steps"
    else:
        how = "add --fsdp-trace-pool to keep their memory at fixed addresses between steps"
    suggested = getattr(source, "suggested_communication_unit_size", None)
    runtime = options.runtime
    if suggested is not None:
        runtime = dataclasses.replace(runtime, unshard_prefetch_bytes=max(1, suggested))
    return [f"{' and '.join(asked)}: without the flag, {runtime.live_units}; {how}"]


def _about_registration(source: Any, options: Options) -> list[str]:
    if not getattr(source, "nccl_ub", False) or options.runtime.enable_trace_pool:
        return []
    return [
        "--use-nccl-ub: no memory is registered, since the addresses of gathered weights and "
        "gradients change; add --fsdp-trace-pool for fixed addresses"
    ]


def _about_fp8_copies(source: Any) -> list[str]:
    is_sharded = source.data_parallel_sharding_strategy == "optim_grads_params"
    if not is_sharded or quantized_gathers(source) or source.keep_fp8_transpose_cache:
        return []
    return [
        f"--{kind}-format: weights are gathered in bf16, and Transformer Engine may cache whole "
        f"quantized weights on every rank between micro-batches; add --{kind}"
        f"-param-gather to gather {share} the bytes without this cache"
        for kind, share in (("fp8", "half"), ("fp4", "a quarter of"))
        if getattr(source, kind, None)
    ]


def check_prefetch(suggested: int | None, nbytes: int | None) -> None:
    """Check that at most one flag limits the prefetch.

    Args:
        suggested: Value of Megatron's flag.
        nbytes: Value of this package's flag.

    Raises:
        FlagError: Both flags are given.
    """
    if suggested is not None and nbytes is not None:
        raise FlagError(
            "--suggested-communication-unit-size and --fsdp-unshard-prefetch-bytes both limit the "
            "prefetch; leave one of them out"
        )


def check_hybrid(source: Any, expert_strategy: str | None = None) -> None:
    """Check the flags that an outer sharding strategy needs.

    Args:
        source: A `DistributedDataParallelConfig`, or Megatron's arguments.
        expert_strategy: Sharding strategy of experts, if it differs.

    Raises:
        FlagError: There is only one optimizer instance, or the inner strategy shards nothing. The
            message names the flags.
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
    """Check that gradients are reduce-scattered if fp32 accumulation is requested.

    Args:
        source: A `DistributedDataParallelConfig`, or Megatron's arguments.
        expert_strategy: Sharding strategy of experts, if it differs.

    Raises:
        FlagError: A strategy all-reduces gradients. The message names the flags.
    """
    field = "reduce_scatter_with_fp32_accumulation"
    if not (getattr(source, field, False) or getattr(source, f"ddp_{field}", False)):
        return
    for flag in _replicated_by(source, expert_strategy):
        raise FlagError(
            f"{flag} no_shard all-reduces gradients, and "
            "--ddp-reduce-scatter-with-fp32-accumulation applies to reduce-scatters; use optim, "
            "optim_grads or optim_grads_params, or --megatron-fsdp-grad-comm-dtype fp32 instead"
        )


def _replicated_by(source: Any, expert_strategy: str | None) -> list[str]:
    """Return the flags whose strategy is `no_shard`."""
    strategies = {
        "--data-parallel-sharding-strategy": source.data_parallel_sharding_strategy,
        "--expert-data-parallel-sharding-strategy": expert_strategy,
    }
    return [flag for flag, strategy in strategies.items() if strategy == "no_shard"]


def quantized_gathers(source: Any) -> str | None:
    """Return the flag that enables all-gathers of quantized weights, if one is given.

    Args:
        source: A `DistributedDataParallelConfig`, or Megatron's arguments.
    """
    for name in ("fp8_param_gather", "fp4_param_gather"):
        if getattr(source, name):
            return flag_of(name)
    return None


def check_quantized(source: Any) -> None:
    """Check the options that quantized weights need.

    Args:
        source: A `DistributedDataParallelConfig`, or Megatron's arguments.

    Raises:
        FlagError: An option does not support quantized weights. The message names the flags.
    """
    flag = quantized_gathers(source)
    if flag is None:
        return
    if getattr(source, "use_cpu_initialization", False):
        raise FlagError(
            f"--use-cpu-initialization cannot be used with {flag}: Megatron then initializes the "
            "quantized weights and does not set their high-precision values"
        )
    main_weights = source.megatron_fsdp_main_params_dtype
    if main_weights not in ("fp32", torch.float32):
        raise FlagError(
            f"{flag} quantizes main weights, and updates of the optimizer are "
            "lost if main weights have a low precision; use "
            f"--megatron-fsdp-main-params-dtype fp32, not {main_weights or 'auto'}"
        )


def sharding_settings(
    ddp_config: Any, options: Options, params_dtype: torch.dtype, gathered_dtype: torch.dtype
) -> ShardingSettings:
    """Map a `DistributedDataParallelConfig` and the options of this package to `fully_shard`'s.

    Args:
        ddp_config: The configuration.
        options: Options of this package.
        params_dtype: Dtype of the parameters.
        gathered_dtype: Dtype of the elements of most gathered weights.

    Raises:
        FlagError: The value of a field is not supported, or Megatron's flag and this package's flag
            both limit the prefetch. The message names the flag.
    """
    reject(ddp_config)
    check_hybrid(ddp_config)
    check_quantized(ddp_config)
    check_accumulation(ddp_config)
    suggested, runtime = ddp_config.suggested_communication_unit_size, options.runtime
    check_prefetch(suggested, runtime.unshard_prefetch_bytes)
    unit_bytes, prefetches = options.unit_bytes, ddp_config.overlap_param_gather
    if suggested is not None:
        ahead = max(0, suggested // 2)
        prefetches = prefetches and ahead != 0
        prefetch_bytes = max(1, ahead * gathered_dtype.itemsize)
        runtime = dataclasses.replace(runtime, unshard_prefetch_bytes=prefetch_bytes)
        unit_bytes = unit_bytes or max(1, suggested * params_dtype.itemsize)
    main_grads = ddp_config.megatron_fsdp_main_grads_dtype
    if main_grads is None and ddp_config.grad_reduce_in_fp32:
        main_grads = torch.float32
    return ShardingSettings(
        policy=MixedPrecisionPolicy(
            main_params_dtype=ddp_config.megatron_fsdp_main_params_dtype,
            main_grads_dtype=main_grads,
            grad_comm_dtype=ddp_config.megatron_fsdp_grad_comm_dtype,
            # Megatron's Float16Module casts inputs; rotary embeddings stay in fp32.
            cast_forward_inputs=False,
            reduce_scatter_with_fp32_accumulation=ddp_config.reduce_scatter_with_fp32_accumulation,
        ),
        runtime=dataclasses.replace(
            runtime,
            enable_unshard_prefetch=prefetches,
            enable_async_reduce_grad=ddp_config.overlap_grad_reduce,
        ),
        unit_bytes=unit_bytes or SMALL_UNIT_BYTES,
    )
