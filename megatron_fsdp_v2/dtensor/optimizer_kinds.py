"""Properties of optimizer classes, and the optimizer whose step is running."""

from __future__ import annotations

import sys
from types import FrameType
from typing import cast

from torch.optim import Optimizer

_FUSED = ("apex", "deepspeed", "transformer_engine")
"""Packages with multi-tensor kernels in which an empty tensor corrupts its neighbors, silently.

The names are compared with those of the classes' modules; nothing is imported. They are listed in
the core and not by an adapter, because these optimizers also step parameters where no adapter is
imported, and nothing but the name of its package distinguishes such a class before the damage.
"""


def finds_no_empty_gradients(kind: type[Optimizer]) -> bool:
    """Return whether `grad` must be None for parameters without rows while an optimizer steps."""
    return any(base.__module__.partition(".")[0] in _FUSED for base in kind.__mro__)


_OF_LOCAL_ROWS = ("torchao.optim.adam",)
"""Modules whose steps run on local rows.

A step there compiles the update of each parameter whole, in which a graph would treat this rank's
rows as an even chunk, and quantizes state in blocks of the rows that it is given. It computes every
element from that element, its gradient and its state.
"""


def steps_local_rows(kind: type[Optimizer]) -> bool:
    """Return whether an optimizer's step is given this rank's rows as plain tensors.

    A subclass that overrides `step` may not be elementwise.
    """
    return getattr(kind.step, "__module__", "") in _OF_LOCAL_ROWS


def is_known(kind: type[Optimizer]) -> bool:
    """Return whether a class belongs to a package whose optimizers can step sharded parameters.

    A step of any other class is checked, and may combine sharded tensors with plain tensors, which
    must be identical across ranks.
    """
    return kind.__module__.partition(".")[0] in ("torch", __package__.partition(".")[0], *_FUSED)


_STEP_CODE = Optimizer.profile_hook_step(Optimizer.step).__code__
"""Code of the function that torch puts around the step of every class."""


def running_optimizer() -> Optimizer | None:
    """Return the optimizer whose step calls this function and is checked; None if there is none.

    In a step inside another step, the innermost one that is checked. Searches the stack, because
    torch calls no hook after a step that raised. Steps on other threads are not found.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP_CODE and _is_checked(optimizer := frame.f_locals["self"]):
            return cast("Optimizer", optimizer)
        frame = frame.f_back
    return None


def _is_checked(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has sharded parameters, and a class that `is_known` rejects."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return not is_known(type(optimizer)) and any(hasattr(param, "row_shards") for param in params)


class RejectedError(RuntimeError):
    """An optimizer that cannot step sharded parameters."""


def rejected(optimizer: Optimizer, why: str) -> RuntimeError:
    """Return the error that an optimizer cannot step sharded parameters, with alternatives."""
    return RejectedError(". ".join(rejection(optimizer, why)))


def rejection(optimizer: Optimizer, why: str) -> tuple[str, str]:
    """Return the text that an optimizer cannot step sharded parameters, and alternatives."""
    kind = type(optimizer)
    return (
        f"{kind.__module__}.{kind.__name__} cannot step sharded parameters: {why}",
        "Elementwise optimizers such as torch.optim.AdamW can, and those that "
        "docs/optimizers.md lists",
    )
