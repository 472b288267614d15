"""Flags for the device and the dtypes of an optimizer's state.

These are `--optimizer-cpu-offload` and `--use-precision-aware-optimizer` with their options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of

DTYPE_OPTIONS = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Options of `--use-precision-aware-optimizer`."""

PRECISION_AWARE = "use_precision_aware_optimizer"
FP32 = ("fp32", torch.float32)
_MAIN_PARAMS = "main_params_dtype"
_MAIN_GRADS = "main_grads_dtype"
_OUR_MAIN_GRADS = "megatron_fsdp_main_grads_dtype"
_OUR_DEFAULTS = ("auto", None)


def offloads(args: Any) -> bool:
    """Whether Megatron's arguments enable offloading of the optimizer to the host."""
    return bool(getattr(args, "optimizer_cpu_offload", False))


def check_optimizer_flags(args: Any) -> None:
    """Check that the optimizer supports the requested device and dtypes of its state.

    Args:
        args: Megatron's arguments, before Megatron validates them.

    Raises:
        FlagError: A combination is not supported. The message names the flags.
    """

    def describe(name: str, value: Any) -> str:
        return flag_of(name) if value is True else f"{flag_of(name)} {dtype_name(value)}"

    problem = optimizer_problem(args, describe, "--megatron-fsdp-main-params-dtype")
    ours, requested = getattr(args, _OUR_MAIN_GRADS), getattr(args, _MAIN_GRADS)
    if not problem and requested not in FP32 and ours not in (requested, *_OUR_DEFAULTS):
        problem = (
            f"{describe(_MAIN_GRADS, requested)} and {describe(_OUR_MAIN_GRADS, ours)} set "
            "different dtypes of the same gradients; leave one of them out"
        )
    if problem:
        raise FlagError(problem)


def optimizer_problem(source: Any, describe: Callable[[str, Any], str], option: str) -> str | None:
    """Return the reason why an optimizer cannot have the requested device and dtypes, or None.

    Args:
        source: Megatron's arguments, or its `OptimizerConfig`.
        describe: Function that formats a field and its value for a message.
        option: Name of the option that sets the dtype of main weights.
    """
    fraction = source.optimizer_offload_fraction
    if not 0.0 <= fraction <= 1.0:
        return (
            f"{describe('optimizer_offload_fraction', fraction)} is out of range; pass a number "
            "from 0 (no state is offloaded) to 1 (all state is offloaded)"
        )
    requested = {name: getattr(source, name, torch.float32) for name in DTYPE_OPTIONS}
    others = [describe(name, value) for name, value in requested.items() if value not in FP32]
    if offloads(source):
        # With offload, `use_precision_aware_optimizer` only satisfies Megatron's validation.
        switch = describe("optimizer_cpu_offload", True)
        is_muon = source.optimizer in ("muon", "adaptive_muon")
        name = "muon_scalar_optimizer" if is_muon else "optimizer"
        chosen = getattr(source, name)
        if chosen == "lion":
            return (
                f"{describe(name, chosen)} cannot be used with {switch}: no optimizer on the CPU "
                "computes the same step; use adam, or leave it out"
            )
        if others:
            return (
                f"{others[0]} cannot be used with {switch}: Adam on the CPU keeps its state in the "
                "dtype of the main weights, which --megatron-fsdp-main-params-dtype sets; leave it "
                "out"
            )
        return None
    if not getattr(source, PRECISION_AWARE, False):
        switch = describe(PRECISION_AWARE, True)
        return f"{others[0]} needs {switch}; add it, or leave both out" if others else None
    if source.optimizer != "adam":
        return (
            f"{describe(PRECISION_AWARE, True)} cannot be used with "
            f"{describe('optimizer', source.optimizer)}: only Transformer Engine's FusedAdam keeps "
            "its state in other dtypes; use adam, or leave it out"
        )
    if requested[_MAIN_PARAMS] not in FP32:
        return (
            f"{describe(_MAIN_PARAMS, requested[_MAIN_PARAMS])} requests separate main weights in "
            "the optimizer, but the sharded parameters are the main weights; leave it out "
            f"({option} sets their dtype)"
        )
    return None


def is_precision_aware(args: Any) -> bool:
    """Whether Adam's state has its own dtypes. With offload the flag has no effect."""
    return bool(getattr(args, PRECISION_AWARE, False)) and not offloads(args)


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
"""Names of dtypes on the command line."""


def dtype_of(name: Any) -> torch.dtype | None:
    """Return the dtype of a name on the command line; `torch.uint8` for fp8."""
    return name if isinstance(name, torch.dtype) else _DTYPES.get(name)


def state_dtypes(args: Any) -> tuple[torch.dtype, ...]:
    """Return the dtypes of Adam's two moments."""
    found = (dtype_of(args.exp_avg_dtype), dtype_of(args.exp_avg_sq_dtype))
    return tuple(dtype for dtype in found if dtype is not None)


def check_has_fused_adam(args: Any) -> None:
    """Check that the Adam that Megatron uses supports the dtypes of the command line.

    Raises:
        FlagError: Megatron uses the Adam of torch or apex.
    """
    if not getattr(args, PRECISION_AWARE, False):
        return
    from megatron.core.optimizer import Adam

    if "exp_avg_dtype" not in inspect.signature(Adam).parameters:
        raise FlagError(
            f"{flag_of(PRECISION_AWARE)} needs Transformer Engine's FusedAdam, and Megatron uses "
            f"{Adam.__module__}.{Adam.__qualname__}; install Transformer Engine, or leave it out"
        )


def apply_main_grads_dtype(args: Any) -> None:
    """Apply `--main-grads-dtype` to the gradients of sharded parameters.

    Megatron's own wrapper reads another flag for this dtype and ignores `--main-grads-dtype`.
    """
    requested = getattr(args, _MAIN_GRADS, torch.float32)
    if requested not in FP32 and getattr(args, _OUR_MAIN_GRADS) in _OUR_DEFAULTS:
        setattr(args, _OUR_MAIN_GRADS, requested)


def dtype_name(value: Any) -> str:
    """Return the name of a dtype on the command line."""
    return next((name for name, dtype in _DTYPES.items() if dtype is value), str(value))
