"""Hooks on sharded parameters: once per synchronized backward, on final gradients."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    backward_both,
    batch,
    fp64_pair,
    gradient_error,
    mesh_of,
    own_loss,
    pair,
    plain_loss,
    said,
    weight_error,
    wrap,
)
from tests.reference.failing import fail, failing
from tests.reference.models import Checkpointed, Stack, UsedTwice

KINDS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def _step_in_backward(model: nn.Module, kind: str, *, to_none: bool = True) -> dict[Any, Any]:
    """An optimizer for every parameter, stepped by a hook."""
    optimizers = {param: KINDS[kind]([param]) for param in model.parameters()}

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad(set_to_none=to_none)

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)
    return optimizers


CASES: dict[str, tuple[Any, str, bool, dict[str, Any]]] = {
    "adamw": (Stack, "adamw", True, {}),
    "twice, zeros": (UsedTwice, "momentum", False, {"enable_trace_pool": True}),
    "recomputed": (
        partial(Checkpointed, use_reentrant=True),
        "adamw",
        True,
        {"reshard_after_forward": False},
    ),
}


@on_ranks(2, strategy=STRATEGIES, case=CASES)
def test_an_optimizer_in_the_backward_trains_as_after_it(strategy: str, case: str) -> None:
    """In backwards of one and of two micro-batches."""
    build, kind, to_none, options = CASES[case]
    plain, model = pair(lambda: build().double(), sharding_strategy=strategy, **options)
    _step_in_backward(model, kind, to_none=to_none)
    optimizer = KINDS[kind](plain.parameters())
    for step in range(4):
        defers = step % 2 == 1
        for micro in range(1 + defers):
            waits = defers and micro == 0
            with model.no_sync() if waits else contextlib.nullcontext():
                backward_both(plain, model, 10 * step + micro)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        assert weight_error(model, plain) < 1e-9
        with torch.no_grad():
            x = batch(0, step, dtype=torch.float64)
            assert float((model(x) - plain(x)).abs().max()) < 1e-9


@on_ranks("shape", shape=[(3,), (2, 2)], strategy=STRATEGIES)
def test_hooks_are_called_on_every_rank_with_the_reduced_gradient(
    shape: tuple[int, ...], strategy: str
) -> None:
    plain, model = fp64_pair(strategy, mesh=mesh_of(*shape))
    expected = dict(zip(model.parameters(), plain.parameters(), strict=True))
    called: list[bool] = []

    def note(param: Any) -> None:
        # Collective: every rank is called, also one without rows.
        is_final = torch.allclose(param.grad.full_tensor(), expected[param].grad)
        called.append(is_final and not torch.is_grad_enabled())

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(note)
    counts = []
    for step, waits in enumerate([False, True, False, True]):
        plain_loss(plain, step).backward()
        with model.no_sync() if waits else contextlib.nullcontext():
            own_loss(model, step).backward()
        counts.append(len(called))
    model.reduce_grad()
    counts.append(len(called))
    # A backward that no parameter is part of.
    x = batch(0, dtype=torch.float64).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    counts.append(len(called))
    assert counts == [len(expected) * times for times in (1, 1, 2, 2, 3, 3)]
    assert all(called)
    assert all((p.grad is None) is (p.to_local().numel() == 0) for p in model.parameters())


@on_ranks(2, strategy=STRATEGIES)
def test_hooks_of_what_no_gradient_reached_are_not_called(strategy: str) -> None:
    model = wrap(Stack().double(), sharding_strategy=strategy)
    called: set[str] = set()
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: called.add(name))
    names = {name for name, _ in model.named_parameters()}
    model.blocks[1](torch.ones(2, 7, dtype=torch.float64)).sum().backward()
    some = set(called)
    called.clear()
    own_loss(model, 0).backward()
    assert some == {name for name in names if name.startswith("blocks.1.")}
    assert called == names


@on_ranks(2, meta=[False, True])
def test_hooks_from_before_sharding_are_carried_over_or_rejected(meta: bool) -> None:
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        layer = nn.Linear(4, 4)
    called: list[Any] = []
    handle = layer.weight.register_post_accumulate_grad_hook(called.append)
    model = wrap(layer, [])
    counts = []
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        counts.append(len(called))
        handle.remove()
    model.weight.register_hook(lambda grad: 2 * grad)
    late = said(RuntimeError, lambda: model(torch.ones(2, 4)))
    with torch.no_grad():
        model(torch.ones(2, 4))
    hooked = nn.Linear(4, 4)
    hooked.bias.register_hook(lambda grad: 2 * grad)
    assert counts == [1, 1]
    assert called[0] is model.weight
    assert "weight of Linear/0 has a hook of register_hook()" in late
    assert "parameter bias has a hook of register_hook()" in said(
        ValueError, lambda: wrap(hooked, [])
    )


@on_ranks(2)
def test_a_hook_that_raises_takes_no_gradient_with_it() -> None:
    plain, model = fp64_pair()
    first = next(iter(model.parameters()))
    with failing(first.register_post_accumulate_grad_hook(fail)):
        own_loss(model, 0).backward()
    plain_loss(plain, 0).backward()
    for step in range(1, 3):
        backward_both(plain, model, step)
        assert gradient_error(model, plain) < 1e-12
