"""Weights are in place whenever a backward computes with them, or an error names the unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    backward_both,
    batch,
    gradient_error,
    loss_of,
    own_loss,
    pair,
    said,
    wrap,
)
from tests.reference.models import Block, Stack


class Answer:
    """A plain object, of which torch knows nothing."""

    def __init__(self, value: torch.Tensor) -> None:
        self.inner = {"value": [value]}


class Slotted:
    """A plain object without a dictionary."""

    __slots__ = ("answer",)

    def __init__(self, value: torch.Tensor) -> None:
        self.answer = Answer(value)


class ObjectBlock(Block):
    """A unit that returns a plain object."""

    def forward(self, x: torch.Tensor) -> Any:
        return Slotted(super().forward(x))


class ClosureBlock(Block):
    """A unit that returns its output where nobody can find it."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return lambda: y


class Unpacking(Stack):
    """Blocks that return something else than a tensor."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            x = y() if callable(y) else y.answer.inner["value"][0]
        return x


def _train(plain: Any, model: Any, loss: Any = loss_of) -> float:
    """Largest error of gradients over three steps; the pool has a plan after two of them."""
    errors = []
    for step in range(3):
        plain.zero_grad()
        model.zero_grad()
        backward_both(plain, model, step, loss)
        errors.append(gradient_error(model, plain))
    return max(errors)


@pytest.mark.parametrize("pool", [False, True], ids=["", "pool"])
@on_ranks(2, strategy=STRATEGIES)
def test_units_that_return_plain_objects_train_like_one_process(strategy: str, pool: bool) -> None:
    plain, model = pair(
        lambda: Unpacking(block=ObjectBlock), sharding_strategy=strategy, enable_trace_pool=pool
    )
    assert _train(plain, model) < 1e-6


def _hiding() -> Unpacking:
    return Unpacking(block=ClosureBlock)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("pool", [False, True], ids=["", "pool"])
@on_ranks(2)
def test_outputs_that_cannot_be_found_are_an_error_that_names_the_unit_at_zero_3(
    pool: bool, frozen: bool
) -> None:
    model = wrap(_hiding(), enable_trace_pool=pool)
    model.blocks.requires_grad_(not frozen)
    for _ in range(1 if frozen else 3):
        message = said(RuntimeError, lambda: own_loss(model).backward())
        assert "blocks.2 (ClosureBlock)" in message
        assert "returns tensors inside something that is not searched" in message


@on_ranks(2, strategy=STRATEGIES[:-1])
def test_outputs_that_cannot_be_found_change_nothing_below_zero_3(strategy: str) -> None:
    assert _train(*pair(_hiding, sharding_strategy=strategy)) < 1e-6


def _penalty(model: Any, rank: int, step: int) -> torch.Tensor:
    x = batch(rank, step).requires_grad_(True)
    loss = model(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


@on_ranks(2, strategy=STRATEGIES[:-1])
def test_a_gradient_penalty_is_that_of_one_process_below_zero_3(strategy: str) -> None:
    assert _train(*pair(sharding_strategy=strategy), _penalty) < 1e-6


@pytest.mark.parametrize("pool", [False, True], ids=["", "pool"])
@on_ranks(2)
def test_a_double_backward_is_an_error_that_names_the_unit_at_zero_3(pool: bool) -> None:
    plain, model = pair(enable_trace_pool=pool)
    message = said(RuntimeError, lambda: _penalty(model, dist.get_rank(), 0))
    error = _train(plain, model)
    assert message.startswith("the root (Stack) is in a backward with create_graph=True")
    assert error < 1e-6


class Leaking(Block):
    """A unit that returns one of its weights, or a view of it, beside its output."""

    def __init__(self, what: str = "view") -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> Any:
        weight = self.up.weight
        returned = {
            "weight": weight,
            "view": weight.t(),
            "detached": weight.detach()[1:],
            "copy": weight.clone(),
        }
        return super().forward(x), {"regularized": [returned[self.what]]}


class Regularized(Stack):
    """Adds up squares of what its blocks return."""

    def __init__(self, what: str) -> None:
        super().__init__(block=lambda _: Leaking(what))

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        penalty = torch.zeros(())
        for block in self.blocks:
            x, extra = block(x)
            penalty = penalty + extra["regularized"][0].square().sum()
        return x + penalty


@pytest.mark.parametrize("pool", [False, True], ids=["", "pool"])
@on_ranks(2, what=("weight", "view", "detached"))
def test_a_unit_that_returns_its_weight_is_an_error_that_names_both_at_zero_3(
    pool: bool, what: str
) -> None:
    plain, model = pair(lambda: Regularized("copy"), enable_trace_pool=pool)
    assert _train(plain, model) < 1e-5
    for block in model.blocks:
        block.what = what
    for trains in (False, True):
        with torch.set_grad_enabled(trains):
            message = said(RuntimeError, lambda: model(batch(0)))
        assert "the forward of blocks.0 (Leaking) returns its weight up.weight" in message


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("copy", {}),
        ("view", {"sharding_strategy": "optim_grads"}),
        ("view", {"reshard_after_forward": False}),
    ],
)
@on_ranks(2)
def test_a_unit_may_return_a_copy_of_its_weight_or_one_that_stays(
    what: str, options: dict[str, Any]
) -> None:
    assert _train(*pair(lambda: Regularized(what), **options)) < 1e-5


class TiedHead(Regularized):
    """The root holds the weight that its only block returns: it is that of its head as well."""

    def __init__(self) -> None:
        super().__init__("weight")
        self.blocks = self.blocks[:1]
        self.tied = self.blocks[0].up.weight


@on_ranks(2)
def test_a_block_may_return_a_weight_that_the_root_holds_as_well() -> None:
    assert _train(*pair(TiedHead)) < 1e-5
