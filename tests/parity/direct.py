"""Training patterns whose losses use parameters themselves, outside the forwards of their units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.parity.missing import adamw
from tests.parity.patterns import Pattern, batch, mean_square
from tests.reference.models import OUTPUT, WIDTH, Stack


def whole(tensor: Any) -> Any:
    """Return a tensor, or the whole of a sharded one."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class _WithHead(Stack):
    """A stack, and a head that is a unit and that the loss applies."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(OUTPUT, 11)


def _units(model: Any) -> list[nn.Module]:
    return [*model.blocks, model.head]


def _head(make: Callable[[Any], Any]) -> Callable[[Any, int, int, int], torch.Tensor]:
    """Return a loss of this rank's data and a head whose weight `make` returns."""

    def loss(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
        hidden = model(batch(step, micro, rank))
        weight, bias = make(model.head.weight), whole(model.head.bias)
        return F.linear(hidden, weight, bias).square().mean()

    return loss


def _first(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Use the head before the forward of the model."""
    weight = whole(model.head.weight)
    return F.linear(model(batch(step, micro, rank)), weight).square().mean()


def _in_chunks(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    losses = [
        F.linear(rows, whole(model.head.weight), whole(model.head.bias)).square().sum()
        for rows in model(batch(step, micro, rank)).chunk(2)
    ]
    return torch.stack(losses).mean()


def _also_of_units(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Use a weight of the first block, which the forward uses too, and the head as a module."""
    hidden = model.head(model(batch(step, micro, rank)))
    weight = whole(model.blocks[0].up.weight)
    return hidden.square().mean() + weight.tanh().mul(batch(step, micro, rank).mean()).sum()


def _on_some_ranks(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Gather the head on every rank, and use it on one."""
    weight = whole(model.head.weight)
    hidden = model(batch(step, micro, rank))
    return (F.linear(hidden, weight) if rank == (step + micro) % 2 else hidden).square().mean()


def _dropped(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Look at weights that no loss uses, before the forward and in between."""
    assert whole(model.blocks[1].up.weight).norm() > 0
    hidden = model(batch(step, micro, rank))
    whole(model.output.weight).square().mean()
    return _also_of_units(model, step, micro, rank) + hidden.mean()


def _recomputed(use_reentrant: bool) -> Callable[[Any, int, int, int], torch.Tensor]:
    def loss(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
        def head(hidden: torch.Tensor) -> torch.Tensor:
            return F.linear(hidden, whole(model.head.weight)).square().mean()

        hidden = model(batch(step, micro, rank))
        made: torch.Tensor = checkpoint(head, hidden, use_reentrant=use_reentrant)
        return made

    return loss


def _penalty(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Weigh a penalty of all weights with data of this rank."""
    penalty: Any = sum(whole(p.square().mean()) for p in model.parameters())
    data = batch(step, micro, rank)
    return model.head(model(data)).square().mean() + penalty * data.square().mean()


def _equal_on_ranks(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    penalty: Any = sum(whole(p.abs().sum()) for p in model.parameters())
    return model.head(model(batch(step, micro, rank))).square().mean() + 0.01 * penalty


def _in_place(weight: Any) -> Any:
    scaled = weight * 2.0
    scaled.add_(1.0).mul_(0.5)
    return whole(scaled)


def _gated(weight: Any) -> Any:
    return whole(torch.where(weight > 0, weight, weight * 0.5) + weight.sigmoid() * weight)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "whole": whole,
    "cast": lambda w: whole(w.double().tanh()).float(),
    "changed in place": _in_place,
    "gated": _gated,
    "a view": lambda w: whole(w.t()).t().contiguous(),
    "split": lambda w: torch.cat([whole(part) for part in w.chunk(2)]),
    "an operation on the whole": lambda w: whole(w @ torch.linalg.pinv(w.detach()) @ w),
}


class _Own(Stack):
    """A stack whose root applies the weight of a unit itself."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(super().run_blocks(x), whole(self.extra.weight))
        return x + self.extra(x)


_STEP = {"num_micro": 2, "set_to_none": True, "optimizer": adamw}

DIRECT: dict[str, Pattern] = {
    **{
        f"a head outside its module, {name}": Pattern(_WithHead, _units, loss=_head(make))
        for name, make in MAKERS.items()
    },
    "a head outside its module, no_sync": Pattern(
        _WithHead, _units, loss=_head(whole), sync="no_sync", **_STEP
    ),
    "a head outside its module, accumulation": Pattern(
        _WithHead, _units, loss=_head(whole), clips=True, **_STEP
    ),
    "a head gathered before the forward": Pattern(_WithHead, _units, loss=_first, **_STEP),
    "a head in chunks": Pattern(_WithHead, _units, loss=_in_chunks, **_STEP),
    "a head on some ranks": Pattern(_WithHead, _units, loss=_on_some_ranks, **_STEP),
    "weights used by units and by the loss": Pattern(_WithHead, _units, loss=_also_of_units),
    "weights looked at": Pattern(_WithHead, _units, loss=_dropped),
    "a head recomputed, reentrant": Pattern(_WithHead, _units, loss=_recomputed(True)),
    "a head recomputed, non-reentrant": Pattern(_WithHead, _units, loss=_recomputed(False)),
    "a penalty of weights": Pattern(_WithHead, _units, loss=_penalty),
    "a penalty of weights, equal on ranks": Pattern(_WithHead, _units, loss=_equal_on_ranks),
    "a weight used inside the root's forward": Pattern(
        _Own, lambda m: [*m.blocks, m.extra], loss=mean_square
    ),
}
