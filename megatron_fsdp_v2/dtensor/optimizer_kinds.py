"""What is known of classes of optimizers: which compute every element from that element alone.

Such an optimizer steps the rows of each rank by themselves, and a parameter without rows there has
no gradient for it: an empty tensor in the list of a fused multi-tensor kernel can corrupt its
neighbors. Every other one may reduce over a parameter, to which all ranks have to come; it finds a
gradient without rows.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import optim

__all__ = [
    "ELEMENTWISE",
    "NOT_ELEMENTWISE",
    "needs_all_ranks",
    "rejection",
    "stepped_by_all",
]

ELEMENTWISE: frozenset[type[optim.Optimizer]] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)

_FUSED = {"apex", "deepspeed", "transformer_engine"}
"""Packages whose optimizers have multi-tensor kernels of their own."""

NOT_ELEMENTWISE = {
    "Adafactor": "it factors whole matrices",
    "AdaptiveMuon": "it orthogonalizes whole matrices",
    "DistributedShampoo": "it preconditions with whole matrices",
    "FusedLAMB": "it takes norms of whole tensors",
    "FusedNovoGrad": "it takes norms of whole tensors",
    "LAMB": "it takes norms of whole tensors",
    "LARS": "it takes norms of whole tensors",
    "LBFGS": "it calls the model itself, and takes products of whole vectors",
    "Muon": "it orthogonalizes whole matrices",
    "NovoGrad": "it takes norms of whole tensors",
    "SM3": "it keeps state of whole rows and columns",
    "SOAP": "it preconditions with whole matrices",
    "Shampoo": "it preconditions with whole matrices",
    "SparseAdam": "it steps sparse gradients",
}
"""By name of a class, of which the package need not be installed."""


def needs_all_ranks(kind: type[optim.Optimizer]) -> bool:
    """Whether every rank has to find a gradient of every parameter that some rank has one of.

    Args:
        kind: A class of optimizers; one that says `skips_empty_shards = True` finds none without
            rows.
    """
    if kind in ELEMENTWISE or getattr(kind, "skips_empty_shards", False):
        return False
    is_fused = kind.__module__.partition(".")[0] in _FUSED
    return not is_fused or any(base.__name__ in NOT_ELEMENTWISE for base in kind.__mro__)


def stepped_by_all(frame: FrameType | None = None) -> optim.Optimizer | None:
    """The optimizer one of whose methods is under way, if it needs all ranks; else None.

    Hooks of torch tell of `step` alone, not of `first_step` and the like, and not when one fails.

    Args:
        frame: Where to begin; with the caller when None.
    """
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if isinstance(owner, optim.Optimizer):
                return owner if needs_all_ranks(type(owner)) else None
        frame = frame.f_back
    return None


class _RejectedError(RuntimeError):
    """An optimizer that cannot step sharded parameters."""


def rejection(error: Exception) -> RuntimeError | None:
    """What to raise for an error of an operation on sharded tensors, if an optimizer ran it."""
    optimizer = None if isinstance(error, _RejectedError) else stepped_by_all()
    if optimizer is None:
        return None
    return rejected(optimizer, str(error) or type(error).__name__)


def rejected(optimizer: optim.Optimizer, why: str) -> RuntimeError:
    """That an optimizer cannot step sharded parameters, and what can."""
    kind = type(optimizer)
    return _RejectedError(
        f"{kind.__module__}.{kind.__name__} cannot step sharded parameters: {why}. Elementwise "
        "optimizers such as torch.optim.AdamW can, and those that docs/optimizers.md lists"
    )
