"""Steps of optimizers that see only this rank's rows, as plain tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_fsdp_v2.dtensor.sharded_rows import ShardedRows, local_of, rows_like, sharded_grad


class LocalStep:
    """One step of an optimizer over local rows.

    For optimizers that `steps_local_rows` names: they compile the step of each parameter whole, and
    quantize state in blocks of the local rows. A copy of the optimizer steps in its place, with
    plain tensors over the same memory as parameters, gradients and state. The optimizer itself
    never holds these tensors, also if the step raises an error.

    Args:
        optimizer: The optimizer. Its parameters may include plain tensors.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        self._rows: dict[torch.Tensor, torch.Tensor] = {
            p: _rows_of(p) for p in params if isinstance(p, ShardedRows)
        }
        state: defaultdict[Any, Any] = defaultdict(dict)
        for param, known in optimizer.state.items():
            state[self._rows.get(param, param)] = {
                name: local_of(value) if isinstance(value, ShardedRows) else value
                for name, value in known.items()
            }
        self._copy: Any = object.__new__(type(optimizer))
        vars(self._copy).update(vars(optimizer))
        self._copy.state = state
        self._copy.param_groups = [
            {**group, "params": [self._rows.get(p, p) for p in group["params"]]} for group in groups
        ]

    def arguments(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of the step with the copy as the optimizer.

        Args:
            args: Positional arguments of the step: the optimizer, and a closure if there is one.
            kwargs: Its other arguments.
        """
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._read_gradients()
            return (self._copy, *args[1:]), kwargs
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (self._copy, self._with_gradients(closure), *args[2:]), rest

    def _with_gradients(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure after which the copy has the gradients of the closure's backward."""

        def call() -> Any:
            loss = closure()
            self._read_gradients()
            return loss

        return call

    def _read_gradients(self) -> None:
        for param, rows in self._rows.items():
            grad = sharded_grad(param)
            rows.grad = None if grad is None else local_of(grad)

    def publish(self) -> None:
        """Set the state of the optimizer after the step."""
        stepped, states = self._copy.state, self._optimizer.state
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        for param in params:
            rows = self._rows.get(param, param)
            if rows not in stepped:
                continue
            known = states[param]
            for name, value in stepped[rows].items():
                if not (name in known and _plain_state(known[name]) is value):
                    is_of_rows = isinstance(value, torch.Tensor) and value.shape == rows.shape
                    is_sharded = is_of_rows and param in self._rows
                    known[name] = rows_like(value, param) if is_sharded else value


def _rows_of(param: ShardedRows) -> torch.Tensor:
    """Return the local rows of a parameter as a plain tensor without a gradient."""
    rows = local_of(param).detach()
    # Main gradients may have another dtype than main weights.
    rows.grad_dtype = None
    return rows


def _plain_state(value: Any) -> Any:
    return local_of(value) if isinstance(value, ShardedRows) else value
