"""How far two runs are apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.reference.training import distances

__all__ = ["Shown", "difference_of", "shown", "whole", "whole_parameters"]

type Shown = Mapping[str, torch.Tensor | Mapping[str, torch.Tensor]]
"""What a run showed: tensors to compare each by itself, and parameters or gradients by name."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, gathered if it is sharded. Collective."""
    if isinstance(tensor, DTensor):
        tensor = tensor.detach().full_tensor()
    return tensor.detach().clone()


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters, gathered where they are sharded. Collective."""
    return {name: whole(param) for name, param in model.named_parameters()}


def shown(
    losses: list[torch.Tensor], norms: list[torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor | Mapping[str, torch.Tensor]]:
    """What a run showed, of its losses and gradient norms by step."""
    return {
        "losses": torch.stack(losses),
        "norms": torch.stack(norms),
        "parameters": parameters,
    }


def difference_of(ours: Shown, plain: Shown) -> float:
    """The largest relative difference of any tensor.

    Raises:
        AssertionError: Names, shapes or dtypes differ, or something is not finite.
    """
    assert ours.keys() == plain.keys(), ours.keys() ^ plain.keys()
    found = [0.0]
    for key, theirs in plain.items():
        found += _distances(_named(key, ours[key]), _named(key, theirs))
    return max(found)


def _named(
    key: str, given: torch.Tensor | Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    return {key: given.reshape(-1)} if isinstance(given, torch.Tensor) else given


def _distances(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[float]:
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    rows = {}
    for name, tensor in theirs.items():
        assert mine[name].shape == tensor.shape, name
        assert mine[name].dtype == tensor.dtype, name
        assert tensor.isfinite().all() and tensor.any(), f"{name} compares nothing"
        rows[name] = ((None, None), mine[name])
    return distances(rows, dict(theirs))
