"""The same calls on a model under PyTorch's own fully_shard and under ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TheirModule
from torch.distributed.fsdp import MixedPrecisionPolicy as TheirPolicy
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import batch, mesh_of, own_loss, step_all
from tests.reference.models import Stack


def _wrapped(shard: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Stack()
    for unit in (*model.blocks, model):
        shard(unit, mesh=mesh_of(dist.get_world_size()), **options)
    return model


_theirs, _ours = partial(_wrapped, their_fully_shard), partial(_wrapped, fully_shard)


BOTH: tuple[Callable[..., Any], ...] = (_theirs, _ours)


def _distance(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    largest = max(float(tensor.abs().max()) for tensor in first)
    pairs = zip(first, second, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


# -- training -------------------------------------------------------------------------------------


def weights_after(make: Callable[..., Any], optimizer: str, bf16: bool) -> list[torch.Tensor]:
    """Weights after 5 steps."""
    options: dict[str, Any] = {}
    if bf16:
        options["mp_policy"] = TheirPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if bf16 and make is _ours:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = make(**options)
    kinds: dict[str, Any] = {
        "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "AdamW": partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
    }
    made = kinds[optimizer](model.parameters())
    for step in range(5):
        own_loss(model, step).backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert float(norm.full_tensor()) > 0
        step_all(made)
    return [param.full_tensor().detach() for param in model.parameters()]


@pytest.mark.parametrize(("optimizer", "bf16"), [("SGD", False), ("AdamW", False), ("SGD", True)])
@on_ranks("world_size", world_size=[2, 3])
def test_five_steps_of_training_equal_fsdp2s(world_size: int, optimizer: str, bf16: bool) -> None:
    assert _distance(*(weights_after(make, optimizer, bf16) for make in BOTH)) < 1e-6


# -- methods --------------------------------------------------------------------------------------


def _kinds(module: nn.Module) -> set[bool]:
    """Whether parameters of a module are sharded."""
    return {isinstance(param, DTensor) for param in module.parameters()}


def methods(make: Callable[..., Any]) -> dict[str, Any]:
    """What each method visibly does."""
    found: dict[str, Any] = {}
    model = make()
    first, second, third = model.blocks
    found["after wrapping"] = _kinds(model)
    first.unshard()
    found["unshard: this unit alone"] = (_kinds(first), _kinds(second))
    found["unshard: whole plain values"] = [
        (tuple(p.shape), round(float(p.detach().double().sum()), 5)) for p in first.parameters()
    ]
    first.reshard()
    found["reshard"] = _kinds(first)
    second.unshard(async_op=True).wait()
    found["unshard, async"] = _kinds(second)
    second.reshard()

    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append((_kinds(first), _kinds(second), _kinds(third)))

    handle = third.register_forward_hook(look)
    model(batch(0)).sum().backward()
    model.set_reshard_after_forward(False)
    model(batch(0)).sum().backward()
    model.set_reshard_after_forward(True)
    second.set_reshard_after_forward(False)
    model(batch(0)).sum().backward()
    second.set_reshard_after_forward(True)
    handle.remove()
    found["set_reshard_after_forward: gathered late in the forward"] = [
        (kinds[0], kinds[1]) for kinds in seen
    ]
    found["after a backward"] = _kinds(model)
    model.zero_grad()
    return found


def _full_gradients(model: nn.Module) -> list[torch.Tensor]:
    # An empty shard has no gradient here and an empty one there.
    full = []
    for param in model.parameters():
        whole = torch.zeros(tuple(param.shape))
        grad = param.grad
        if grad is not None:
            rows = getattr(param, "local_rows", None)
            if rows is None:
                whole = grad.full_tensor()
            else:
                whole[rows[0] : rows[1]] = grad.to_local()
        if hasattr(param, "local_rows"):
            dist.all_reduce(whole)
        full.append(whole)
    return full


@on_ranks(2)
def test_methods_do_what_fsdp2s_do() -> None:
    assert methods(_ours) == methods(_theirs)


@on_ranks(2, method=["set_requires_gradient_sync", "set_is_last_backward"])
def test_gradients_of_micro_batches_are_accumulated_as_fsdp2_does(method: str) -> None:
    found = []
    for make in BOTH:
        model = make()
        for micro in range(3):
            getattr(model, method)(micro == 2)
            own_loss(model, micro).backward()
        found.append(_full_gradients(model))
    assert _distance(*found) < 1e-6


@on_ranks(2)
def test_prefetch_lists_in_both_directions_change_no_gradient() -> None:
    found = []
    for make in BOTH:
        model = make()
        first, second, third = model.blocks
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])
        for step in range(2):
            model.zero_grad()
            own_loss(model, step).backward()
        found.append(_full_gradients(model))
    assert _distance(*found) < 1e-6


# -- state dicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [_theirs, _ours], ids=["theirs", "ours"])
@on_ranks(2)
def test_a_state_dict_is_sharded_also_while_a_unit_is_gathered(make: Callable[..., Any]) -> None:
    """At rest, while a unit is gathered, after a forward."""
    model = make()
    found = [model.state_dict()]
    model.unshard()
    found.append(model.state_dict())
    model.reshard()
    model(batch(0))
    found.append(model.state_dict())
    for state in found:
        assert all(isinstance(value, DTensor) for value in state.values())


# -- documentation --------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_fsdp2.md"


@on_ranks(2)
def test_the_documented_code_runs_and_trains_as_before() -> None:
    before, after = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "torch.distributed.fsdp" in before
    assert "megatron_fsdp_v2" in after
    weights = []
    for code in (before, after):
        names: dict[str, Any] = {}
        exec(code, names)
        weights.append(names["weights"])
    assert _distance(*weights) < 1e-6


def test_the_page_has_every_public_method_of_fsdp2_and_of_ours() -> None:
    page = PAGE.read_text()
    for cls in (TheirModule, FSDPModule):
        names = [name for name in vars(cls) if not name.startswith("_")]
        assert len(names) > 5
        assert [n for n in names if n not in page] == []
