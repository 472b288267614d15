"""Main gradients have memory from a reduction until gradients are None, and nobody's is reused."""

from __future__ import annotations

import gc
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.runtime import unit_checks
from megatron_fsdp_v2.runtime.fsdp_module import named_units
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, on_mesh, said, wrap
from tests.reference.models import INPUT, Formula, Stack


def _groups(model: Any) -> list[Any]:
    return [group for _, unit in named_units(model) for group in unit.groups]


def _num_with_memory(model: Any) -> int:
    return sum(group.main_grad is not None for group in _groups(model))


def _backward(model: Any, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, INPUT)).square().mean().backward()


def _grads(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: param.grad.to_local().clone()
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def _none_by_hand(model: Any, optimizer: Any) -> None:
    del optimizer
    for param in model.parameters():
        param.grad = None


WAYS: dict[str, Any] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "module": lambda model, optimizer: model.zero_grad(set_to_none=True),
    "by hand": _none_by_hand,
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks("mesh_name", mesh_name=["2", "HSDP 2x2"])
def test_whoever_sets_gradients_to_none_frees_their_memory_at_once(
    mesh_name: str, way: str
) -> None:
    for strategy in STRATEGIES if mesh_name == "2" else STRATEGIES[2:]:
        model = wrap(Stack(), sharding_strategy=strategy, **on_mesh(mesh_name))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                assert _num_with_memory(model) == 0, strategy
                _backward(model)
                assert _num_with_memory(model) == len(_groups(model)), strategy
                optimizer.step()
                WAYS[way](model, optimizer)
                assert _num_with_memory(model) == 0, strategy
        finally:
            gc.enable()


@on_ranks(2)
def test_zeros_keep_their_memory_and_are_added_to() -> None:
    model = wrap(Stack())
    _backward(model)
    before = [group.main_grad.tensor.data_ptr() for group in _groups(model)]
    expected = _grads(model)
    model.zero_grad(set_to_none=False)
    _backward(model)
    assert before == [group.main_grad.tensor.data_ptr() for group in _groups(model)]
    found = _grads(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _saved(grad: Any) -> Any:
    """Saved for a backward alone: nothing in Python refers to it."""
    factor = torch.ones_like(grad._local_tensor, requires_grad=True)
    product = factor * grad._local_tensor
    return lambda: torch.autograd.grad(product.sum(), factor, retain_graph=True)[0]


def _of_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage)


# How somebody keeps a gradient, and looks at it later.
KEPT: dict[str, Any] = {
    "gradient": lambda grad: lambda: grad._local_tensor,
    "its rows": lambda grad: partial(torch.Tensor.detach, grad._local_tensor),
    "local": lambda grad: grad.to_local,
    "view": lambda grad: partial(
        torch.Tensor.view, grad.to_local().view(-1), grad.to_local().shape
    ),
    "array": lambda grad: partial(torch.from_numpy, grad._local_tensor.numpy()),
    "storage": lambda grad: partial(_of_storage, grad.to_local().untyped_storage(), grad.dtype),
    "saved": _saved,
    "attribute": lambda grad: setattr(grad, "mine", grad._local_tensor) or grad.to_local,
}


@on_ranks(2, form=KEPT, offloaded=[False, True])
def test_a_gradient_that_somebody_keeps_is_not_written_by_later_steps(
    form: str, offloaded: bool
) -> None:
    policy = CPUOffloadPolicy(pin_memory=False) if offloaded else None
    torch.manual_seed(7)
    model = wrap(Stack(), offload_policy=policy)
    # The tensors of a step before, that nobody kept, are those of this one.
    _backward(model)
    model.zero_grad()
    _backward(model)
    kept = {
        name: KEPT[form](param.grad)
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    values = {name: look().clone() for name, look in kept.items()}
    for seed in (1, 2):
        model.zero_grad()
        _backward(model, seed)
        for name, look in kept.items():
            assert torch.equal(look(), values[name]), name
    assert len(kept) > 5
    # And what came meanwhile is what comes without anybody keeping anything.
    torch.manual_seed(7)
    fresh = wrap(Stack(), offload_policy=policy)
    _backward(fresh, 2)
    expected, found = _grads(fresh), _grads(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@on_ranks(2, form=["gradient", "local"])
def test_of_some_gradients_set_to_none_a_kept_one_is_not_written(form: str) -> None:
    model = wrap(Stack())
    _backward(model)
    chosen = {n: p for n, p in model.named_parameters() if "weight" in n and p.grad is not None}
    kept = {n: p.grad if form == "gradient" else p.grad.to_local() for n, p in chosen.items()}
    values = {name: getattr(g, "_local_tensor", g).clone() for name, g in kept.items()}
    first = _grads(model)
    for param in chosen.values():
        param.grad = None
    _backward(model)
    for name, grad in kept.items():
        assert torch.equal(getattr(grad, "_local_tensor", grad), values[name]), name
    for name, found in _grads(model).items():
        assert torch.equal(found, first[name] if name in chosen else 2 * first[name]), name


@on_ranks(2, strategy=STRATEGIES)
def test_gradients_that_nobody_keeps_are_the_same_objects_and_have_no_memory_between(
    strategy: str,
) -> None:
    model = wrap(Stack(), sharding_strategy=strategy)
    shown: list[list[int]] = []
    for seed in range(3):
        _backward(model, seed)
        shown.append([id(param.grad) for param in model.parameters() if param.grad is not None])
        # Weakly, since whoever has a storage keeps its memory.
        storages = [StorageWeakRef(_storage_of(group)) for group in _groups(model)]
        assert all(map(_nbytes, storages))
        model.zero_grad()
        assert not any(storage.expired() for storage in storages)
        assert not any(map(_nbytes, storages))
    assert len(shown[0]) > 5
    assert shown[0] == shown[1] == shown[2]


def _storage_of(group: Any) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = group.main_grad.tensor.untyped_storage()
    return storage


def _nbytes(storage: StorageWeakRef) -> int:
    return int(torch.UntypedStorage._new_with_weak_ptr(storage.cdata).nbytes())


@on_ranks(2)
def test_gradients_that_numpy_has_seen_go_and_come_as_others_do() -> None:
    model = wrap(Stack(2))
    _backward(model)
    first = _grads(model)
    arrays = [p.grad.to_local().numpy() for p in model.parameters() if p.grad is not None]
    # Nobody has the others any more, and their storages cannot be resized all the same.
    kept = arrays[0]
    del arrays
    before = kept.copy()
    model.zero_grad()
    _backward(model, seed=1)
    model.zero_grad()
    _backward(model)
    assert all(torch.equal(first[name], grad) for name, grad in _grads(model).items())
    assert (kept == before).all()


@on_ranks(2)
def test_what_was_noted_on_a_gradient_is_not_found_on_the_next_one() -> None:
    model = wrap(Stack())
    for change in (
        lambda grad: setattr(grad, "mine", 1),
        lambda grad: grad.requires_grad_(),
        lambda grad: setattr(grad, "data", torch.zeros_like(grad)),
    ):
        _backward(model)
        expected = _grads(model)
        for param in model.parameters():
            if param.grad is not None:
                change(param.grad)
        model.zero_grad()
        _backward(model)
        for name, param in model.named_parameters():
            if param.grad is not None:
                assert not hasattr(param.grad, "mine")
                assert not param.grad.requires_grad
                assert torch.equal(param.grad.to_local(), expected[name])
        model.zero_grad()


@on_ranks(2)
def test_a_large_root_is_named_once_with_what_to_make_units_of() -> None:
    before, unit_checks.NOTABLE_NBYTES = unit_checks.NOTABLE_NBYTES, 100
    try:
        model = wrap(Large())
        with pytest.warns(UserWarning, match="the root, the root .Large") as found:
            _backward(model)
        texts = [str(warning.message) for warning in found]
        texts = [text for text in texts if "the root, the root" in text]
        assert len(texts) == 1 and "input.0 (" in texts[0], texts
        _expect_no_warning(lambda: _backward(model))
        apart = Large()
        _expect_no_warning(lambda: _backward(wrap(apart, [apart.input, *apart.blocks])))
    finally:
        unit_checks.NOTABLE_NBYTES = before
    _expect_no_warning(lambda: _backward(wrap(Large())))


class Large(Stack):
    """Most of it is before the blocks."""

    def __init__(self) -> None:
        super().__init__(2)
        width = self.input.out_features
        self.input = nn.Sequential(nn.Linear(INPUT, 64 * width), nn.Linear(64 * width, width))


def _expect_no_warning(call: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()


def _tied() -> Any:
    """An output layer without a weight, that is handed the weight of the embedding."""
    torch.manual_seed(0)

    def forward(model: Any, x: torch.Tensor) -> Any:
        x = model.block(model.embedding(x))
        return model.output(x, lambda: model.embedding.weight)

    output = Formula(lambda _, x, weight: x @ weight().t())
    layers = {"embedding": nn.Embedding(INPUT, 16), "block": nn.Linear(16, 16)}
    return Formula(forward, **layers, output=output)


@on_ranks(2, strategy=STRATEGIES)
def test_a_unit_may_use_parameters_that_it_has_not(strategy: str) -> None:
    tokens = torch.arange(INPUT).view(1, -1)
    plain, model = _tied(), _tied()
    for unit in (model.embedding, model.block):
        fully_shard(unit, sharding_strategy=strategy)
    used = {model.embedding.weight}
    fully_shard(model.output, sharding_strategy=strategy, used_params=used)
    fully_shard(model, sharding_strategy=strategy)
    for one in (plain, model):
        one(tokens).square().mean().backward()
    for name, param in model.named_parameters():
        expected = plain.get_parameter(name).grad
        grad = param.grad
        if grad is not None:
            first, last = grad.local_rows
            torch.testing.assert_close(grad.to_local(), expected[first:last])
    names = [name for name, _ in model.state_dict().items()]
    assert names == [name for name, _ in plain.state_dict().items()]


@on_ranks(2)
def test_a_used_parameter_that_nobody_has_sharded_is_rejected() -> None:
    model = _tied()
    text = said(ValueError, lambda: fully_shard(model.output, used_params={model.embedding.weight}))
    assert "used_params has a parameter of shape (5, 16) that no unit beside this one" in text
