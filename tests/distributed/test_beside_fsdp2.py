"""The same calls on a model under PyTorch's own fully_shard and under ours."""

from __future__ import annotations

import re
from collections.abc import Callable
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

from megatron_fsdp_v2 import FSDPModule, MixedPrecisionPolicy
from tests.distributed.wrapping import batch, mesh_of, wrap
from tests.ranks import RankPools
from tests.reference.models import Stack


def _theirs(**options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Stack()
    mesh = mesh_of(dist.get_world_size())
    for block in model.blocks:
        their_fully_shard(block, mesh=mesh, **options)
    return their_fully_shard(model, mesh=mesh, **options)


def _ours(**options: Any) -> Any:
    torch.manual_seed(0)
    return wrap(Stack(), **options)


BOTH: tuple[Callable[..., Any], ...] = (_theirs, _ours)


def _backward(model: nn.Module, step: int = 0) -> None:
    model(batch(dist.get_rank(), step)).float().square().mean().backward()


def _full(tensors: Any) -> list[torch.Tensor]:
    return [tensor.full_tensor().detach().clone() for tensor in tensors]


def _distance(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    largest = max(float(tensor.abs().max()) for tensor in first)
    pairs = zip(first, second, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


# -- training -------------------------------------------------------------------------------------


def weights_after(make: Callable[..., Any], optimizer: str, bf16: bool) -> list[torch.Tensor]:
    """Weights after 5 steps."""
    options: dict[str, Any] = {}
    if bf16 and make is _theirs:
        options["mp_policy"] = TheirPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    elif bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = make(**options)
    made: Any = (
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if optimizer == "SGD"
        else torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    )
    for step in range(5):
        made.zero_grad()
        _backward(model, step)
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert float(norm.full_tensor()) > 0
        made.step()
    return _full(model.parameters())


def training_distances() -> dict[tuple[str, bool], float]:
    """Largest relative difference of weights, by optimizer and whether in bf16."""
    cases = [("SGD", False), ("AdamW", False), ("SGD", True)]
    return {case: _distance(*(weights_after(make, *case) for make in BOTH)) for case in cases}


@pytest.mark.parametrize("world_size", [2, 3])
def test_five_steps_of_training_equal_fsdp2s(pools: RankPools, world_size: int) -> None:
    for found in pools(world_size).run(training_distances):
        for case, distance in found.items():
            assert distance < 1e-6, case


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


def accumulated(make: Callable[..., Any], how: str) -> list[torch.Tensor]:
    """Gradients of three micro-batches, of which the last one synchronizes."""
    model = make()
    for micro in range(3):
        is_last = micro == 2
        if how == "set_requires_gradient_sync":
            model.set_requires_gradient_sync(is_last)
        else:
            model.set_is_last_backward(is_last)
        _backward(model, micro)
    return _full_gradients(model)


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


def prefetched(make: Callable[..., Any]) -> list[torch.Tensor]:
    """Gradients with explicit prefetching in both directions."""
    model = make()
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    for step in range(2):
        model.zero_grad()
        _backward(model, step)
    return _full_gradients(model)


def all_methods() -> dict[str, Any]:
    """What differs between theirs and ours."""
    theirs, ours = methods(_theirs), methods(_ours)
    found = {
        claim: (theirs[claim], ours[claim]) for claim in theirs if theirs[claim] != ours[claim]
    }
    numbers: dict[str, Any] = {
        how: _distance(*(accumulated(make, how) for make in BOTH))
        for how in ("set_requires_gradient_sync", "set_is_last_backward")
    }
    numbers["prefetch lists"] = _distance(*(prefetched(make) for make in BOTH))
    found.update({name: error for name, error in numbers.items() if error > 1e-6})
    return found


def test_methods_do_what_fsdp2s_do(pools: RankPools) -> None:
    for different in pools(2).run(all_methods):
        assert different == {}


# -- state dicts ----------------------------------------------------------------------------------


def state_dict_kinds(make: Callable[..., Any]) -> list[bool]:
    """Whether a state dict is sharded: at rest, while a unit is gathered, after a forward."""
    model = make()
    found = [model.state_dict()]
    model.unshard()
    found.append(model.state_dict())
    model.reshard()
    model(batch(0))
    found.append(model.state_dict())
    return [all(isinstance(value, DTensor) for value in state.values()) for state in found]


def test_fsdp2s_state_dict_is_always_sharded(pools: RankPools) -> None:
    # What the next test asks of ours.
    assert pools(2).run(state_dict_kinds, _theirs) == [[True] * 3] * 2


def test_a_state_dict_is_sharded_also_while_a_unit_is_gathered(pools: RankPools) -> None:
    assert pools(2).run(state_dict_kinds, _ours) == [[True] * 3] * 2


# -- documentation --------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_fsdp2.md"


def weights_of_blocks(blocks: list[str]) -> list[list[torch.Tensor]]:
    """What blocks of code leave in `weights`."""
    found = []
    for block in blocks:
        names: dict[str, Any] = {}
        exec(block, names)
        found.append(names["weights"])
    return found


def test_the_documented_code_runs_and_trains_as_before(pools: RankPools) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    assert "torch.distributed.fsdp" in blocks[0]
    assert "megatron_fsdp_v2" in blocks[1]
    for before, after in pools(2).run(weights_of_blocks, blocks):
        assert _distance(before, after) < 1e-6


def test_the_page_has_every_public_method_of_fsdp2_and_of_ours() -> None:
    page = PAGE.read_text()
    for cls in (TheirModule, FSDPModule):
        names = [name for name in vars(cls) if not name.startswith("_")]
        assert len(names) > 5
        assert [n for n in names if n not in page] == []
