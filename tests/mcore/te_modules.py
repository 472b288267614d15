"""Transformer Engine's own modules, sharded, beside the same modules that nobody shards."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from tests.mcore.flags import STRATEGIES
from tests.mcore.session import enter_rehearsal

HIDDEN, FFN, TOKENS = 16, 24, (5, 3)


class Grouped(nn.Module):
    """Transformer Engine's GroupedLinear over tokens of two experts."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        from transformer_engine.pytorch import GroupedLinear

        self.experts = GroupedLinear(len(TOKENS), HIDDEN, HIDDEN, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(x, list(TOKENS))
        return out


def layers(**options: Any) -> nn.Sequential:
    """One of each kind of module with weights."""
    import transformer_engine.pytorch as te

    return nn.Sequential(
        te.Linear(HIDDEN, HIDDEN, **options),
        te.LayerNormLinear(HIDDEN, HIDDEN, normalization="RMSNorm", **options),
        te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **options),
        Grouped(**options),
    )


class Model(nn.Module):
    """These layers, recomputed or not."""

    def __init__(self, recomputes: str, **options: Any) -> None:
        super().__init__()
        self.layers = layers(**options)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.recomputes:
                x = checkpoint(layer, x, use_reentrant=self.recomputes == "reentrant")
            else:
                x = layer(x)
        return x


def _input(rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(sum(TOKENS), HIDDEN, generator=generator).to(dtype).requires_grad_()


def _unsharded(
    plain: nn.Module, dtype: torch.dtype, micro_batches: int, *, fuses: bool, separately: bool
) -> list[list[torch.Tensor]]:
    """This rank's gradients in fp32: of all micro-batches together, or of each."""
    params = list(plain.parameters())
    totals: list[list[torch.Tensor]] = []
    for number in range(micro_batches):
        if separately or not totals:
            totals.append([torch.zeros(p.shape) for p in params])
        for param, total in zip(params, totals[-1], strict=True):
            if fuses:
                param.main_grad = total  # type: ignore[attr-defined]
                param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            param.grad = None
        plain(_input(dist.get_rank(), number, dtype)).float().square().sum().backward()
        for param, total in zip(params, totals[-1], strict=True):
            if not getattr(param, "grad_added_to_main_grad", False):
                assert param.grad is not None
                total.add_(param.grad)
    return totals


def _over_ranks(totals: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The mean over ranks, of micro-batches one after the other."""
    results = [torch.zeros_like(total) for total in totals[0]]
    for total, result in itertools.chain(*(zip(t, results, strict=True) for t in totals)):
        dist.all_reduce(total)
        result.add_(total / dist.get_world_size())
    return results


def wrong_gradients(
    dtype: torch.dtype, micro_batches: int, recomputes: str, *, fuses: bool
) -> list[str]:
    """Train every strategy for one step; name gradients that are not the reference's to the bit."""
    enter_rehearsal("transformer_engine")
    options = dict(params_dtype=dtype, device="cpu", fuse_wgrad_accumulation=fuses)
    torch.manual_seed(0)
    first = Model(recomputes, **options)
    wrong: list[str] = []
    for strategy in STRATEGIES:
        separately = strategy in ("optim_grads", "optim_grads_params")
        reference = _over_ranks(
            _unsharded(
                copy.deepcopy(first), dtype, micro_batches, fuses=fuses, separately=separately
            )
        )
        model = copy.deepcopy(first)
        policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
        sharding = dict(sharding_strategy=strategy, mp_policy=policy)
        for layer in model.layers:
            fully_shard(layer, **sharding)
        fully_shard(model, **sharding)
        for number in range(micro_batches):
            model.set_requires_gradient_sync(separately or number == micro_batches - 1)
            model(_input(dist.get_rank(), number, dtype)).float().square().sum().backward()
        for (name, param), wanted in zip(model.named_parameters(), reference, strict=True):
            rows = wanted[slice(*param.local_rows)]
            if not rows.numel():
                assert param.grad is None
            elif param.grad is None or not torch.equal(local_of(param.grad), rows):
                wrong.append(f"{strategy} {name}")
    return wrong
