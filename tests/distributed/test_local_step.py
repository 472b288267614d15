"""Optimizers that step this rank's rows as plain tensors, as torchao's low-bit ones do."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.cases import quick_only, quick_strategies
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import BF16, STRATEGIES, batch, error_message, wrap
from tests.reference.models import Stack


def _update(param: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor) -> None:
    momentum.copy_(0.9 * momentum + grad.float())
    param.copy_(param - 0.1 * momentum)


class LowBit(torch.optim.Optimizer):
    """SGD with momentum, in a module whose optimizers step local rows.

    Args:
        params: The parameters.
        compiled: Whether the update of a parameter is one compiled graph, as in torchao.
        fails: Whether each step raises an error after the first parameter.
        noise: Largest random number that a step adds.
    """

    def __init__(
        self, params: Any, *, compiled: bool = False, fails: bool = False, noise: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": 0.1})
        self.fails, self.noise = fails, noise
        self.update = _update
        if compiled:
            self.update = torch.compile(_update, backend="eager", fullgraph=True, dynamic=False)
        self.seen: list[type[torch.Tensor]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is None:
                continue
            self.seen.append(type(param.detach()))
            state = self.state[param]
            if not state:
                state["momentum"], state["step"] = torch.zeros_like(param), torch.tensor(0.0)
            state["step"] += 1
            self.update(param.detach(), param.grad, state["momentum"])
            param.add_(self.noise * torch.rand(1) if self.noise else 0.0)
            if self.fails:
                raise ArithmeticError("no step")
        return loss


LowBit.step.__module__ = "torchao.optim.adam"


def _train(model: Any, optimizer: Any, ranks: list[int], *, by_closure: bool = False) -> None:
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            losses = [model(batch(rank, step)).square().mean() for rank in ranks]
            loss = torch.stack(losses).mean()
            loss.backward()
            return loss

        if by_closure:
            assert optimizer.step(closure) is not None
        else:
            closure()
            optimizer.step()


def _built() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


@on_ranks(
    "number",
    number=quick_only((1, 2, 3), 3),
    strategy=quick_strategies(STRATEGIES),
    by_closure=quick_only((False, True), False),
)
def test_step_of_local_rows_matches_the_unsharded_step(
    number: int, strategy: str, by_closure: bool
) -> None:
    model, plain, beside = (
        wrap(_built(), sharding_strategy=strategy),
        _built(),
        nn.Parameter(torch.ones(3)),
    )
    optimizer = LowBit([*model.parameters(), beside])
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    _train(model, optimizer, [dist.get_rank()], by_closure=by_closure)
    _train(plain, expected, list(range(number)), by_closure=by_closure)
    wholes = [param.full_tensor() for param in model.parameters()]
    moments = [optimizer.state[p]["momentum"].full_tensor() for p in model.parameters()]
    assert set(optimizer.seen) == {torch.Tensor}
    assert beside not in optimizer.state
    assert all(float(optimizer.state[p]["step"]) == 3 for p in model.parameters())
    assert all(type(p) is type(next(model.parameters())) for p in optimizer.state)
    torch.testing.assert_close(wholes, list(plain.parameters()))
    known = [expected.state[p]["momentum_buffer"] for p in plain.parameters()]
    torch.testing.assert_close(moments, known)


@on_ranks(2)
def test_update_compiled_whole_steps_local_rows() -> None:
    torch._dynamo.reset()
    model, other = wrap(_built()), wrap(_built())
    _train(model, LowBit(model.parameters(), compiled=True), [dist.get_rank()])
    _train(other, LowBit(other.parameters()), [dist.get_rank()])
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    torch._dynamo.reset()
    assert all(torch.allclose(a.to_local(), b.to_local()) for a, b in pairs)


@on_ranks(2)
def test_local_step_reads_gradients_of_another_dtype_and_loads_its_state() -> None:
    model = wrap(_built(), mp_policy=BF16)
    again = wrap(_built(), mp_policy=BF16)
    first, second = LowBit(model.parameters()), LowBit(again.parameters())
    _train(model, first, [dist.get_rank()])
    again.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    _train(model, first, [dist.get_rank()])
    _train(again, second, [dist.get_rank()])
    pairs = list(zip(model.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


@on_ranks(2)
def test_optimizer_keeps_its_parameters_if_its_local_step_fails() -> None:
    model = wrap(_built())
    optimizer, params = LowBit(model.parameters(), fails=True), list(model.parameters())
    step = functools.partial(_train, model, optimizer, [dist.get_rank()])
    assert error_message(ArithmeticError, step) == "no step"
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))
    optimizer.fails = False
    _train(model, optimizer, [dist.get_rank()])
    assert {id(p) for p in optimizer.state} <= {id(p) for p in params}


@on_ranks(2, strategy=("no_shard", "optim_grads_params"))
def test_local_step_draws_random_numbers_only_where_one_rank_holds_the_rows(strategy: str) -> None:
    model = wrap(_built(), sharding_strategy=strategy)
    optimizer = LowBit(model.parameters(), noise=1e-3)
    message = error_message(RuntimeError, lambda: _train(model, optimizer, [dist.get_rank()]))
    if strategy == "no_shard":
        assert "LowBit cannot step sharded parameters: its step draws random numbers" in message
    else:
        assert message == "no error"
