"""Collectives of a step, and allocation and release of memory."""

from __future__ import annotations

import copy
import itertools
import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from megatron_fsdp_v2.runtime import unit_checks
from megatron_fsdp_v2.runtime.module import named_units, unit_of
from tests.distributed.allocations import allocation_sizes, steady_nbytes
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    gradient_error,
    on_mesh,
    own_loss,
    record_collectives,
    wrap,
)
from tests.reference.models import INPUT, WIDTH, Formula, Stack
from tests.sharding import shard

NUM_BLOCKS = 5

# -- collectives ----------------------------------------------------------------------------------


def _in_place(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Change a unit's input in place, which bypasses the node that ends the unit's backward."""
    return torch.sin(model.layer(x.mul_(0.5)))


@on_ranks(2)
def test_units_whose_inputs_are_changed_in_place_are_resharded_in_the_backward() -> None:
    units = [Formula(_in_place, layer=nn.Linear(5, 5)) for _ in range(6)]
    model = wrap(nn.Sequential(nn.Linear(5, 5), *units), units)
    most = []
    record_collectives(
        model, lambda: most.append(sum(unit_of(unit).is_unsharded for unit in units))
    )
    for _ in range(2):
        model(torch.randn(4, 5)).square().mean().backward()
    # A unit is resharded when the next unit is gathered, not at the end of the backward.
    assert 1 <= max(most) <= 2


@on_ranks(2)
def test_unit_that_runs_alone_keeps_the_order_of_the_root_and_is_resharded() -> None:
    counts = []
    for evaluates in (False, True):
        model = wrap(Stack(NUM_BLOCKS))
        recorded = record_collectives(model)
        for _ in range(3):
            if evaluates:
                with torch.no_grad():
                    model.blocks[1](torch.randn(2, WIDTH))
            before = recorded.count("all_gather")
            model(torch.randn(4, 5)).square().mean().backward()
        counts.append(recorded.count("all_gather") - before)
        assert all(hasattr(param, "local_rows") for param in model.parameters())
    assert counts[0] == counts[1]


# -- memory ---------------------------------------------------------------------------------------


@on_ranks("mesh_name", mesh_name=["2", "HSDP 2x2", "HFSDP 2x2"], trace_pool=[False, True])
def test_sharding_a_model_allocates_nothing_but_its_shards(
    mesh_name: str, trace_pool: bool
) -> None:
    made = []

    def build() -> None:
        layers = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 128))
        made.append(wrap(layers, layers, enable_trace_pool=trace_pool, **on_mesh(mesh_name)))

    found = allocation_sizes(build)
    units = [unit_of(layer) for layer in made[0]]
    originals = 4 * sum(unit.groups[0].layout.numel for unit in units)
    shards = [steady_nbytes(unit.groups[0]) for unit in units]
    in_all = sum(nbytes for nbytes in found if nbytes > 0)
    assert in_all == pytest.approx(originals + sum(shards), rel=0.03)
    # The second layer's shard is allocated after the first layer's original is freed.
    peak = max(itertools.accumulate(found))
    assert peak == pytest.approx(originals + shards[0], rel=0.03)


def _groups(model: Any) -> list[Any]:
    return [group for _, unit in named_units(model) for group in unit.groups]


def _grads(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: param.grad.to_local().clone()
        for name, param in model.named_parameters()
        if param.grad is not None
    }


@on_ranks(2)
def test_zeroed_gradients_keep_their_memory_and_accumulate() -> None:
    model = wrap(Stack())
    own_loss(model).backward()
    places = [group.main_grad.tensor.data_ptr() for group in _groups(model)]
    expected = _grads(model)
    model.zero_grad(set_to_none=False)
    own_loss(model).backward()
    assert places == [group.main_grad.tensor.data_ptr() for group in _groups(model)]
    found = _grads(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _saved(grad: Any) -> Any:
    """Keep a gradient as a tensor saved for backward, without a reference in Python."""
    factor = torch.ones_like(grad._local_tensor, requires_grad=True)
    product = factor * grad._local_tensor
    return lambda: torch.autograd.grad(product.sum(), factor, retain_graph=True)[0]


# Ways to keep a gradient, and functions that read the gradient later.
KEPT: dict[str, Any] = {
    "gradient": lambda grad: lambda: grad._local_tensor,
    "view": lambda grad: partial(
        torch.Tensor.view, grad.to_local().view(-1), grad.to_local().shape
    ),
    "saved": _saved,
}


@on_ranks(2, form=KEPT, offloaded=[False, True])
def test_kept_gradient_is_not_written_by_later_steps(form: str, offloaded: bool) -> None:
    policy = CPUOffloadPolicy(pin_memory=False) if offloaded else None
    torch.manual_seed(7)
    model = wrap(Stack(), offload_policy=policy)
    own_loss(model).backward()
    values = _grads(model)
    kept = {name: KEPT[form](model.get_parameter(name).grad) for name in values}
    for seed in (1, 2):
        model.zero_grad()
        own_loss(model, seed).backward()
        assert all(torch.equal(kept[name](), values[name]) for name in values)
    assert len(kept) > 5
    # The new gradients are those of a run in which no gradient is kept.
    torch.manual_seed(7)
    fresh = wrap(Stack(), offload_policy=policy)
    own_loss(fresh, 2).backward()
    expected, found = _grads(fresh), _grads(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@on_ranks(2, form=["gradient", "view"])
def test_kept_gradient_is_not_written_after_some_are_set_to_none(form: str) -> None:
    model = wrap(Stack())
    own_loss(model).backward()
    first = _grads(model)
    chosen = [name for name in first if "weight" in name]
    kept = {name: KEPT[form](model.get_parameter(name).grad) for name in chosen}
    for name in chosen:
        model.get_parameter(name).grad = None
    own_loss(model).backward()
    assert all(torch.equal(kept[name](), first[name]) for name in chosen)
    for name, found in _grads(model).items():
        assert torch.equal(found, first[name] if name in chosen else 2 * first[name]), name


@on_ranks(2)
def test_large_root_warns_once_and_suggests_units() -> None:
    with mock.patch.object(unit_checks, "NOTABLE_NBYTES", 100):
        model = wrap(Large())
        with pytest.warns(UserWarning, match="the root, the root .Large") as found:
            own_loss(model).backward()
        texts = [str(warning.message) for warning in found]
        texts = [text for text in texts if "the root, the root" in text]
        assert len(texts) == 1 and "input.0 (" in texts[0], texts
        _expect_no_warning(lambda: own_loss(model).backward())
        apart = Large()
        units = [apart.input, *apart.blocks]
        _expect_no_warning(lambda: own_loss(wrap(apart, units)).backward())
    _expect_no_warning(lambda: own_loss(wrap(Large())).backward())


class Large(Stack):
    """A model with most parameters before the blocks."""

    def __init__(self) -> None:
        super().__init__(2)
        width = self.input.out_features
        self.input = nn.Sequential(nn.Linear(INPUT, 64 * width), nn.Linear(64 * width, width))


def _expect_no_warning(call: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()


def _of_embedding(model: Any, x: torch.Tensor) -> Any:
    """The forward of a model whose output layer is passed the weight of the embedding."""
    x = model.block(model.embedding(x))
    return model.output(x, lambda: model.embedding.weight)


@on_ranks(2, strategy=STRATEGIES[::3])
def test_unit_can_use_parameters_of_other_units(strategy: str) -> None:
    plain = Formula(
        _of_embedding,
        embedding=nn.Embedding(INPUT, 16),
        block=nn.Linear(16, 16),
        output=Formula(lambda _, x, weight: x @ weight().t()),
    )
    model = copy.deepcopy(plain)
    for unit in (model.embedding, model.block):
        shard(unit, sharding_strategy=strategy)
    shard(model.output, sharding_strategy=strategy, used_params={model.embedding.weight})
    shard(model, sharding_strategy=strategy)
    tokens = torch.arange(INPUT).view(1, -1)
    for either in (plain, model):
        either(tokens).square().mean().backward()
    assert gradient_error(model, plain) < 1e-6
    assert list(model.state_dict()) == list(plain.state_dict())
