"""Hooks on sharded parameters: once per synchronized backward, on final gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    fp64_pair,
    held_error,
    mesh_of,
    own_loss,
    plain_loss,
    said,
    weight_error,
    wrap,
)
from tests.ranks import RankPools
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


def _pair(build: Any, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = build().double()
    torch.manual_seed(0)
    return plain, wrap(build().double(), **options)


def stepped_in_backward(
    build: Any, kind: str, to_none: bool, **options: Any
) -> dict[str, list[float]]:
    """By strategy: errors of weights after steps in backwards of one and of two micro-batches."""
    found = {}
    for strategy in STRATEGIES:
        plain, model = _pair(build, sharding_strategy=strategy, **options)
        _step_in_backward(model, kind, to_none=to_none)
        optimizer = KINDS[kind](plain.parameters())
        found[strategy] = []
        for step in range(4):
            defers = step % 2 == 1
            for micro in range(1 + defers):
                plain_loss(plain, 10 * step + micro).backward()
                waits = defers and micro == 0
                with model.no_sync() if waits else contextlib.nullcontext():
                    own_loss(model, 10 * step + micro).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            found[strategy].append(weight_error(model, plain))
            with torch.no_grad():
                x = batch(0, step, dtype=torch.float64)
                found[strategy].append(float((model(x) - plain(x)).abs().max()))
    return found


def _reentrant() -> nn.Module:
    return Checkpointed(use_reentrant=True)


@pytest.mark.parametrize(
    ("build", "kind", "to_none", "options"),
    [
        pytest.param(Stack, "adamw", True, {}, id="adamw"),
        pytest.param(UsedTwice, "momentum", False, {"enable_trace_pool": True}, id="twice, zeros"),
        pytest.param(_reentrant, "adamw", True, {"reshard_after_forward": False}, id="recomputed"),
    ],
)
def test_an_optimizer_in_the_backward_trains_as_after_it(
    pools: RankPools, build: Any, kind: str, to_none: bool, options: dict[str, Any]
) -> None:
    for found in pools(2).run(stepped_in_backward, build, kind, to_none, **options):
        for strategy, errors in found.items():
            assert max(errors) < 1e-9, (strategy, errors)


def calls(shape: tuple[int, ...]) -> dict[str, tuple[list[int], bool, bool]]:
    """By strategy: calls after each backward, whether gradients were final, and left as before."""
    found = {}
    for strategy in STRATEGIES:
        plain, model = fp64_pair(strategy, mesh=mesh_of(*shape))
        expected = dict(zip(model.parameters(), plain.parameters(), strict=True))
        num_calls, is_final = 0, True

        def note(param: Any, expected: Any = expected) -> None:
            nonlocal num_calls, is_final
            num_calls += 1
            # Collective: every rank is called, also one without rows.
            full = param.grad.full_tensor()
            is_final &= torch.allclose(full, expected[param].grad) and not torch.is_grad_enabled()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(note)
        counts = []
        for step, waits in enumerate([False, True, False, True]):
            plain_loss(plain, step).backward()
            with model.no_sync() if waits else contextlib.nullcontext():
                own_loss(model, step).backward()
            counts.append(num_calls)
        model.reduce_grad()
        counts.append(num_calls)
        # A backward that no parameter is part of.
        x = batch(0, dtype=torch.float64).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        counts.append(num_calls)
        left = all((p.grad is None) is (p.to_local().numel() == 0) for p in model.parameters())
        found[strategy] = counts, is_final, left
    return found


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_hooks_are_called_on_every_rank_with_the_reduced_gradient(
    pools: RankPools, shape: tuple[int, ...]
) -> None:
    count = len(list(Stack().parameters()))
    for found in pools(shape[0] * (shape[1] if len(shape) > 1 else 1)).run(calls, shape):
        for strategy, (counts, is_final, left) in found.items():
            assert counts == [count, count, 2 * count, 2 * count, 3 * count, 3 * count], strategy
            assert is_final, strategy
            assert left, strategy


def of_some_units(strategy: str) -> tuple[set[str], set[str]]:
    """Parameters whose hooks are called in a backward of one unit, and then of all."""
    model = _pair(Stack, sharding_strategy=strategy)[1]
    called: set[str] = set()
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: called.add(name))
    model.blocks[1](torch.ones(2, 7, dtype=torch.float64)).sum().backward()
    some = set(called)
    called.clear()
    own_loss(model, 0).backward()
    return some, called


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_of_what_no_gradient_reached_are_not_called(pools: RankPools, strategy: str) -> None:
    names = {name for name, _ in Stack().named_parameters()}
    for some, every in pools(2).run(of_some_units, strategy):
        assert some == {name for name in names if name.startswith("blocks.1.")}
        assert every == names


def carried_over(meta: bool) -> tuple[list[int], float, str, str]:
    """Calls of hooks from before sharding, before and after removal; what refusals say."""
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
    error = 0.0 if called[0] is model.weight else 1.0
    model.weight.register_hook(lambda grad: 2 * grad)
    late = said(RuntimeError, lambda: model(torch.ones(2, 4)))
    with torch.no_grad():
        model(torch.ones(2, 4))
    hooked = nn.Linear(4, 4)
    hooked.bias.register_hook(lambda grad: 2 * grad)
    return counts, error, late, said(ValueError, lambda: wrap(hooked, []))


@pytest.mark.parametrize("meta", [False, True])
def test_hooks_from_before_sharding_are_carried_over_or_rejected(
    pools: RankPools, meta: bool
) -> None:
    for counts, error, late, early in pools(2).run(carried_over, meta):
        assert counts == [1, 1]
        assert not error
        assert "weight of Linear/0 has a hook of register_hook()" in late
        assert "parameter bias has a hook of register_hook()" in early


def hook_that_raises() -> list[float]:
    """Errors of gradients of steps after one whose hook raised."""
    plain, model = fp64_pair()

    def fail(param: torch.Tensor) -> None:
        raise KeyError("planned")

    handle = next(iter(model.parameters())).register_post_accumulate_grad_hook(fail)
    with contextlib.suppress(KeyError):
        own_loss(model, 0).backward()
    handle.remove()
    plain_loss(plain, 0).backward()
    errors = []
    for step in range(1, 3):
        plain_loss(plain, step).backward()
        own_loss(model, step).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        errors += [held_error(p.grad, q.grad) for p, q in pairs if p.grad is not None]
    return errors


def test_a_hook_that_raises_takes_no_gradient_with_it(pools: RankPools) -> None:
    for errors in pools(2).run(hook_that_raises):
        assert max(errors) < 1e-12
