"""Relative differences between the results of two trainings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.reference.training import distances

STRATEGIES = {
    "ZeRO-0": "no_shard",
    "ZeRO-1": "optim",
    "ZeRO-2": "optim_grads",
    "ZeRO-3": "optim_grads_params",
}

type Results = Mapping[str, torch.Tensor | Mapping[str, torch.Tensor]]
"""Results of a training: tensors compared individually, and parameters or gradients by name."""


def full_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, gathered if it is sharded. Collective."""
    if isinstance(tensor, DTensor):
        tensor = tensor.detach().full_tensor()
    return tensor.detach().clone()


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters by name, gathered if they are sharded. Collective."""
    return {name: full_copy(param) for name, param in model.named_parameters()}


def results_of(
    losses: list[torch.Tensor], norms: list[torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor | Mapping[str, torch.Tensor]]:
    """Combine losses and gradient norms by step, and parameters, into the results of a training."""
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "parameters": parameters}


def train_plain(
    model: nn.Module,
    steps: Iterable[Sequence[Callable[[], torch.Tensor]]],
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    step_schedule: Callable[[], object] = lambda: None,
) -> dict[str, torch.Tensor | Mapping[str, torch.Tensor]]:
    """Train in a loop of torch alone, which clips gradients by their norm; return the results.

    Args:
        model: A sharded or unsharded model.
        steps: For each step, functions that return the losses of its micro-batches.
        optimizer: Optimizer of the trainable parameters.
        max_norm: Maximum norm of the gradients.
        step_schedule: Called after each step.
    """
    losses, norms = [], []
    params = [param for param in model.parameters() if param.requires_grad]
    for micro_batches in steps:
        for loss_of in micro_batches:
            loss = loss_of()
            (loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        norms.append(full_copy(nn.utils.clip_grad_norm_(params, max_norm)))
        optimizer.step()
        step_schedule()
        optimizer.zero_grad()
    return results_of(losses, norms, full_parameters(model))


def difference_of(ours: Results, plain: Results) -> float:
    """Return the largest relative difference of any tensor.

    Raises:
        AssertionError: Names, shapes or dtypes differ, or a tensor is zero or not finite.
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
