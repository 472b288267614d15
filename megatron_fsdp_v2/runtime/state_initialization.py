"""Steps of an optimizer that change no weight: those that torch makes state with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of

if TYPE_CHECKING:
    from megatron_fsdp_v2.runtime.context import Context

__all__ = ["CurrentWeights", "initializes_state"]


def initializes_state(optimizer: Optimizer, contexts: Sequence[Context]) -> bool:
    """Whether the step that begins has to do with state alone.

    `torch.distributed.checkpoint.state_dict` steps an optimizer that has no state, with a learning
    rate of 0 and zeros of its own as gradients. A rank without rows has none when all others have,
    so that it steps alone; what follows from a step of weights is collective, and must not follow
    from that one.

    Args:
        optimizer: About to step.
        contexts: Those that it holds parameters of.
    """
    groups = optimizer.param_groups
    if not (contexts and all("lr" in group and _is_zero(group["lr"]) for group in groups)):
        return False
    grads: list[Any] = [p.grad for group in groups for p in group["params"] if p.requires_grad]
    if not grads or any(grad is None for grad in grads):
        return False
    # A warm-up begins with a learning rate of 0 as well, and some rank's gradient may be 0.
    units = (unit for context in contexts for unit in context.units())
    trained = (group.grads for unit in units for group in unit.groups if group.grads is not None)
    if any(known.param_grads.found()[1] is not None for known in trained):
        return False
    return not any(_rows_of(grad).count_nonzero() for grad in grads)


def _rows_of(grad: torch.Tensor) -> torch.Tensor:
    # Also of a plain DTensor, which would count over all ranks.
    return local_of(grad) if isinstance(grad, DTensor) else grad


def _is_zero(lr: Any) -> bool:
    # Not one on a device, which would be waited for at every step.
    is_known = not isinstance(lr, torch.Tensor) or lr.device.type == "cpu"
    return is_known and float(lr) == 0


class CurrentWeights:
    """What was up to date before a step that changes no weight, and is so afterwards."""

    def __init__(self, contexts: Iterable[Context]) -> None:
        self._groups = [
            (context, group)
            for context in contexts
            for unit in context.units()
            for group in unit.groups
            if not group.is_stale(context.weight_version)
        ]

    def restore(self) -> None:
        """Have version counters that the step moved mean nothing."""
        for context, group in self._groups:
            group.note_refreshed(context.weight_version)
