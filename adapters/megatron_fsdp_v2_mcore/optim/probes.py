"""Optimizers like one that is there, for other parameters."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["optimizer_like", "state_after_a_step"]


def optimizer_like(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> Any:
    """An optimizer of the same class and options, with other parameters and without state.

    Args:
        optimizer: Which one; it stays as it is.
        groups: Parameter groups; options that they lack are its defaults.
    """
    probe = object.__new__(type(optimizer))
    # Its hooks are copied: what watches the one must not be told of the other.
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
    """What a step with a gradient of zeros makes of a parameter of zeros.

    Args:
        optimizer: Whose class and options it is a step of; it stays as it is.
        options: Those of the parameter's group, changed by steps of some optimizers.
        mold: The parameter, zeros of the right shape and kind.

    Returns:
        Its state, None where the step made none, and the options after the step.
    """
    if (mold._local_tensor if hasattr(mold, "_local_tensor") else mold).numel():
        # Fused optimizers fail on empty tensors.
        mold.grad = torch.zeros_like(mold)
    probe = optimizer_like(optimizer, [{**copy.deepcopy(options), "params": [mold]}])
    probe.step()
    stepped = {key: value for key, value in probe.param_groups[0].items() if key != "params"}
    return probe.state.get(mold), stepped
