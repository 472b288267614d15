"""Arguments of `fully_shard` from Megatron's configuration."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fsdp_v2 import MixedPrecisionPolicy, RuntimeOptions
from megatron_fsdp_v2.runtime.api import SMALL_UNIT_BYTES
from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of
from megatron_fsdp_v2_mcore.flags.options import Options
from megatron_fsdp_v2_mcore.flags.table import rejected_by


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


def notices(source: Any, options: Options) -> Iterator[str]:
    """Yield notices about options that this package implements in a different way.

    Args:
        source: A `DistributedDataParallelConfig`, or Megatron's arguments.
        options: Options of this package.
    """
    has_pool = options.runtime.enable_trace_pool
    fields = ("fsdp_double_buffer", "megatron_fsdp_max_pool_double_buffer")
    flags = [flag_of(name) for name in fields if getattr(source, name, False)]
    if flags:
        how = "--fsdp-trace-pool keeps" if has_pool else "add --fsdp-trace-pool to keep"
        runtime = options.runtime
        gathered = f"{(runtime.unshard_prefetch_depth or 1) + 1} units are"
        has_bytes = getattr(source, "suggested_communication_unit_size", None) is not None
        if has_bytes or runtime.unshard_prefetch_bytes is not None:
            gathered = "one unit and its prefetched successors are"
        yield (
            f"{' and '.join(flags)}: without the flag, apart from the root, at most {gathered} "
            f"gathered and {runtime.max_live_grad_buffers} have full gradient buffers at any time; "
            f"{how} their memory at fixed addresses between steps"
        )
    if getattr(source, "nccl_ub", False) and not has_pool:
        yield (
            "--use-nccl-ub: no memory is registered, since the addresses of gathered weights and "
            "gradients change; add --fsdp-trace-pool for fixed addresses"
        )
    is_sharded = source.data_parallel_sharding_strategy == "optim_grads_params"
    if not is_sharded or _quantized_gather_flag(source) or source.keep_fp8_transpose_cache:
        return
    for kind, share in (("fp8", "half"), ("fp4", "a quarter of")):
        if getattr(source, kind, None):
            yield (
                f"--{kind}-format: weights are gathered in bf16, and Transformer Engine may cache "
                "whole quantized weights on every rank between micro-batches; add "
                f"--{kind}-param-gather to gather {share} the bytes without this cache"
            )


def check_sharding(source: Any, expert_strategy: str | None, prefetch_bytes: int | None) -> None:
    """Check the combination of options that shard parameters.

    Args:
        source: A `DistributedDataParallelConfig`, or Megatron's arguments.
        expert_strategy: Sharding strategy of expert parameters; None for that of dense parameters.
        prefetch_bytes: Limit of the prefetch that a flag of this package sets, if any.

    Raises:
        FlagError: Options cannot be combined. The message names the flags.
    """
    replicated = [
        flag
        for flag, strategy in (
            ("--data-parallel-sharding-strategy", source.data_parallel_sharding_strategy),
            ("--expert-data-parallel-sharding-strategy", expert_strategy),
        )
        if strategy == "no_shard"
    ]
    outer = source.outer_dp_sharding_strategy
    if outer != "no_shard" and source.num_distributed_optimizer_instances == 1:
        raise FlagError(
            f"--outer-dp-sharding-strategy {outer} shards between optimizer instances, and there "
            "is one; add --num-distributed-optimizer-instances"
        )
    if outer != "no_shard" and replicated:
        raise FlagError(
            f"--outer-dp-sharding-strategy {outer} needs a sharded optimizer on the inner axis, "
            f"and {replicated[0]} is no_shard; use optim, optim_grads or optim_grads_params"
        )
    names = [f"{prefix}reduce_scatter_with_fp32_accumulation" for prefix in ("", "ddp_")]
    if replicated and any(getattr(source, name, False) for name in names):
        raise FlagError(
            f"{replicated[0]} no_shard all-reduces gradients, and "
            "--ddp-reduce-scatter-with-fp32-accumulation applies to reduce-scatters; use optim, "
            "optim_grads or optim_grads_params, or --megatron-fsdp-grad-comm-dtype fp32 instead"
        )
    if source.suggested_communication_unit_size is not None and prefetch_bytes is not None:
        raise FlagError(
            "--suggested-communication-unit-size and --fsdp-unshard-prefetch-bytes both limit the "
            "prefetch; leave one of them out"
        )
    flag = _quantized_gather_flag(source)
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


def _quantized_gather_flag(source: Any) -> str | None:
    """Return the flag that enables all-gathers of quantized weights, if one is given."""
    for name in ("fp8_param_gather", "fp4_param_gather"):
        if getattr(source, name):
            return flag_of(name)
    return None


def sharding_settings(
    ddp_config: Any, options: Options, params_dtype: torch.dtype, gathered_dtype: torch.dtype
) -> ShardingSettings:
    """Convert Megatron's data-parallel configuration and our options to `fully_shard` arguments.

    Args:
        ddp_config: A `DistributedDataParallelConfig`.
        options: Options of this package.
        params_dtype: Dtype of the parameters.
        gathered_dtype: Dtype of the elements of most gathered weights.

    Raises:
        FlagError: The value of a field is not supported, or Megatron's flag and this package's flag
            both limit the prefetch. The message names the flag.
    """
    reject(ddp_config)
    suggested, runtime = ddp_config.suggested_communication_unit_size, options.runtime
    check_sharding(ddp_config, options.expert_strategy, runtime.unshard_prefetch_bytes)
    unit_bytes, prefetches = options.unit_bytes, ddp_config.overlap_param_gather
    if suggested is not None:
        prefetch_numel = max(0, suggested // 2)
        prefetches = prefetches and prefetch_numel != 0
        prefetch_bytes = max(1, prefetch_numel * gathered_dtype.itemsize)
        runtime = dataclasses.replace(runtime, unshard_prefetch_bytes=prefetch_bytes)
        unit_bytes = unit_bytes or max(1, suggested * params_dtype.itemsize)
    main_grads = ddp_config.megatron_fsdp_main_grads_dtype
    grad_comm = ddp_config.megatron_fsdp_grad_comm_dtype
    if main_grads is None:
        if ddp_config.grad_reduce_in_fp32:
            main_grads = torch.float32
        else:
            # Main gradients keep the dtype of the main weights, which the optimizer reads.
            grad_comm = grad_comm or params_dtype
    return ShardingSettings(
        policy=MixedPrecisionPolicy(
            main_params_dtype=ddp_config.megatron_fsdp_main_params_dtype,
            main_grads_dtype=main_grads,
            grad_comm_dtype=grad_comm,
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
