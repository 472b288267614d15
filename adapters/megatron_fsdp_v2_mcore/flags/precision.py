"""Flags of an Adam that keeps its state in other dtypes (`--use-precision-aware-optimizer`)."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of
from megatron_fsdp_v2_mcore.flags.offload import DTYPES, offloads

__all__ = [
    "check_has_fused_adam",
    "check_precision_flags",
    "dtype_of",
    "is_precision_aware",
    "precision_problem",
    "state_dtypes",
    "with_main_grads",
]

SWITCH = "use_precision_aware_optimizer"
FULL = ("fp32", torch.float32)
_MAIN_PARAMS = "main_params_dtype"
_MAIN_GRADS = "main_grads_dtype"
_OUR_MAIN_GRADS = "megatron_fsdp_main_grads_dtype"
_OUR_AUTO = ("auto", None)


def check_precision_flags(args: Any) -> None:
    """Check that an optimizer can keep its state as the command line says.

    Args:
        args: Megatron's arguments, before Megatron validates them.

    Raises:
        FlagError: It cannot; names the flags.
    """
    problem = precision_problem(
        args,
        lambda name, value: flag_of(name) if value is True else f"{flag_of(name)} {_word(value)}",
        "--megatron-fsdp-main-params-dtype",
    )
    ours, asked = getattr(args, _OUR_MAIN_GRADS), getattr(args, _MAIN_GRADS)
    if not problem and asked not in FULL and ours not in (asked, *_OUR_AUTO):
        problem = (
            f"{flag_of(_MAIN_GRADS)} {_word(asked)} and {flag_of(_OUR_MAIN_GRADS)} {_word(ours)} "
            "say different dtypes of the same gradients; leave one of them out"
        )
    if problem:
        raise FlagError(problem)


def precision_problem(source: Any, said: Callable[[str, Any], str], of_ours: str) -> str | None:
    """What keeps Adam's state from being of the dtypes that are asked for; None for nothing.

    Args:
        source: Megatron's arguments, or its `OptimizerConfig`.
        said: How a field and its value are written where they were given.
        of_ours: What says the dtype of main weights there.
    """
    if offloads(source):
        # The flag only has Megatron's validation pass, and dtypes are checked with offload.
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
            f"{said(_MAIN_PARAMS, main_params)} asks the optimizer for main weights of its own, "
            f"and the sharded parameters are main weights; leave it out ({of_ours} says their "
            "dtype)"
        )
    return None


def is_precision_aware(args: Any) -> bool:
    """Whether Adam keeps its state in dtypes of its own: with offload the flag changes nothing."""
    return bool(getattr(args, SWITCH, False)) and not offloads(args)


def dtype_of(word: Any) -> torch.dtype | None:
    """The dtype that a word on the command line means; of fp8 the one of its bytes."""
    words = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return word if isinstance(word, torch.dtype) else {**words, "fp8": torch.uint8}.get(word)


def state_dtypes(args: Any) -> tuple[torch.dtype, ...]:
    """Dtypes of Adam's two moments."""
    found = (dtype_of(args.exp_avg_dtype), dtype_of(args.exp_avg_sq_dtype))
    return tuple(dtype for dtype in found if dtype is not None)


def check_has_fused_adam(args: Any) -> None:
    """Check that the Adam that Megatron found keeps its state as the command line says.

    Raises:
        FlagError: It is torch's or apex's.
    """
    if not getattr(args, SWITCH, False):
        return
    from megatron.core.optimizer import Adam

    if "exp_avg_dtype" not in inspect.signature(Adam).parameters:
        raise FlagError(
            f"{flag_of(SWITCH)} needs Transformer Engine's FusedAdam, and Megatron found "
            f"{Adam.__module__}.{Adam.__qualname__}; install Transformer Engine, or leave it out"
        )


@contextlib.contextmanager
def with_main_grads(args: Any) -> Iterator[None]:
    """Have `--main-grads-dtype` mean the gradients that the optimizer reads here.

    Megatron's own wrapper has another flag for them, and forgets this one.
    """
    asked = getattr(args, _MAIN_GRADS, torch.float32)
    if asked not in FULL and getattr(args, _OUR_MAIN_GRADS) in _OUR_AUTO:
        setattr(args, _OUR_MAIN_GRADS, asked)
    yield


def _word(value: Any) -> str:
    return str(value).removeprefix("torch.")
