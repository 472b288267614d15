"""Properties of optimizer classes, and the optimizers whose steps are checked."""

from __future__ import annotations

import weakref

from torch.optim import Optimizer

_FUSED = ("apex", "deepspeed", "transformer_engine")
"""Packages with multi-tensor kernels in which an empty tensor corrupts its neighbors, silently."""


def finds_no_empty_gradients(kind: type[Optimizer]) -> bool:
    """Return whether `grad` must be None for parameters without rows while an optimizer steps."""
    return any(base.__module__.partition(".")[0] in _FUSED for base in kind.__mro__)


def is_known(kind: type[Optimizer]) -> bool:
    """Return whether a class belongs to a package whose optimizers can step sharded parameters.

    A step of any other class is checked, and may combine sharded tensors with plain tensors, which
    must be identical across ranks.
    """
    return kind.__module__.partition(".")[0] in ("torch", __package__.partition(".")[0], *_FUSED)


_RUNNING: list[weakref.ref[Optimizer]] = []


def begin_step(optimizer: Optimizer) -> None:
    """Note that an optimizer steps, perhaps inside the step of another one."""
    end_step(optimizer)  # after a step that failed
    _RUNNING.append(weakref.ref(optimizer))


def end_step(optimizer: Optimizer) -> None:
    """Note that the step of an optimizer has ended."""
    for index, running in enumerate(_RUNNING):
        if running() is optimizer:
            del _RUNNING[index:]
            break


def running_optimizer() -> Optimizer | None:
    """Return the optimizer whose step is running and is checked; None if there is none."""
    return next((o for running in reversed(_RUNNING) if (o := running()) is not None), None)


class RejectedError(RuntimeError):
    """An optimizer that cannot step sharded parameters."""


def rejected(optimizer: Optimizer, why: str) -> RuntimeError:
    """Return the error that an optimizer cannot step sharded parameters, with alternatives."""
    kind = type(optimizer)
    return RejectedError(
        f"{kind.__module__}.{kind.__name__} cannot step sharded parameters: {why}. Elementwise "
        "optimizers such as torch.optim.AdamW can, and those that docs/optimizers.md lists"
    )
