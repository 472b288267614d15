"""Optimizers that reduce over a parameter, where some ranks hold no rows of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.linalg import vector_norm

from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    backward_both,
    fp64_pair,
    on_mesh,
    own_loss,
    pair,
    plain_loss,
    said,
    train_both,
    weight_error,
    wrap,
)
from tests.reference.models import Formula, Stack

EXACT = 1e-12
"""In fp64: far above its rounding, far below any mistake."""


class _Optimizer(optim.Optimizer):
    """Steps one parameter after the other, as most published optimizers do."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, self.state[param], group["lr"])
        return loss

    def _update(self, param: Any, state: Any, lr: float) -> None:
        raise NotImplementedError


class Lamb(_Optimizer):
    """Adam's direction, scaled by norms."""

    def _update(self, param: Any, state: Any, lr: float) -> None:
        if not state:
            state["mean"] = torch.zeros_like(param)
            state["square"] = torch.zeros_like(param)
        state["mean"].mul_(0.9).add_(param.grad, alpha=0.1)
        state["square"].mul_(0.99).addcmul_(param.grad, param.grad, value=0.01)
        update = state["mean"] / state["square"].sqrt().add(1e-3)
        ratio = param.norm() / update.norm().clamp(min=1e-3)
        param.sub_(update * ratio, alpha=lr)


class Lars(_Optimizer):
    """Gradient descent at a rate of norms that are looked at on the host."""

    def _update(self, param: Any, state: Any, lr: float) -> None:
        del state
        of_param, of_grad = torch.norm(param).item(), torch.norm(param.grad).item()
        rate = of_param / (of_grad + 1e-3) if of_param > 0 and of_grad > 0 else 1.0
        param.add_(param.grad, alpha=-lr * rate)


class Adafactor(_Optimizer):
    """Second moments of rows and columns, made as plain tensors and as tensors of the gradient."""

    def _update(self, param: Any, state: Any, lr: float) -> None:
        square = param.grad.square() + 1e-6
        if param.ndim < 2:
            second = square
        else:
            if not state:
                state["rows"] = torch.zeros(param.shape[:-1], dtype=param.dtype)
                state["columns"] = param.grad.new_zeros(param.shape[:-2] + param.shape[-1:])
            state["rows"].mul_(0.9).add_(square.mean(-1), alpha=0.1)
            state["columns"].mul_(0.9).add_(square.mean(-2), alpha=0.1)
            rows = (state["rows"] / state["rows"].mean(-1, keepdim=True)).unsqueeze(-1)
            second = rows * state["columns"].unsqueeze(-2)
        update = param.grad * second.rsqrt()
        update.div_(max(1.0, float(update.norm()) / param.numel() ** 0.5))
        param.add_(update, alpha=-lr)


class Came(_Optimizer):
    """Lists of tensors of all shapes at once, and a matrix product."""

    def _update(self, param: Any, state: Any, lr: float) -> None:
        if not state:
            state["mean"] = torch.zeros_like(param)
        means, norms = [state["mean"]], torch._foreach_norm([param.grad])
        torch._foreach_lerp_(means, [param.grad], weight=0.1)
        whole = means[0] @ means[0].T @ means[0] if param.ndim == 2 else means[0].clone()
        updates = torch._foreach_div([whole], [norm + 1e-3 for norm in norms])
        torch._foreach_add_([param], updates, alpha=-lr)


class Sam(_Optimizer):
    """Two steps with a backward between them, of which torch's hooks know nothing."""

    @torch.no_grad()
    def first_step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        norms = torch.stack([vector_norm(p.grad) for p in params if p.grad is not None])
        for param in params:
            if param.grad is not None:
                self.state[param]["old"] = param.detach().clone()
                param.add_(param.grad / vector_norm(norms), alpha=0.1)

    def _update(self, param: Any, state: Any, lr: float) -> None:
        param.copy_(state["old"])
        param.add_(param.grad / param.grad.norm().clamp(min=1e-3), alpha=-lr)


CLASSES: list[Any] = [Lamb, Lars, Adafactor, Came, optim.Adafactor]


