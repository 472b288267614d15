"""Training patterns in which some or all ranks have no gradient of some parameters of a unit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from megatron_fsdp_v2.optim import Muon
from tests.parity.patterns import Pattern, batch, mean_square
from tests.reference.fused import FusedProduct
from tests.reference.models import Experts, MixtureOfExperts, Stack


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # Decay changes a parameter whose gradient is zeros. A large eps, as in `patterns.py`.
    return torch.optim.AdamW(parameters, lr=0.003, eps=1e-3, weight_decay=0.1)


def _muon(parameters: Any) -> torch.optim.Optimizer:
    params = list(parameters)
    groups = [
        {"params": [p for p in params if p.ndim == 2]},
        {"params": [p for p in params if p.ndim != 2], "use_muon": False},
    ]
    # fp32: in bf16, Newton-Schulz would amplify another order of sums.
    return Muon(groups, lr=0.003, weight_decay=0.1, adamw_eps=1e-3, ns_dtype=torch.float32)


def routed(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Use experts by step, micro-batch and rank; no rank uses the last one, nor any in step 2."""
    for block in model.blocks:
        block.active = ((0, 1), (0,), (), (1,))[(step + micro + 3 * rank) % 4]
        if step == 2:
            block.active = ()
    return mean_square(model, step, micro, rank)


def _frozen_between(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Freeze an expert between two micro-batches; it is trained again in the next step."""
    for block in model.blocks:
        block.experts[0].requires_grad_(micro == 0)
    return routed(model, step, micro, rank)


class _TiedExperts(Stack):
    """Blocks whose experts are tied to those of the first block."""

    def __init__(self) -> None:
        super().__init__(2, block=Experts)
        self.blocks[1].experts = self.blocks[0].experts


class _Watched(Stack):
    """Blocks with experts and a hook on every parameter, which records that it was called."""

    def __init__(self) -> None:
        super().__init__(2, block=Experts)
        self.called: set[str] = set()

    def watch(self) -> None:
        for name, param in self.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda _, name=name: self.called.add(name)  # type: ignore[misc]
            )


def _watched(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    if step == micro == 0 and not getattr(model, "is_watched", False):
        model.watch()
        model.is_watched = True
    return routed(model, step, micro, rank)


def _called(model: Any, step: int, rank: int) -> Any:
    """Return which hooks were called since the last evaluation."""
    names = [name for name, _ in model.named_parameters()]
    called = torch.tensor([name in model.called for name in names])
    model.called.clear()
    return called


class _FusedExpert(nn.Linear):
    """A linear layer whose kernel adds its weight gradient to the flat buffer, if sharded."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if hasattr(self.weight, "get_main_grad"):
            return FusedProduct.apply(input, self.weight, "add") + self.bias  # type: ignore[no-any-return, no-untyped-call]
        return super().forward(input)


class _FusedExperts(Experts):
    def __init__(self, width: int = 7) -> None:
        super().__init__(width)
        self.experts = nn.ModuleList(_FusedExpert(width, width) for _ in range(3))


def _two_losses(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Use other experts in each of two forwards before one backward."""
    loss = routed(model, step, micro, rank)
    for block in model.blocks:
        block.active = (1,) if rank == 1 else ()
    return loss + model(batch(step, micro + 50, rank)).square().mean()


_ACCUMULATED = {"num_micro": 2, "set_to_none": True}

MISSING: dict[str, Pattern] = {
    "missing gradients": Pattern(MixtureOfExperts, loss=routed, optimizer=adamw),
    "missing gradients, accumulation": Pattern(
        MixtureOfExperts, loss=routed, optimizer=adamw, **_ACCUMULATED
    ),
    "missing gradients, no_sync": Pattern(
        MixtureOfExperts, loss=routed, optimizer=adamw, sync="no_sync", clips=True, **_ACCUMULATED
    ),
    "missing gradients, Muon": Pattern(MixtureOfExperts, loss=routed, optimizer=_muon),
    "missing gradients, offload": Pattern(
        MixtureOfExperts,
        loss=routed,
        optimizer=adamw,
        options={"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        **_ACCUMULATED,
    ),
    "missing gradients, frozen between micro-batches": Pattern(
        MixtureOfExperts, loss=_frozen_between, optimizer=adamw, sync="no_sync", **_ACCUMULATED
    ),
    "missing gradients, tied": Pattern(_TiedExperts, loss=routed, optimizer=adamw),
    "missing gradients, two forwards": Pattern(MixtureOfExperts, loss=_two_losses, optimizer=adamw),
    "missing gradients, hooks": Pattern(
        _Watched, loss=_watched, evaluate=_called, optimizer=adamw, **_ACCUMULATED
    ),
    "missing gradients, fused": Pattern(
        lambda: Stack(2, block=_FusedExperts), loss=routed, optimizer=adamw, **_ACCUMULATED
    ),
}
