"""Excludes the code around a unit's forward and backward from torch.compile.

A compiled graph cannot contain gathers, changes of a module's registered parameters, or hooks of
the autograd graph. This code runs between graphs; a module's own forward may be one graph.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch

_REASON = (
    "megatron_fsdp_v2 gathers weights before the forward of a sharded module and drops them after "
    "it, between compiled graphs; to compile without graph breaks, compile the sharded modules "
    "inside one by one (module.compile(fullgraph=True))"
)


@functools.cache
def uncompiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that the compiler does not trace, including the functions it calls.

    The wrapper is created at the first use, since torch's compiler takes a second to import.

    Args:
        function: A function defined once per process: the wrapper is cached.
    """
    made: Callable[P, R] = torch.compiler.disable(function, reason=_REASON)  # type: ignore[no-untyped-call]
    _skip_packages()
    compiler_at_work = torch._C._dynamo.eval_frame.get_eval_frame_callback

    @functools.wraps(made)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # Disabling the compiler takes longer than most hooks, and the compiler is rarely active.
        if compiler_at_work() is None:
            return function(*args, **kwargs)
        return made(*args, **kwargs)

    return run


@functools.cache
def _skip_packages() -> None:
    """Make the compiler skip the packages of sharded tensors, which torch calls outside of hooks.

    Also skips this file, which defines the wrapper of `uncompiled`.
    """
    for package in ("dtensor", "comm", "_compiler"):
        torch._dynamo.trace_rules.add(f"{__package__}.{package}")


def not_compiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that the compiler does not compile; functions it calls may be compiled."""
    return torch.compiler.disable(  # type: ignore[no-any-return, no-untyped-call]
        function, recursive=False, reason=_REASON
    )


def break_graph(what: str, instead: str = "Use it between graphs, as optimizers do") -> None:
    """Break the compiler's graph, if it is tracing, where it inspects a sharded tensor.

    Args:
        what: Description of the tensor.
        instead: Advice, if graph breaks are not allowed.

    Raises:
        torch._dynamo.exc.Unsupported: The compiler is tracing. The compiler breaks the graph, or
            propagates the exception if graph breaks are not allowed.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and torch._guards.TracingContext.try_get() is not None:
        raise dynamo.exc.Unsupported(
            f"{what} is not traced: this rank holds some of its rows, which a compiled graph would "
            f"treat as an even shard of a DTensor. {instead}"
        )


def reject_compiled_autograd(name: Callable[[], str]) -> None:
    """Raise if a backward runs in compiled autograd, which collects hooks before it runs them.

    Args:
        name: Returns the name of the root whose backward begins.

    Raises:
        RuntimeError: The backward runs in compiled autograd.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is not None and module.in_compiled_autograd_region:
        raise RuntimeError(
            f"the backward of {name()} runs in compiled autograd, which collects the hooks of a "
            "backward before it runs them, so that weights are not gathered when they are needed; "
            "turn torch._dynamo.config.compiled_autograd off: compiled modules have compiled "
            "backwards without it"
        )
