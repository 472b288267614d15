"""What torch.compile has to leave as it is: all that happens around a unit's forward and backward.

Gathers, changes of what is registered on a module and hooks in the graph are no computation that a
compiled graph could contain. They stand between graphs instead: a module's own forward is one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

__all__ = ["uncompiled"]

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
    return torch.compiler.disable(function, reason=_REASON)  # type: ignore[no-any-return, no-untyped-call]
