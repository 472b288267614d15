"""What torch.compile has to leave as it is: all that happens around a unit's forward and backward.

Gathers, changes of what is registered on a module and hooks in the graph are no computation that a
compiled graph could contain. They stand between graphs instead: a module's own forward is one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["check_engine", "leave_to_python", "runs_as_written", "uncompiled"]

_REASON = (
    "megatron_fsdp_v2 gathers weights before the forward of a sharded module and drops them after "
    "it, between compiled graphs; to compile without graph breaks, compile the sharded modules "
    "inside one by one (module.compile(fullgraph=True))"
)


@functools.cache
def uncompiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A function that the compiler neither looks into nor compiles, nor anything that it calls.

    Made when it is first used: torch's compiler takes a second to import.

    Args:
        function: Defined once in a process: what is made of it is kept.
    """
    made: Callable[P, R] = torch.compiler.disable(function, reason=_REASON)  # type: ignore[no-untyped-call]
    _leave_rooms_as_written()
    compiler_at_work = torch._C._dynamo.eval_frame.get_eval_frame_callback

    @functools.wraps(made)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # Turning the compiler off takes longer than most hooks, and it is seldom on.
        if compiler_at_work() is None:
            return function(*args, **kwargs)
        return made(*args, **kwargs)

    return run


@functools.cache
def _leave_rooms_as_written() -> None:
    """Have the compiler skip what sharded tensors do, which is called by torch and not by hooks.

    And this file, by which it knows what `uncompiled` makes.
    """
    for room in ("dtensor", "comm", "_compiler"):
        torch._dynamo.trace_rules.add(f"{__package__}.{room}")


def runs_as_written[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A function that the compiler does not compile, while it may compile what that calls."""
    return torch.compiler.disable(  # type: ignore[no-any-return, no-untyped-call]
        function, recursive=False, reason=_REASON
    )


def leave_to_python(what: str) -> None:
    """Where a compiler asks what a tensor consists of: end its graph before, if it is tracing.

    Raises:
        torch._dynamo.exc.Unsupported: It is. That ends the graph, or says why where there may be
            one only.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and torch._guards.TracingContext.try_get() is not None:
        raise dynamo.exc.Unsupported(
            f"{what} is not traced: this rank holds some of its rows, which a compiled graph would "
            "take for those of an even DTensor. Use it between graphs, as optimizers do"
        )


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def check_engine(unit: _Named) -> None:
    """See that a backward is run by the autograd engine, which runs hooks when it gets to them.

    Args:
        unit: Whose backward begins.

    Raises:
        RuntimeError: The backward itself was compiled.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is not None and module.in_compiled_autograd_region:
        raise RuntimeError(
            f"the backward of {unit.name} runs in compiled autograd, which collects the hooks of a "
            "backward before it runs them, so that weights are not gathered when they are needed; "
            "turn torch._dynamo.config.compiled_autograd off: compiled modules have compiled "
            "backwards without it"
        )
