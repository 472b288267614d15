"""Dtypes of gradients and of an optimizer's state: what can step what."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from megatron_fsdp_v2_mcore.flags.errors import optimizer_field
from megatron_fsdp_v2_mcore.flags.precision import precision_problem
from megatron_fsdp_v2_mcore.optim.scaled_states import reads_any_gradient

__all__ = ["check_gradients", "check_precision", "clipping_any", "over_main_weights"]


def check_precision(config: Any, params: Iterable[torch.Tensor]) -> None:
    """Check what an `OptimizerConfig` says of dtypes, where no command line was checked before.

    Args:
        config: Megatron's `OptimizerConfig`.
        params: Sharded parameters.

    Raises:
        ValueError: It cannot be; names the field.
    """
    problem = precision_problem(
        config,
        optimizer_field,
        "DistributedDataParallelConfig.megatron_fsdp_main_params_dtype",
    )
    if problem:
        raise ValueError(problem)
    wanted = config.main_grads_dtype
    others = {str(param.grad_dtype) for param in params if param.grad_dtype != wanted}
    if wanted != torch.float32 and others:
        raise ValueError(
            f"OptimizerConfig.main_grads_dtype = {wanted}, and gradients of sharded parameters are "
            f"in {', '.join(sorted(others))}: "
            "DistributedDataParallelConfig.megatron_fsdp_main_grads_dtype says in which; set it to "
            "the same"
        )


def over_main_weights(config: Any) -> Any:
    """A configuration with which Megatron's factory makes no main weights beside the parameters.

    It asks Transformer Engine's `FusedAdam` for some wherever state may be of other dtypes. Sharded
    parameters are main weights.
    """
    if not config.use_precision_aware_optimizer:
        return config
    own = copy.copy(config)
    own.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False
    return own


def clipping_any(config: Any, params: Iterable[torch.Tensor]) -> Any:
    """A configuration with which Megatron clips gradients of the dtypes that there are.

    It takes those of `param.grad` for fp32, and clips what it finds as `param.decoupled_grad`, here
    another name of the same, in bf16 too.

    Args:
        config: Megatron's `OptimizerConfig`; returned as it is where all gradients are fp32.
        params: Sharded parameters.

    Raises:
        ValueError: Gradients are of a dtype that Megatron does not clip, and it is to.
    """
    dtypes = {param.grad_dtype for param in params if param.requires_grad} - {torch.float32}
    if not dtypes:
        return config
    if config.clip_grad > 0 and not dtypes <= {torch.bfloat16}:
        raise ValueError(
            f"--clip-grad {config.clip_grad} cannot be used with gradients in "
            f"{', '.join(sorted(map(_word, dtypes)))}: Megatron clips fp32 and bf16; give "
            "--clip-grad 0, or --megatron-fsdp-main-grads-dtype fp32 or bf16"
        )
    own = copy.copy(config)
    own.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    return own


def check_gradients(optimizer: torch.optim.Optimizer, params: Iterable[torch.Tensor]) -> None:
    """Check that an optimizer can step parameters with gradients in the dtypes they are in.

    Raises:
        ValueError: It cannot; names the flags.
    """
    if reads_any_gradient(optimizer):
        return
    for param in params:
        if param.grad_dtype != param.dtype:
            cls = type(optimizer)
            raise ValueError(
                f"{cls.__module__}.{cls.__qualname__} cannot step main weights in "
                f"{_word(param.dtype)} with gradients in {_word(param.grad_dtype)}: only "
                "Transformer Engine's FusedAdam can; add --megatron-fsdp-main-grads-dtype "
                f"{_short(param.dtype)}, or --megatron-fsdp-main-params-dtype "
                f"{_short(param.grad_dtype)}"
            )


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _short(dtype: Any) -> str:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(dtype, _word(dtype))
