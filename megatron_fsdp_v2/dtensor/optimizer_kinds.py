"""Kinds of optimizers: elementwise ones, and those that need all ranks for every parameter.

An elementwise optimizer steps the rows of each rank independently. For a parameter without rows on
this rank, it reads None as `grad`, since an empty tensor in the list of a fused multi-tensor kernel
can corrupt its neighbors. Any other optimizer may reduce over a parameter, which is a collective;
it reads an empty gradient, so that all ranks take part.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import CodeType, FrameType

from torch import nn, optim
from torch.amp.grad_scaler import GradScaler

__all__ = [
    "ELEMENTWISE",
    "NOT_ELEMENTWISE",
    "RejectedError",
    "all_ranks_caller",
    "all_ranks_optimizer",
    "hide_empty_gradients",
    "needs_all_ranks",
    "rejected",
]

_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
ELEMENTWISE = frozenset[type[optim.Optimizer]](getattr(optim, name) for name in _NAMES.split())

_FUSED = {"apex", "deepspeed", "transformer_engine"}
"""Packages whose optimizers have multi-tensor kernels of their own."""

_NOT_ELEMENTWISE = (
    "Adafactor AdaptiveMuon DistributedShampoo FusedLAMB FusedNovoGrad LAMB LARS LBFGS Muon "
    "NovoGrad SM3 SOAP Shampoo SparseAdam"
)
NOT_ELEMENTWISE = frozenset(_NOT_ELEMENTWISE.split())
"""Names of classes whose update of an element depends on other elements, of any package."""


def needs_all_ranks(kind: type[optim.Optimizer]) -> bool:
    """Return whether every rank must read a gradient for each parameter that has one on any rank.

    Args:
        kind: A class of optimizers. With the attribute `skips_empty_shards = True`, it reads no
            empty gradients.
    """
    if kind in ELEMENTWISE or getattr(kind, "skips_empty_shards", False):
        return False
    is_fused = kind.__module__.partition(".")[0] in _FUSED
    return not is_fused or any(base.__name__ in NOT_ELEMENTWISE for base in kind.__mro__)


_READ = (nn.utils.clip_grad_norm_, GradScaler._unscale_grads_)
_RESET = (nn.Module.zero_grad, optim.Optimizer.zero_grad)
_SEE_ALL_GRADIENTS = frozenset(inspect.unwrap(each).__code__ for each in (*_READ, *_RESET))
"""Functions of torch that reduce over existing gradients, or set gradients to None.

They skip parameters whose `grad` is None, as it is for an empty shard. A rank without rows of any
of the parameters would skip the collective, and the other ranks would hang.
"""


_HIDES_EMPTY: ContextVar[bool] = ContextVar("hides_empty_gradients", default=False)


@contextlib.contextmanager
def hide_empty_gradients() -> Iterator[None]:
    """Hide placeholder gradients from all callers in this context.

    For a step that is known to be elementwise. A read of `grad` of a parameter without rows
    searches the stack for about 40 us, and with many ranks most parameters have no rows on a rank.
    """
    token = _HIDES_EMPTY.set(True)
    try:
        yield
    finally:
        _HIDES_EMPTY.reset(token)


def all_ranks_caller(frame: FrameType | None = None) -> optim.Optimizer | CodeType | None:
    """Return the caller that needs all ranks and therefore reads empty gradients.

    Searches the stack: torch has no hook for clipping, and step hooks are called neither for
    methods other than `step` (SAM's `first_step`) nor after a step that fails.

    Args:
        frame: Frame to begin at; the caller's when None.

    Returns:
        An optimizer that needs all ranks, the code of a function of torch, or None.
    """
    if _HIDES_EMPTY.get():
        return None
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        code = frame.f_code
        if code in _SEE_ALL_GRADIENTS:
            return code
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if isinstance(owner, optim.Optimizer):
                return owner if needs_all_ranks(type(owner)) else None
        frame = frame.f_back
    return None


def all_ranks_optimizer() -> optim.Optimizer | None:
    """Return the optimizer whose method is running, if it needs all ranks; else None."""
    caller = all_ranks_caller()
    return caller if isinstance(caller, optim.Optimizer) else None


class RejectedError(RuntimeError):
    """An optimizer that cannot step sharded parameters."""


def rejected(optimizer: optim.Optimizer, why: str) -> RuntimeError:
    """Return the error that an optimizer cannot step sharded parameters, with alternatives."""
    kind = type(optimizer)
    return RejectedError(
        f"{kind.__module__}.{kind.__name__} cannot step sharded parameters: {why}. Elementwise "
        "optimizers such as torch.optim.AdamW can, and those that docs/optimizers.md lists"
    )
