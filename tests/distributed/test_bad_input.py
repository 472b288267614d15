"""Bad arguments and misuse are errors that say what to do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from megatron_fsdp_v2 import FSDPModule, fully_shard
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.wrapping import said
from tests.ranks import RankPools
from tests.reference.models import Stack


def _shard(module: nn.Module, **options: Any) -> Any:
    options.setdefault("mesh", init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
    return fully_shard(module, **options)


def _parent_before_child() -> None:
    model = Stack()
    _shard(model)
    _shard(model.blocks[0])


def _zero_dim() -> None:
    module = nn.Linear(2, 2)
    module.scale = nn.Parameter(torch.tensor(1.0))
    _shard(module)


def _made_of_others() -> None:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.zeros(2, 2)))
    _shard(module)


def _with_a_gather_of_its_own() -> None:
    module = nn.Linear(2, 2)
    # What FSDP2 calls before it gathers a parameter.
    module.bias.fsdp_pre_all_gather = lambda *args: (args, None)  # type: ignore[attr-defined]
    _shard(module)


def _twice() -> None:
    _shard(_shard(nn.Linear(2, 2)))


def _tied_but_different() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    _shard(first)
    _shard(second, gradient_scaling_factor=3.0)


class _Bare(nn.Module):
    """A module that cannot initialize itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2, device="meta"))


def messages() -> dict[str, str]:
    """What every bad call says."""
    one_axis = init_device_mesh("cpu", (1,))
    three_axes = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    linear = nn.Linear
    value, runtime = ValueError, RuntimeError
    return {
        "strategy": said(value, lambda: _shard(linear(2, 2), sharding_strategy="zero3")),
        "axes": said(value, lambda: _shard(linear(2, 2), mesh=three_axes)),
        "outer": said(
            value,
            lambda: _shard(linear(2, 2), mesh=one_axis, outer_dp_sharding_strategy="optim"),
        ),
        "mesh": said(value, lambda: _shard(linear(2, 2), mesh="dp")),
        "module": said(value, lambda: _shard(lambda x: x)),  # type: ignore[arg-type]
        "list": said(value, lambda: _shard(nn.ModuleList([linear(2, 2)]))),
        "granularity": said(value, lambda: _shard(linear(2, 2), shard_granularity="rows")),
        "missing": said(value, lambda: _shard(linear(2, 2), on_missing_grad="ignore")),
        "pool": said(value, lambda: _shard(linear(2, 2), enable_trace_pool="yes")),
        "twice": said(value, _twice),
        "parent": said(value, _parent_before_child),
        "zero-dim": said(value, _zero_dim),
        "made of others": said(value, _made_of_others),
        "gather": said(value, _with_a_gather_of_its_own),
        "no columns": said(value, lambda: _shard(linear(0, 2))),
        "tied": said(value, _tied_but_different),
        "meta": said(runtime, lambda: _shard(_Bare())(torch.ones(1, 2))),
        "check": said(value, lambda: _shard(linear(2, 2), check_ranks="sometimes")),
        "deepcopy": said(runtime, lambda: copy.deepcopy(_shard(linear(2, 2)))),
        "pickle": said(runtime, lambda: pickle.dumps(_shard(linear(2, 2)))),
        "unsharded": said(value, lambda: unit_of(linear(2, 2))),
    }


EXPECTED = {
    "strategy": "unknown sharding_strategy 'zero3'; choose one of no_shard, optim",
    "axes": "a data-parallel mesh has 1 axis (dp) or 2 (outer dp, inner dp), got 3",
    "outer": "needs a 2-D mesh",
    "mesh": "mesh must be a DeviceMesh, got str",
    "module": "needs an nn.Module",
    "list": "ModuleList has no forward",
    "granularity": "unknown shard_granularity 'rows'",
    "missing": "on_missing_grad must be 'zero' or 'error', got 'ignore'",
    "pool": "enable_trace_pool must be True or False, got 'yes'",
    "twice": "fully_shard was already called on this",
    "parent": "is sharded already, by a unit that contains it",
    "zero-dim": "parameter scale is 0-dim",
    "made of others": "parameter weight is a TwoTensor, which is made of other tensors",
    "gather": "parameter bias is a Parameter, which is made of other tensors or says how it is",
    "no columns": "parameter weight of shape (2, 0) has rows without elements",
    "tied": "parameter weight is tied to weight of Linear/0, which was sharded with another mesh",
    "meta": "weight of unit the root (_Bare) had no values on the meta device and got none since",
    "check": "check_ranks must be 'never', 'once' or 'always', got 'sometimes'",
    "deepcopy": "cannot be deep-copied",
    "pickle": "cannot be pickled",
    "unsharded": "Linear is not sharded; call fully_shard",
}


def test_every_bad_call_says_what_is_wrong(pools: RankPools) -> None:
    (found,) = pools(1).run(messages)
    assert found.keys() == EXPECTED.keys()
    for name, expected in EXPECTED.items():
        assert expected in found[name], name


def missing_gradient() -> str:
    """A parameter without gradient, where that is an error."""
    module = Stack()
    module.blocks[0].unused = nn.Parameter(torch.ones(2, 2))
    _shard(module.blocks[0], on_missing_grad="error")
    _shard(module, on_missing_grad="error")
    return said(RuntimeError, lambda: module(torch.ones(2, 5)).sum().backward())


def test_a_missing_gradient_is_named(pools: RankPools) -> None:
    (found,) = pools(1).run(missing_gradient)
    assert "no gradient arrived for unused" in found


def classes() -> tuple[bool, bool, bool]:
    """A sharded module keeps its class and gains one; classes are made once."""
    first, second = _shard(nn.Linear(2, 2)), _shard(nn.Linear(3, 3))
    return isinstance(first, nn.Linear), isinstance(first, FSDPModule), type(first) is type(second)


def test_the_class_stays_a_subclass_of_the_original(pools: RankPools) -> None:
    assert pools(1).run(classes) == [(True, True, True)]