@on_ranks(3, kind=CLASSES, strategy=["optim_grads_params"])
def test_an_optimizer_that_takes_a_norm_of_each_parameter_steps_like_the_whole(
    kind: Any, strategy: str
) -> None:
    plain, sharded = fp64_pair(strategy)
    optimizers = kind(plain.parameters()), kind(sharded.parameters())
    train_both(plain, sharded, optimizers, range(3))
    assert weight_error(sharded, plain) < EXACT


@on_ranks(3)
def test_a_rank_without_rows_of_the_whole_model_steps_with_the_others() -> None:
    plain, sharded = pair(lambda: nn.Linear(5, 2, bias=False).double(), lambda model: [])
    optimizers = Lamb(plain.parameters()), Lamb(sharded.parameters())
    train_both(plain, sharded, optimizers, range(3))
    assert weight_error(sharded, plain) < EXACT


@on_ranks(4, kind=CLASSES[:2])
def test_so_it_does_where_rows_are_replicated(kind: Any) -> None:
    plain, sharded = pair(lambda: Stack().double(), **on_mesh("HSDP 2x2"))
    optimizers = kind(plain.parameters()), kind(sharded.parameters())
    train_both(plain, sharded, optimizers, range(2))
    assert weight_error(sharded, plain) < EXACT


@on_ranks(3)
def test_a_gradient_that_comes_within_the_step_counts_and_one_that_is_dropped_does_not() -> None:
    plain, sharded = fp64_pair()
    for model, loss_of in ((plain, plain_loss), (sharded, own_loss)):
        optimizer = Lamb(model.parameters())

        def closure(model: Any = model, loss_of: Any = loss_of, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        optimizer.zero_grad()
        optimizer.step()
    assert weight_error(sharded, plain) < EXACT


@on_ranks(3)
def test_methods_beside_step_find_what_step_does() -> None:
    plain, sharded = fp64_pair()
    optimizers = Sam(plain.parameters()), Sam(sharded.parameters())
    for step in range(3):
        for do in (Sam.first_step, Sam.step):
            backward_both(plain, sharded, step)
            for optimizer in optimizers:
                do(optimizer)
                optimizer.zero_grad()
    assert weight_error(sharded, plain) < EXACT


@on_ranks(3)
def test_a_parameter_that_is_not_used_has_no_gradient_on_any_rank() -> None:
    def build() -> Any:
        return Formula(
            lambda self, x: self.used(x), used=nn.Linear(5, 5), other=nn.Linear(5, 5)
        ).double()

    plain, sharded = pair(build, lambda model: [model.used, model.other])
    optimizers = Lamb(plain.parameters()), Lamb(sharded.parameters())
    train_both(plain, sharded, optimizers, range(2))
    assert weight_error(sharded, plain) < EXACT


class _Random(_Optimizer):
    def _update(self, param: Any, state: Any, lr: float) -> None:
        param.sub_(torch.rand(param.shape), alpha=lr)


class _Unknown(_Optimizer):
    def _update(self, param: Any, state: Any, lr: float) -> None:
        param.to_sparse()


@on_ranks(2)
def test_what_cannot_step_shards_is_rejected_by_name() -> None:
    for kind, why in ((_Random, "draws random numbers"), (_Unknown, "layout")):
        model = wrap(Stack())
        optimizer = kind(model.parameters())
        own_loss(model, 0).backward()
        text = said(RuntimeError, optimizer.step)
        assert f"{kind.__name__} cannot step sharded parameters" in text and why in text, text


@on_ranks(3)
def test_elementwise_optimizers_find_no_gradient_without_rows() -> None:
    found = []

    class Spy(optim.AdamW):
        skips_empty_shards = True

        def _init_group(self, group: Any, *lists: Any) -> Any:
            result = super()._init_group(group, *lists)
            found.extend(param.to_local().numel() for param in lists[0])
            return result

    model = wrap(Stack())
    optimizer = Spy(model.parameters())
    own_loss(model, 0).backward()
    optimizer.step()
    assert found and all(found)
    assert any(param.grad is None for param in model.parameters())
