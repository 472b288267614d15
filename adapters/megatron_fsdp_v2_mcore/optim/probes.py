"""Copies of an optimizer for other parameters, and its state after a step with zeros."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["optimizer_like", "state_after_a_step"]


def optimizer_like(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> Any:
    """Return an optimizer of the same class and options with other parameters and no state.

    Args:
        optimizer: The optimizer to copy. It is not changed.
        groups: Parameter groups; missing options are set to the optimizer's defaults.
    """
    probe = object.__new__(type(optimizer))
    # Dictionaries are copied, so that hooks registered on one are not called for the other.
    probe.__dict__.update(
        {
            key: copy.copy(value) if isinstance(value, dict) else value
            for key, value in vars(optimizer).items()
            if key != "state"
        }
    )
    probe.state = defaultdict(dict)
    probe.param_groups = [{**optimizer.defaults, **group} for group in groups]
    return probe


def state_after_a_step(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], mold: torch.Tensor
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the state that a step creates for a zero parameter with a zero gradient.

    Args:
        optimizer: The optimizer whose class and options are used. It is not changed.
        options: Options of the parameter's group. Steps of some optimizers change them.
        mold: The parameter: zeros of the required shape and type.

    Returns:
        The state, or None if the step created none, and the options after the step.
    """
    if (mold._local_tensor if hasattr(mold, "_local_tensor") else mold).numel():
        # Fused optimizers fail on empty tensors.
        mold.grad = torch.zeros_like(mold)
    probe = optimizer_like(optimizer, [{**copy.deepcopy(options), "params": [mold]}])
    probe.step()
    stepped = {key: value for key, value in probe.param_groups[0].items() if key != "params"}
    return probe.state.get(mold), stepped
