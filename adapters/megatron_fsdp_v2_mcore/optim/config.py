"""Validation of Megatron's `OptimizerConfig` and optimizers, and adjusted copies of the config.

The package `flags` validates a command line earlier. A script that uses only `megatron.core` builds
its configuration without these checks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from megatron_fsdp_v2_mcore.flags.errors import FlagError, optimizer_field
from megatron_fsdp_v2_mcore.flags.precision import dtype_name, optimizer_problem
from megatron_fsdp_v2_mcore.optim.optimizer_state import supports_any_grad_dtype


def check_config(config: Any, params: Iterable[torch.Tensor]) -> None:
    """Check that the optimizer of a configuration supports sharded parameters.

    Args:
        config: Megatron's `OptimizerConfig`.
        params: Sharded parameters.

    Raises:
        ValueError: An option is not supported. The message names the field.
    """
    option = "DistributedDataParallelConfig.megatron_fsdp_main_params_dtype"
    problem = optimizer_problem(config, optimizer_field, option)
    if problem:
        raise ValueError(problem)
    wanted = config.main_grads_dtype
    others = {str(param.grad_dtype) for param in params if param.grad_dtype != wanted}
    if wanted != torch.float32 and others:
        raise ValueError(
            f"OptimizerConfig.main_grads_dtype = {wanted}, and gradients of sharded parameters are "
            f"in {', '.join(sorted(others))}; set "
            "DistributedDataParallelConfig.megatron_fsdp_main_grads_dtype to the same dtype"
        )


def factory_config(config: Any) -> Any:
    """Return a configuration with which Megatron's factory builds an optimizer of main weights.

    The copy disables `use_precision_aware_optimizer_no_fp8_or_ds_fp8`, which would make Transformer
    Engine's `FusedAdam` keep separate main weights. With offload, the built optimizer is only the
    template of `ShardedHybridOptimizer`; the copy then disables offload and the precision-aware
    optimizer too.
    """
    adjusted = copy.copy(config)
    adjusted.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False
    if config.optimizer_cpu_offload:
        adjusted.optimizer_cpu_offload = adjusted.use_precision_aware_optimizer = False
    return adjusted


def clipping_config(config: Any, params: Iterable[torch.Tensor]) -> Any:
    """Return a configuration with which Megatron clips gradients in their dtype.

    Megatron clips `param.grad` only in fp32, but clips `param.decoupled_grad` in bf16 too. For
    sharded parameters, `decoupled_grad` is an alias of `grad`.

    Args:
        config: Megatron's `OptimizerConfig`. It is returned unchanged if all gradients are fp32.
        params: Sharded parameters.

    Raises:
        FlagError: Clipping is enabled and Megatron does not clip gradients of this dtype.
    """
    dtypes = {param.grad_dtype for param in params if param.requires_grad} - {torch.float32}
    if not dtypes:
        return config
    if config.clip_grad > 0 and not dtypes <= {torch.bfloat16}:
        raise FlagError(
            f"--clip-grad {config.clip_grad} cannot be used with gradients in "
            f"{', '.join(sorted(map(dtype_name, dtypes)))}: Megatron clips fp32 and bf16; give "
            "--clip-grad 0, or --megatron-fsdp-main-grads-dtype fp32 or bf16"
        )
    adjusted = copy.copy(config)
    adjusted.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    return adjusted


def check_gradients(optimizer: torch.optim.Optimizer, params: Iterable[torch.Tensor]) -> None:
    """Check that an optimizer supports the dtypes of the parameters' gradients.

    Raises:
        FlagError: The optimizer does not support a dtype. The message names the flags.
    """
    if supports_any_grad_dtype(optimizer):
        return
    for param in params:
        if param.grad_dtype != param.dtype:
            cls = type(optimizer)
            raise FlagError(
                f"{cls.__module__}.{cls.__qualname__} cannot step main weights in "
                f"{dtype_name(param.dtype)} with gradients in {dtype_name(param.grad_dtype)}: only "
                "Transformer Engine's FusedAdam can; add --megatron-fsdp-main-grads-dtype "
                f"{dtype_name(param.dtype)}, or --megatron-fsdp-main-params-dtype "
                f"{dtype_name(param.grad_dtype)}"
            )
