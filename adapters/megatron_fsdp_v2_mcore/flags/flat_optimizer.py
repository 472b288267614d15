"""`--fsdp-flat-optimizer`: which optimizers of Megatron's can step flat tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of

__all__ = ["check_flat_optimizer", "flat_optimizer_problem"]

_UNFIT: tuple[tuple[str, Any, str], ...] = (
    ("optimizer", "adam", "only Adam is known to compute every element from that element alone"),
    ("optimizer_cpu_offload", False, "an optimizer of two devices copies every parameter"),
    (
        "use_precision_aware_optimizer",
        False,
        "state in other dtypes than fp32 has scales of every parameter",
    ),
)
"""Fields of `OptimizerConfig`, what they have to be, and why."""


def flat_optimizer_problem(source: Any, said: Callable[[str, Any], str]) -> str | None:
    """What keeps an optimizer from stepping flat tensors; None for nothing.

    Args:
        source: Megatron's arguments or its `OptimizerConfig`.
        said: Writes a field and its value as the user gave it.
    """
    for name, needed, reason in _UNFIT:
        value = getattr(source, name)
        if value != needed:
            return f"cannot be used with {said(name, value)}: {reason}"
    return None


def check_flat_optimizer(args: Any) -> None:
    """Check that the optimizer of a command line can step flat tensors, if it is to.

    Raises:
        FlagError: It cannot; names the flags.
    """
    if not args.fsdp_flat_optimizer:
        return
    problem = flat_optimizer_problem(args, _flag)
    if problem:
        raise FlagError(f"--fsdp-flat-optimizer {problem}")


def _flag(name: str, value: Any) -> str:
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"
