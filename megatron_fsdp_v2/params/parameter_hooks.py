"""Hooks that users register on parameters: which are run, carried over, or rejected."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from megatron_fsdp_v2.dtensor.attributes import post_hooks_at_once

__all__ = [
    "NotAUsersHook",
    "hooked",
    "keep_hooks",
    "move_hooks",
    "run_hooks",
    "tensor_hook_rejection",
]


class NotAUsersHook(functools.partial[None]):
    """A hook that this package registers on tensors that may be parameters."""


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Have `register_post_accumulate_grad_hook`'s hooks of one parameter be those of another.

    The table itself moves, so that the handles that registering returned go on working.
    """
    hooks = _post_accumulate_hooks(source)
    if hooks:
        source._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        target._post_accumulate_grad_hooks = hooks


def keep_hooks(param: torch.Tensor, undo: ExitStack) -> None:
    """Have `undo` put back the hooks that a parameter has now, whatever is done with them."""
    table: Any = param._post_accumulate_grad_hooks
    undo.callback(_put_back, param, table, {} if table is None else dict(table))


def _put_back(param: torch.Tensor, table: Any, content: dict[int, Any]) -> None:
    if table is not None:
        table.clear()
        table.update(content)
    param._post_accumulate_grad_hooks = table


def run_hooks(param: torch.Tensor) -> None:
    """Call the hooks that users registered with `register_post_accumulate_grad_hook`."""
    for hook in list(_post_accumulate_hooks(param).values()):
        if not isinstance(hook, NotAUsersHook):
            hook(param)


def hooked(params: Sequence[torch.Tensor]) -> list[int]:
    """Which of some parameters may have such hooks."""
    with torch._C.DisableTorchFunctionSubclass():
        tables = list(map(post_hooks_at_once, params))
    return [index for index, table in enumerate(tables) if table] if any(tables) else []


def _post_accumulate_hooks(param: torch.Tensor) -> dict[int, Callable[[torch.Tensor], None]]:
    # Autograd never comes to a sharded parameter, and there is no public way to the hooks.
    return getattr(param, "_post_accumulate_grad_hooks", None) or {}


def tensor_hook_rejection(name: str, param: torch.Tensor) -> str:
    """What to say of a parameter with a hook of `Tensor.register_hook`; empty if it has none.

    It gets one backward's gradient before that is added, and may replace it. Here gradients of
    several backwards may be added before they are reduced, so there is no such moment.
    """
    hooks: dict[int, Any] = param._backward_hooks or {}
    if all(isinstance(hook, NotAUsersHook) for hook in hooks.values()):
        return ""
    return (
        f"{name} has a hook of register_hook(), which no gradient of a sharded parameter would "
        "reach; use register_post_accumulate_grad_hook(), which is called once param.grad is "
        "reduced and may change it, or put the hook on a tensor in the forward"
    )
