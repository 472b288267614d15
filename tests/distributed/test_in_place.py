"""Units whose inputs and outputs are changed in place, by themselves or by who called them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    backward_both,
    batch,
    gradient_error,
    pair,
    said,
    wrap,
)
from tests.reference.models import Formula

WIDTH = 4


def _unit(what: Callable[..., Any]) -> Formula:
    """Does something with its input, and has weights."""
    scale = nn.Parameter(torch.full((WIDTH,), 0.8))
    return Formula(what, layer=nn.Linear(WIDTH, WIDTH), scale=scale)


def _model(what: Callable[..., Any], call: Callable[..., Any]) -> Formula:
    """Units in a row; `call` runs one of them."""

    def forward(model: Any, x: torch.Tensor) -> Any:
        x = model.first(x)
        for unit in model.units:
            x = torch.tanh(call(unit, x.sin()))
        return model.last(x)

    units = nn.ModuleList(_unit(what) for _ in range(5))
    first, last = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
    return Formula(forward, first=first, units=units, last=last)


def _relu_first(self: Any, x: torch.Tensor, other: Any = None) -> torch.Tensor:
    before = x * 0.5
    return self.layer(x.relu_()) + before


def _in_pieces(self: Any, x: torch.Tensor, other: Any = None) -> torch.Tensor:
    x[:, 1:].mul_(0.7)
    x += self.scale * self.layer(x.clone())
    return x


def _scaled(self: Any, x: torch.Tensor, other: Any = None) -> torch.Tensor:
    return self.layer(x).mul_(self.scale)


def _view(self: Any, x: torch.Tensor, other: Any = None) -> torch.Tensor:
    return self.layer(x).view(-1, 2)


def _skipped(self: Any, x: torch.Tensor, other: Any = None) -> torch.Tensor:
    return x


def _second_only(self: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return self.layer(other.mul_(self.scale))


def _both(self: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    other.mul_(2)
    return self.layer(x) + other * self.scale


def _plainly(unit: Any, x: torch.Tensor) -> torch.Tensor:
    return unit(x)


def _residual(unit: Any, x: torch.Tensor) -> torch.Tensor:
    y = unit(x)
    return x + y


def _changed_after(unit: Any, x: torch.Tensor) -> torch.Tensor:
    y = unit(x)
    y.mul_(0.5)
    y += 1
    return x * y.reshape(x.shape)


def _part_changed_after(unit: Any, x: torch.Tensor) -> torch.Tensor:
    y = unit(x)
    y[:, :1].mul_(0.5)
    return y + 0.1 * x.reshape(y.shape)


def _two_inputs(unit: Any, x: torch.Tensor) -> torch.Tensor:
    other = x.cos()
    return unit(x, other) + other


def _one_input_twice(unit: Any, x: torch.Tensor) -> torch.Tensor:
    return unit(x, x)


CASES = {
    "relu": (_relu_first, _plainly),
    "relu of a residual": (_relu_first, _residual),
    "pieces": (_in_pieces, _plainly),
    "pieces of a residual, and then by the caller": (_in_pieces, _changed_after),
    "its output": (_scaled, _part_changed_after),
    "a view it returns": (_view, _changed_after),
    "the input it returns": (_skipped, _changed_after),
    "the second input alone": (_second_only, _two_inputs),
    "one of two inputs": (_both, _two_inputs),
    "one input given twice": (_both, _one_input_twice),
}


def _gathered(model: Any) -> list[int]:
    """How many units are gathered, whenever one is about to be used."""
    units = [unit_of(unit) for unit in model.units]
    counts = [0]

    def counting(ready: Callable[[], None]) -> Callable[[], None]:
        def noted() -> None:
            ready()
            counts.append(sum(unit.is_unsharded for unit in units))

        return noted

    for unit in units:
        unit.wait_for_unshard = counting(unit.wait_for_unshard)  # type: ignore[method-assign]
    return counts


def _loss(model: Any, rank: int, step: int) -> torch.Tensor:
    x = batch(rank, step, dtype=torch.float64)[:, :WIDTH].clone()
    return model(x).square().mean()


@on_ranks(2, strategy=STRATEGIES, case=CASES)
def test_in_place_operations_around_units_train_as_in_a_plain_model(
    strategy: str, case: str
) -> None:
    def units(model: Any) -> list[nn.Module]:
        return [model.first, *model.units, model.last]

    plain, model = pair(lambda: _model(*CASES[case]).double(), units, sharding_strategy=strategy)
    gathered = _gathered(model)
    for step in range(2):
        backward_both(plain, model, step, _loss)
        assert gradient_error(model, plain) < 1e-12
    # One at work, one ahead; none waits for the end of the backward.
    assert strategy != "optim_grads_params" or max(gathered) <= 3


@on_ranks(2)
def test_a_leaf_that_requires_a_gradient_is_still_not_changed() -> None:
    model = wrap(_unit(_relu_first), [])
    leaf = torch.ones(2, WIDTH, requires_grad=True)
    assert "a leaf Variable that requires grad" in said(RuntimeError, lambda: model(leaf))
