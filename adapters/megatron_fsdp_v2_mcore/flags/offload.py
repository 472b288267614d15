"""Flags of optimizers that are stepped on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_fsdp_v2_mcore.flags.errors import FlagError, flag_of

__all__ = [
    "NO_TWIN",
    "as_precision_aware",
    "check_offload_flags",
    "offload_problem",
    "offloads",
]

MUON = ("muon", "adaptive_muon")
"""Optimizers of matrices, which leave other parameters to Adam or Lion."""

DTYPES = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Options of `--use-precision-aware-optimizer`."""

NO_TWIN = "there is no optimizer on the CPU that computes the same"
ONE_DTYPE = (
    "the Adam of the CPU keeps its state in the dtype of the main weights, which "
    "--megatron-fsdp-main-params-dtype says"
)


def offloads(args: Any) -> bool:
    """Whether Megatron's arguments ask for an optimizer on the host."""
    return bool(getattr(args, "optimizer_cpu_offload", False))


def check_offload_flags(args: Any) -> None:
    """Check that an optimizer can be offloaded as the command line says.

    Args:
        args: Megatron's arguments, before Megatron validates them.

    Raises:
        FlagError: It cannot; names the flags.
    """
    problem = offload_problem(
        args, lambda name, value: f"{flag_of(name)} {value}", "--optimizer-cpu-offload"
    )
    if problem:
        raise FlagError(problem)


def offload_problem(source: Any, said: Callable[[str, Any], str], switch: str) -> str | None:
    """What keeps an optimizer from being offloaded as its options say; None for nothing.

    Args:
        source: Megatron's arguments, or its `OptimizerConfig`.
        said: How a field and its value are written where they were given.
        switch: What asks for offload there.
    """
    fraction = source.optimizer_offload_fraction
    if not 0.0 <= fraction <= 1.0:
        return (
            f"{said('optimizer_offload_fraction', fraction)} is no fraction; give it a number "
            "from 0 (nothing is offloaded) to 1 (everything is)"
        )
    if not offloads(source):
        return None
    name = "muon_scalar_optimizer" if source.optimizer in MUON else "optimizer"
    chosen = getattr(source, name)
    if chosen == "lion":
        return (
            f"{said(name, chosen)} cannot be used with {switch}: {NO_TWIN}; use adam, or leave "
            "it out"
        )
    for name in DTYPES:
        value = getattr(source, name, torch.float32)
        if value not in ("fp32", torch.float32):
            return f"{said(name, value)} cannot be used with {switch}: {ONE_DTYPE}; leave it out"
    return None


@contextlib.contextmanager
def as_precision_aware(args: Any) -> Iterator[None]:
    """Have Megatron validate offload with the flag that it wants to see beside it.

    For its own class that flag says that gradients are not in `param.grad`, where they are here.
    """
    if not offloads(args):
        yield
        return
    args.use_precision_aware_optimizer = True
    try:
        yield
    finally:
        args.use_precision_aware_optimizer = False
