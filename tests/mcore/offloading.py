"""Optimizers of two devices on the ranks of a pool, over a small sharded model."""

from __future__ import annotations

from collections import Counter
from typing import Any, override

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp_v2 import fully_shard
from tests.mcore.session import enter_rehearsal

SIZES = (12, 7, 5)


class GroupCountingAdam(torch.optim.Optimizer):
    """AdamW that counts steps with the options of its groups, as Transformer Engine's does."""

    adam_w_mode = 1

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.1) -> None:
        options = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
        super().__init__(params, {**options, "bias_correction": True})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(param))
                adamw(
                    [param],
                    [param.grad],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [torch.tensor(float(group["step"] - 1))],
                    foreach=False,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )


class DTensorCalls(TorchDispatchMode):
    """Counts operations, and those that are given a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.counts["dtensor"] += 1
            return NotImplemented
        self.counts["plain"] += 1
        return func(*args, **(kwargs or {}))


class Layers(nn.Module):
    """Linear layers beside each other; some of their parameters have no rows on some rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for size in SIZES)

    @override
    def forward(self, step: int, without: tuple[int, ...]) -> torch.Tensor:
        loss = torch.zeros(())
        for index, layer in enumerate(self.layers):
            if index not in without:
                torch.manual_seed(100 * step + 10 * index + dist.get_rank())
                loss = loss + layer(torch.randn(4, SIZES[index])).square().sum()
        return loss


def sharded_model(strategy: str = "optim_grads_params", **options: Any) -> Layers:
    """The same on all calls, with fresh parameters; options are those of `fully_shard`."""
    enter_rehearsal()
    torch.manual_seed(3)
    model = Layers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for module in (*model.layers, model):
        fully_shard(
            module, mesh=mesh, sharding_strategy=strategy, on_missing_grad="zero", **options
        )
    return model


def adam(model: Layers) -> torch.optim.Optimizer:
    """Torch's AdamW with two groups of other options."""
    params = list(model.parameters())
    return torch.optim.AdamW(
        [{"params": params[:3], "lr": 2e-2}, {"params": params[3:]}],
        lr=1e-2,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )


def counting_adam(model: Layers) -> torch.optim.Optimizer:
    """The same, counting steps in groups."""
    params = list(model.parameters())
    return GroupCountingAdam([{"params": params[:3], "lr": 2e-2}, {"params": params[3:]}])


OPTIMIZERS = {"adam": adam, "counting": counting_adam}


def backward(model: Layers, step: int, without: tuple[int, ...] = ()) -> None:
    """Give parameters the gradients of a step; some layers none."""
    model.zero_grad()
    model(step, without).backward()
    for index in without:
        for param in model.layers[index].parameters():
            param.grad = None


def whole(model: Layers) -> list[torch.Tensor]:
    """Every parameter in one piece. Collective."""
    return [param.detach().full_tensor().clone() for param in model.parameters()]


def same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Whether parameters are the same bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
