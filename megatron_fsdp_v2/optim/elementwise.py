"""Which optimizers compute every element from that element alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import optim

__all__ = ["check_is_elementwise", "spans_gaps"]

_ELEMENTWISE: frozenset[type[optim.Optimizer]] = frozenset(
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

_NOT_ELEMENTWISE = {
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


def check_is_elementwise(kind: type[optim.Optimizer], *, is_asserted: bool) -> None:
    """See that a class of optimizers may be given flat tensors.

    Args:
        kind: The class.
        is_asserted: Whether the user says that it is elementwise.

    Raises:
        ValueError: It is not, or nobody says that it is.
    """
    for base in kind.__mro__:
        if base.__name__ in _NOT_ELEMENTWISE:
            raise ValueError(
                f"{kind.__module__}.{kind.__name__} cannot step flat tensors: "
                f"{_NOT_ELEMENTWISE[base.__name__]}; give it the parameters as they are"
            )
    if kind not in _ELEMENTWISE and not is_asserted:
        known = ", ".join(sorted(each.__name__ for each in _ELEMENTWISE))
        raise ValueError(
            f"{kind.__module__}.{kind.__name__} is not known to compute every element of a "
            "parameter from that element, its gradient and its state alone, as optimizers that "
            f"step flat tensors must ({known} of torch.optim do); if it does, say so with "
            "flat_optimizer(cls, elementwise=True)"
        )


def spans_gaps(kind: type[optim.Optimizer], group: Mapping[str, Any]) -> bool:
    """Whether elements that are zero, with gradients of zero, stay so in every step.

    Alignment leaves such elements between parameters. Only without `eps` would zero be divided by
    zero.
    """
    eps = group.get("eps", 1.0)
    if kind not in _ELEMENTWISE or not isinstance(eps, float | int):
        return False
    return eps > 0
