"""An Adam that keeps its moments as plain DTensors, as Transformer Engine's FusedAdam does."""

from __future__ import annotations

from typing import Any, override

import torch
from torch.distributed.tensor import DTensor


class WrappingAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay on local rows.

    The moments of all parameters, also of parameters without a gradient, are DTensors with the
    parameter's placements.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:
        assert not capturable
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = _wrapped(param, torch.zeros_like(_rows(param)))
                if param.grad is not None:
                    moments = (_rows(state["exp_avg"]), _rows(state["exp_avg_sq"]))
                    _move(_rows(param), _rows(param.grad), *moments, group)
                    torch.autograd.graph.increment_version(param)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            for name, value in state.items():
                state[name] = _wrapped(param, _rows(value).clone())


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _wrapped(param: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return rows
    return DTensor.from_local(
        rows,
        device_mesh=param.device_mesh,
        placements=param.placements,
        shape=param.size(),
        stride=param.stride(),
    )


def _move(
    rows: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    group: dict[str, Any],
) -> None:
    first, second = group["betas"]
    mean.lerp_(grad, 1 - first)
    square.mul_(second).addcmul_(grad, grad, value=1 - second)
    scale = (1 - second ** group["step"]) ** 0.5
    rows.mul_(1 - group["lr"] * group["weight_decay"])
    step_size = group["lr"] / (1 - first ** group["step"])
    rows.addcdiv_(mean, square.sqrt().div_(scale).add_(group["eps"]), value=-step_size)
