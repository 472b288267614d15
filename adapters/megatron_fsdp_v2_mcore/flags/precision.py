"""Flags for the device and the dtypes of an optimizer's state.

These are `--optimizer-cpu-offload` and `--use-precision-aware-optimizer` with their options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of

__all__ = [
    "DTYPES",
    "apply_main_grads_dtype",
    "check_has_fused_adam",
    "check_optimizer_flags",
    "dtype_of",
    "is_precision_aware",
    "offload_problem",
    "offloads",
    "precision_problem",
    "state_dtypes",
    "word_of",
]

DTYPES = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Options of `--use-precision-aware-optimizer`."""

SWITCH = "use_precision_aware_optimizer"
FULL = ("fp32", torch.float32)
_MAIN_PARAMS = "main_params_dtype"
_MAIN_GRADS = "main_grads_dtype"
_OUR_MAIN_GRADS = "megatron_fsdp_main_grads_dtype"
_OUR_AUTO = ("auto", None)


def offloads(args: Any) -> bool:
    """Whether Megatron's arguments enable the offload of the optimizer to the host."""
    return bool(getattr(args, "optimizer_cpu_offload", False))


def check_optimizer_flags(args: Any) -> None:
    """Check that the optimizer supports the requested device and dtypes of its state.

    Args:
        args: Megatron's arguments, before Megatron validates them.

    Raises:
        FlagError: A combination is not supported. The message names the flags.
    """

    def said(name: str, value: Any) -> str:
        return flag_of(name) if value is True else f"{flag_of(name)} {word_of(value)}"

    problem = offload_problem(args, said) or precision_problem(
        args, said, "--megatron-fsdp-main-params-dtype"
    )
    ours, asked = getattr(args, _OUR_MAIN_GRADS), getattr(args, _MAIN_GRADS)
    if not problem and asked not in FULL and ours not in (asked, *_OUR_AUTO):
        problem = (
            f"{said(_MAIN_GRADS, asked)} and {said(_OUR_MAIN_GRADS, ours)} set different dtypes of "
            "the same gradients; leave one of them out"
        )
    if problem:
        raise FlagError(problem)


def offload_problem(source: Any, said: Callable[[str, Any], str]) -> str | None:
    """Return the reason why an optimizer cannot be offloaded with its options, or None.

    Args:
        source: Megatron's arguments, or its `OptimizerConfig`.
        said: Function that formats a field and its value for a message.
    """
    fraction = source.optimizer_offload_fraction
    if not 0.0 <= fraction <= 1.0:
        return (
            f"{said('optimizer_offload_fraction', fraction)} is out of range; pass a number from 0 "
            "(no state is offloaded) to 1 (all state is offloaded)"
        )
    if not offloads(source):
        return None
    switch = said("optimizer_cpu_offload", True)
    is_muon = source.optimizer in ("muon", "adaptive_muon")
    name = "muon_scalar_optimizer" if is_muon else "optimizer"
    chosen = getattr(source, name)
    if chosen == "lion":
        return (
            f"{said(name, chosen)} cannot be used with {switch}: no optimizer on the CPU "
            "computes the same step; use adam, or leave it out"
        )
    for name in DTYPES:
        value = getattr(source, name, torch.float32)
        if value not in FULL:
            return (
                f"{said(name, value)} cannot be used with {switch}: Adam on the CPU keeps its "
                "state in the dtype of the main weights, which --megatron-fsdp-main-params-dtype "
                "sets; leave it out"
            )
    return None


def precision_problem(source: Any, said: Callable[[str, Any], str], of_ours: str) -> str | None:
    """Return the reason why Adam's state cannot have the requested dtypes, or None.

    Args:
        source: Megatron's arguments, or its `OptimizerConfig`.
        said: Function that formats a field and its value for a message.
        of_ours: Name of the option that sets the dtype of main weights.
    """
    if offloads(source):
        # With offload the flag only satisfies Megatron's validation; `offload_problem` checks
        # dtypes.
        return None
    if not getattr(source, SWITCH, False):
        for name in DTYPES:
            value = getattr(source, name, torch.float32)
            if value not in FULL:
                return f"{said(name, value)} needs {said(SWITCH, True)}; add it, or leave both out"
        return None
    if source.optimizer != "adam":
        return (
            f"{said(SWITCH, True)} cannot be used with {said('optimizer', source.optimizer)}: only "
            "Transformer Engine's FusedAdam keeps its state in other dtypes; use adam, or leave it "
            "out"
        )
    main_params = getattr(source, _MAIN_PARAMS)
    if main_params not in FULL:
        return (
            f"{said(_MAIN_PARAMS, main_params)} requests separate main weights in the optimizer, "
            f"but the sharded parameters are the main weights; leave it out ({of_ours} sets their "
            "dtype)"
        )
    return None


def is_precision_aware(args: Any) -> bool:
    """Whether Adam's state has its own dtypes. With offload the flag has no effect."""
    return bool(getattr(args, SWITCH, False)) and not offloads(args)


_WORDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
"""Names of dtypes on the command line."""


def dtype_of(word: Any) -> torch.dtype | None:
    """Return the dtype of a name on the command line; `torch.uint8` for fp8."""
    return word if isinstance(word, torch.dtype) else _WORDS.get(word)


def state_dtypes(args: Any) -> tuple[torch.dtype, ...]:
    """Return the dtypes of Adam's two moments."""
    found = (dtype_of(args.exp_avg_dtype), dtype_of(args.exp_avg_sq_dtype))
    return tuple(dtype for dtype in found if dtype is not None)


def check_has_fused_adam(args: Any) -> None:
    """Check that the Adam that Megatron uses supports the dtypes of the command line.

    Raises:
        FlagError: Megatron uses the Adam of torch or apex.
    """
    if not getattr(args, SWITCH, False):
        return
    from megatron.core.optimizer import Adam

    if "exp_avg_dtype" not in inspect.signature(Adam).parameters:
        raise FlagError(
            f"{flag_of(SWITCH)} needs Transformer Engine's FusedAdam, and Megatron uses "
            f"{Adam.__module__}.{Adam.__qualname__}; install Transformer Engine, or leave it out"
        )


def apply_main_grads_dtype(args: Any) -> None:
    """Apply `--main-grads-dtype` to the gradients of sharded parameters.

    Megatron's own wrapper reads another flag for this dtype and ignores `--main-grads-dtype`.
    """
    asked = getattr(args, _MAIN_GRADS, torch.float32)
    if asked not in FULL and getattr(args, _OUR_MAIN_GRADS) in _OUR_AUTO:
        setattr(args, _OUR_MAIN_GRADS, asked)


def word_of(value: Any) -> str:
    """Return the name of a dtype on the command line."""
    return next((word for word, dtype in _WORDS.items() if dtype is value), str(value))
