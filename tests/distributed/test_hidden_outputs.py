"""Weights are in place whenever a backward computes with them, or an error names the unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.wrapping import STRATEGIES, batch, held_error, said, wrap
from tests.ranks import RankPools
from tests.reference.models import Block, Stack

ZERO_3 = "optim_grads_params"


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

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(kind() for _ in range(3))

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            x = y() if callable(y) else y.answer.inner["value"][0]
        return x


def _pair(build: Any, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    return plain, wrap(build(), **options)


def _grad_error(model: Any, plain: Any) -> float:
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    held = [(a, b) for a, b in pairs if a.to_local().numel()]
    assert all(a.grad is not None for a, _ in held)
    return max((held_error(a.grad, b.grad) for a, b in held), default=0.0)


def _train(plain: Any, model: Any, loss: Any, steps: int = 3) -> float:
    """Largest error of gradients over some steps; the pool has a plan after two of them."""
    errors, size = [], dist.get_world_size()
    for step in range(steps):
        plain.zero_grad()
        model.zero_grad()
        for rank in range(size):
            (loss(plain, step, rank) / size).backward()
        loss(model, step, dist.get_rank()).backward()
        errors.append(_grad_error(model, plain))
    return max(errors)


def _square(model: Any, step: int, rank: int) -> torch.Tensor:
    return model(batch(rank, step)).square().mean()


def error_with_objects(strategy: str, pool: bool) -> float:
    """Of gradients, where units return plain objects."""
    plain, model = _pair(
        lambda: Unpacking(ObjectBlock), sharding_strategy=strategy, enable_trace_pool=pool
    )
    return _train(plain, model, _square)


@pytest.mark.parametrize("pool", [False, True], ids=["", "pool"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_units_that_return_plain_objects_train_like_one_process(
    pools: RankPools, strategy: str, pool: bool
) -> None:
    assert max(pools(2).run(error_with_objects, strategy, pool)) < 1e-6


def hidden_outputs(strategy: str, pool: bool, frozen: bool) -> Any:
    """What the backward says, or its error, where outputs cannot be found."""
    plain, model = _pair(
        lambda: Unpacking(ClosureBlock), sharding_strategy=strategy, enable_trace_pool=pool
    )
    if frozen:
        for block in model.blocks:
            block.requires_grad_(False)
        return said(RuntimeError, lambda: _square(model, 0, dist.get_rank()).backward())
    if strategy == ZERO_3:
        losses = (lambda: _square(model, 0, dist.get_rank()).backward() for _ in range(3))
        return [said(RuntimeError, loss) for loss in losses]
    return _train(plain, model, _square)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("pool", [False, True], ids=["", "pool"])
def test_outputs_that_cannot_be_found_are_an_error_that_names_the_unit_at_zero_3(
    pools: RankPools, pool: bool, frozen: bool
) -> None:
    for said_ in pools(2).run(hidden_outputs, ZERO_3, pool, frozen):
        for message in [said_] if frozen else said_:
            assert "blocks.2 (ClosureBlock)" in message
            assert "returns tensors inside something that is not searched" in message


@pytest.mark.parametrize("strategy", STRATEGIES[:-1])
def test_outputs_that_cannot_be_found_change_nothing_below_zero_3(
    pools: RankPools, strategy: str
) -> None:
    assert max(pools(2).run(hidden_outputs, strategy, False, False)) < 1e-6


def _penalty(model: Any, step: int, rank: int) -> torch.Tensor:
    x = batch(rank, step).requires_grad_(True)
    loss = model(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


def double_backward(strategy: str, pool: bool) -> Any:
    """What a gradient penalty says, or its error."""
    plain, model = _pair(Stack, sharding_strategy=strategy, enable_trace_pool=pool)
    if strategy == ZERO_3:
        message = said(RuntimeError, lambda: _penalty(model, 0, dist.get_rank()))
        return message, _train(plain, model, _square)
    return _train(plain, model, _penalty)


@pytest.mark.parametrize("strategy", STRATEGIES[:-1])
def test_a_gradient_penalty_is_that_of_one_process_below_zero_3(
    pools: RankPools, strategy: str
) -> None:
    assert max(pools(2).run(double_backward, strategy, False)) < 1e-6


@pytest.mark.parametrize("pool", [False, True], ids=["", "pool"])
def test_a_double_backward_is_an_error_that_names_the_unit_at_zero_3(
    pools: RankPools, pool: bool
) -> None:
    for message, error in pools(2).run(double_backward, ZERO_3, pool):
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
        super().__init__()
        self.blocks = torch.nn.ModuleList(Leaking(what) for _ in range(3))

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        penalty = torch.zeros(())
        for block in self.blocks:
            x, extra = block(x)
            penalty = penalty + extra["regularized"][0].square().sum()
        return x + penalty


def error_with_returned_weights(what: str, **options: Any) -> float:
    """Of gradients, where units return weights of theirs."""
    plain, model = _pair(lambda: Regularized(what), **options)
    return _train(plain, model, _square)


def said_of_returned_weights(what: str, pool: bool) -> list[str]:
    """What forwards say at ZeRO-3, in training and in evaluation, after some good steps."""
    plain, model = _pair(lambda: Regularized("copy"), enable_trace_pool=pool)
    assert _train(plain, model, _square) < 1e-5
    for block in model.blocks:
        block.what = what
    with torch.no_grad():
        evaluated = said(RuntimeError, lambda: model(batch(0)))
    return [said(RuntimeError, lambda: model(batch(0))), evaluated]


@pytest.mark.parametrize("pool", [False, True], ids=["", "pool"])
def test_a_unit_that_returns_its_weight_is_an_error_that_names_both_at_zero_3(
    pools: RankPools, pool: bool
) -> None:
    for what in ("weight", "view", "detached"):
        for messages in pools(2).run(said_of_returned_weights, what, pool):
            for message in messages:
                assert "the forward of blocks.0 (Leaking) returns its weight up.weight" in message


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("copy", {}),
        ("view", {"sharding_strategy": "optim_grads"}),
        ("view", {"reshard_after_forward": False}),
    ],
)
def test_a_unit_may_return_a_copy_of_its_weight_or_one_that_stays(
    pools: RankPools, what: str, options: dict[str, Any]
) -> None:
    assert max(pools(2).run(error_with_returned_weights, what, **options)) < 1e-5


class TiedHead(Stack):
    """Returns the weight of its head, which is that of a block as well: the root holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Leaking("weight")])
        self.tied = self.blocks[0].up.weight

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        x, extra = self.blocks[0](x)
        return x + extra["regularized"][0].square().sum()


def error_with_a_tied_weight() -> float:
    """Of gradients, where a block returns a weight that the root holds."""
    return _train(*_pair(TiedHead), _square)


def test_a_block_may_return_a_weight_that_the_root_holds_as_well(pools: RankPools) -> None:
    assert max(pools(2).run(error_with_a_tied_weight)) < 1e-5
