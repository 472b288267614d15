"""After an exception, or a forward whose backward never came, nothing stale is used or trained."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_v2 import checkpoint
from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    fp64_pair,
    held_error,
    own_loss,
    plain_loss,
    said,
    train_both,
    weight_error,
    wrap,
)
from tests.ranks import RankPools
from tests.reference.models import Skipping

EXACT = 1e-12


class Planned(Exception):
    """Raised on purpose."""


def _raise(*args: Any) -> None:
    raise Planned


def _fail_when_it_comes_back(module: Any, args: Any, output: torch.Tensor) -> None:
    output.register_hook(_raise)


def _fail_in_forward(model: Any) -> None:
    handle = model.blocks[1].register_forward_pre_hook(_raise)
    with contextlib.suppress(Planned):
        own_loss(model, 7)
    handle.remove()


def _fail_in_backward(model: Any) -> None:
    handle = model.blocks[1].register_forward_hook(_fail_when_it_comes_back)
    with contextlib.suppress(Planned):
        own_loss(model, 7).backward()
    handle.remove()


def _leave_a_forward(model: Any) -> None:
    own_loss(model, 7)


INTERRUPTIONS = {
    "exception in a forward": _fail_in_forward,
    "exception in a backward": _fail_in_backward,
    "forward without backward": _leave_a_forward,
}


def _sgd(*models: Any) -> list[Any]:
    return [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]


def grads_of_the_second_graph(strategy: str, options: dict[str, Any]) -> float:
    """Two graphs; the backward of one fails, the other's is right."""
    plain, model = fp64_pair(strategy, **options)
    handle = model.blocks[1].register_forward_hook(_fail_when_it_comes_back)
    fails = own_loss(model, 0)
    handle.remove()
    works = own_loss(model, 1)
    with contextlib.suppress(Planned):
        fails.backward()
    model.zero_grad()
    works.backward()
    plain_loss(plain, 1).backward()
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    assert all(a.grad is not None for a, _ in pairs if a.to_local().numel())
    return max(held_error_of_grad(a, b) for a, b in pairs)


def held_error_of_grad(mine: Any, theirs: Any) -> float:
    """Largest difference of the rows of a gradient held here."""
    return 0.0 if mine.grad is None else held_error(mine.grad, theirs.grad)


