"""An optimizer that keeps its state as plain DTensors, as Transformer Engine's FusedAdam does."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


class WrappingMomentum(torch.optim.Optimizer):
    """Momentum on local rows, with a rate that decreases with the step number of the group.

    The state of all parameters, also of parameters without a gradient, is a DTensor with the
    parameter's placements.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state, rows = self.state[param], _rows(param)
                if "momentum" not in state:
                    state["momentum"] = _wrapped(param, torch.zeros_like(rows))
                if param.grad is not None:
                    momentum = _rows(state["momentum"]).mul_(0.9).add_(_rows(param.grad))
                    rows.sub_(momentum, alpha=group["lr"] / group["step"])
                    torch.autograd.graph.increment_version(param)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            for name, value in state.items():
                state[name] = _wrapped(param, _rows(value).clone())


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _wrapped(param: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    assert isinstance(param, DTensor)
    where = {"device_mesh": param.device_mesh, "placements": param.placements}
    return DTensor.from_local(rows, **where, shape=param.size(), stride=param.stride())