@pytest.mark.parametrize("options", [{}, {"enable_trace_pool": True}], ids=["", "pool"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_backward_of_another_graph_after_a_failed_one_is_right(
    pools: RankPools, strategy: str, options: dict[str, Any]
) -> None:
    assert max(pools(2).run(grads_of_the_second_graph, strategy, options)) < EXACT


def weights_after_load(strategy: str, kind: str, folder: str) -> tuple[float, float, float]:
    """Errors of an evaluation and of the weights after a load, and of a training after it."""
    plain, model = fp64_pair(strategy)
    optimizers = _sgd(plain, model)
    train_both(plain, model, optimizers, range(2))
    checkpoint.save(folder, model, optimizers[1])
    theirs = [p.detach().clone() for p in plain.parameters()]
    state = optimizers[0].state_dict()
    state = {
        **state,
        "state": {k: {n: v.clone() for n, v in s.items()} for k, s in state["state"].items()},
    }
    train_both(plain, model, optimizers, range(2, 4))
    INTERRUPTIONS[kind](model)
    checkpoint.load(folder, model, optimizers[1])
    with torch.no_grad():
        for param, value in zip(plain.parameters(), theirs, strict=True):
            param.copy_(value)
    optimizers[0].load_state_dict(state)
    with torch.no_grad():
        evaluation = float((own_loss(model, 9) - own_loss(plain, 9)).abs())
    loaded = weight_error(model, plain)
    train_both(plain, model, optimizers, range(4, 6))
    return evaluation, loaded, weight_error(model, plain)


@pytest.mark.parametrize("kind", INTERRUPTIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loaded_weights_count_whatever_was_interrupted(
    pools: RankPools, tmp_path: Path, strategy: str, kind: str
) -> None:
    for errors in pools(2).run(weights_after_load, strategy, kind, str(tmp_path / "saved")):
        assert max(errors) < EXACT, errors


def saved_after(strategy: str, kind: str, folder: str) -> float:
    """What is saved after an interruption are the weights, and the training goes on."""
    plain, model = fp64_pair(strategy)
    optimizers = _sgd(plain, model)
    train_both(plain, model, optimizers, range(2))
    INTERRUPTIONS[kind](model)
    optimizers[1].zero_grad()
    checkpoint.save(folder, model, optimizers[1])
    train_both(plain, model, optimizers, range(2, 4))
    checkpoint.load(folder, model, optimizers[1])
    again, _ = fp64_pair("no_shard")
    other = _sgd(again)[0]
    checkpoint.load(folder, again, other)
    return weight_error(model, again)


@pytest.mark.parametrize("kind", INTERRUPTIONS)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_save_after_an_interruption_holds_weights_and_optimizer(
    pools: RankPools, tmp_path: Path, strategy: str, kind: str
) -> None:
    assert max(pools(2).run(saved_after, strategy, kind, str(tmp_path / "saved"))) == 0.0


def optimizer_of_gathered_weights(strategy: str) -> tuple[str, float]:
    """What an optimizer says that was built between a forward and its backward; and after."""
    plain, model = fp64_pair(strategy)
    _leave_a_forward(model)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    message = said(RuntimeError, early.step)
    model.reshard()
    optimizers = _sgd(plain, model)
    train_both(plain, model, optimizers, range(2))
    return message, weight_error(model, plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_of_gathered_weights_says_so_at_its_first_step(
    pools: RankPools, strategy: str
) -> None:
    for message, error in pools(2).run(optimizer_of_gathered_weights, strategy):
        assert message.startswith("the optimizer holds the gathered weights of input.weight")
        assert "reshard()" in message
        assert error < EXACT


def passed_for_one_call(
    strategy: str, before_it: str, as_parameters: bool
) -> tuple[str, bool, float]:
    """What evaluating other weights says, whether they are untouched, and the model's error."""
    plain, model = fp64_pair(strategy)
    optimizers = _sgd(plain, model)
    train_both(plain, model, optimizers, range(2))
    if before_it == "gathered":
        model.unshard()
    elif before_it:
        INTERRUPTIONS[before_it](model)
        model.zero_grad()
    other = {name: torch.zeros(param.shape).double() for name, param in model.named_parameters()}
    if as_parameters:
        other = {name: torch.nn.Parameter(value) for name, value in other.items()}
    before = dict(other)
    x = torch.ones(2, 5).double()
    message = said(ValueError, lambda: torch.func.functional_call(model, other, (x,)))
    untouched = all(other[name] is before[name] and not other[name].any() for name in other)
    train_both(plain, model, optimizers, range(2, 4))
    return message, untouched, weight_error(model, plain)


@pytest.mark.parametrize("as_parameters", [False, True], ids=["tensors", "parameters"])
@pytest.mark.parametrize("before_it", ["", "gathered", *INTERRUPTIONS])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_for_one_call_are_rejected_and_replace_nothing(
    pools: RankPools, strategy: str, before_it: str, as_parameters: bool
) -> None:
    results = pools(2).run(passed_for_one_call, strategy, before_it, as_parameters)
    for message, untouched, error in results:
        assert "functional_call" in message
        assert message.startswith("parameter ")
        assert "load_state_dict" in message
        assert untouched
        assert error < EXACT


def accumulated_before_a_failed_forward(strategy: str) -> float:
    """A micro-batch, a forward that raises, and the last micro-batch: both gradients are there."""
    plain, model = fp64_pair(strategy)
    with model.no_sync():
        own_loss(model, 0).backward()
    _fail_in_forward(model)
    own_loss(model, 1).backward()
    for step in (0, 1):
        plain_loss(plain, step).backward()
    return max(
        held_error_of_grad(a, b)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_failed_forward_costs_no_accumulated_gradient(pools: RankPools, strategy: str) -> None:
    assert max(pools(2).run(accumulated_before_a_failed_forward, strategy)) < EXACT


def zeroed_after_a_failed_backward(strategy: str) -> float:
    """Gradients of a step that is tried again after they were set to zero."""
    plain, model = fp64_pair(strategy)
    own_loss(model, 0).backward()
    model.zero_grad(set_to_none=False)
    handle = model.input.register_full_backward_hook(_raise)
    with contextlib.suppress(Planned):
        own_loss(model, 7).backward()
    handle.remove()
    model.zero_grad(set_to_none=False)
    own_loss(model, 1).backward()
    plain_loss(plain, 1).backward()
    return max(
        held_error_of_grad(a, b)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zeros_written_after_a_failed_backward_stay_zeros(pools: RankPools, strategy: str) -> None:
    assert max(pools(2).run(zeroed_after_a_failed_backward, strategy)) < EXACT


def frozen_while_gathered(strategy: str) -> tuple[bool, bool, bool]:
    """Whether the root's layer changes in a step: trained, frozen while gathered, and trained."""
    _, model = fp64_pair(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = dict(model.named_parameters())["output.weight"]
    changes = []
    for trained in (True, False, True):
        _leave_a_forward(model)
        model.output.requires_grad_(trained)
        assert model.output.weight.requires_grad is trained
        before = weight.full_tensor().clone()
        own_loss(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        changes.append(not torch.equal(before, weight.full_tensor()))
    return tuple(changes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_freezing_counts_also_while_weights_are_gathered(pools: RankPools, strategy: str) -> None:
    assert set(pools(2).run(frozen_while_gathered, strategy)) == {(True, False, True)}


def failed_where_ranks_differ(strategy: str, evaluates: bool) -> float:
    """A backward fails on all ranks, of which one had left out a unit; then comes a step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = Skipping().double()
    torch.manual_seed(0)
    model = Skipping().double()
    model = wrap(model, list(model.blocks), sharding_strategy=strategy, check_ranks="always")
    model.skip = 1 if rank == 1 else None
    handle = model.blocks[0].register_forward_hook(_fail_when_it_comes_back)
    with contextlib.suppress(Planned):
        own_loss(model, 7).backward()
    handle.remove()
    if evaluates:
        with torch.inference_mode():
            own_loss(model, 3)
    else:
        model.reset_iter_state()
    dist.all_reduce(torch.ones(1))
    model.zero_grad()
    own_loss(model, 1).backward()
    for other in range(size):
        plain.skip = 1 if other == 1 else None
        (plain(batch(other, 1, dtype=torch.float64)).square().mean() / size).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(held_error_of_grad(a, b) for a, b in pairs)


@pytest.mark.parametrize("evaluates", [False, True], ids=["reset", "evaluation"])
@pytest.mark.parametrize("strategy", STRATEGIES[:-1])
def test_a_failed_backward_leaves_no_rank_ahead_of_the_others(
    pools: RankPools, strategy: str, evaluates: bool
) -> None:
    assert max(pools(2).run(failed_where_ranks_differ, strategy, evaluates)) < EXACT
