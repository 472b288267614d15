"""Bad arguments and misuse are errors that say what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from megatron_fsdp_v2 import FSDPModule, fully_shard
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import check_said, mesh_of, said, wrap
from tests.reference.models import Stack


def _shard(module: nn.Module, **options: Any) -> Any:
    return fully_shard(module, **{"mesh": mesh_of(1), **options})


def _linear(**options: Any) -> Any:
    return _shard(nn.Linear(2, 2), **options)


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


VALUE: dict[str, Callable[[], Any]] = {
    "unknown sharding_strategy 'zero3'; choose one of no_shard, optim": lambda: _linear(
        sharding_strategy="zero3"
    ),
    "a data-parallel mesh has 1 axis (dp) or 2 (outer dp, inner dp), got 3": lambda: _linear(
        mesh=init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    ),
    "needs a 2-D mesh": lambda: _linear(outer_dp_sharding_strategy="optim"),
    "mesh must be a DeviceMesh, got str": lambda: _linear(mesh="dp"),
    "needs an nn.Module": lambda: _shard(lambda x: x),  # type: ignore[arg-type]
    "ModuleList has no forward": lambda: _shard(nn.ModuleList([nn.Linear(2, 2)])),
    "unknown shard_granularity 'rows'": lambda: _linear(shard_granularity="rows"),
    "on_missing_grad must be 'zero' or 'error', got 'ignore'": lambda: _linear(
        on_missing_grad="ignore"
    ),
    "enable_trace_pool must be True or False, got 'yes'": lambda: _linear(enable_trace_pool="yes"),
    "fully_shard was already called on this": lambda: _shard(_linear()),
    "is sharded already, by a unit that contains it": _parent_before_child,
    "parameter scale is 0-dim": _zero_dim,
    "parameter weight is a TwoTensor, which is made of other tensors": _made_of_others,
    "parameter bias is a Parameter, which is made of other tensors or says how it is": (
        _with_a_gather_of_its_own
    ),
    "parameter weight is tied to weight of Linear/0, which was sharded with another mesh": (
        _tied_but_different
    ),
    "check_ranks must be 'never', 'once' or 'always', got 'sometimes'": lambda: _linear(
        check_ranks="sometimes"
    ),
    "Linear is not sharded; call fully_shard": lambda: unit_of(nn.Linear(2, 2)),
}
RUNTIME: dict[str, Callable[[], Any]] = {
    "weight of unit the root (_Bare) had no values on the meta device and got none since": (
        lambda: _shard(_Bare())(torch.ones(1, 2))
    ),
    "cannot be deep-copied": lambda: copy.deepcopy(_linear()),
    "cannot be pickled": lambda: pickle.dumps(_linear()),
}


@on_ranks(1)
def test_every_bad_call_says_what_is_wrong() -> None:
    check_said(ValueError, VALUE)
    check_said(RuntimeError, RUNTIME)


@on_ranks(1)
def test_a_missing_gradient_is_named() -> None:
    model = Stack()
    model.blocks[0].unused = nn.Parameter(torch.ones(2, 2))
    wrap(model, on_missing_grad="error")
    text = said(RuntimeError, lambda: model(torch.ones(2, 5)).sum().backward())
    assert "no gradient arrived for unused" in text


@on_ranks(1)
def test_the_class_stays_a_subclass_of_the_original() -> None:
    """A sharded module keeps its class and gains one; classes are made once."""
    first, second = _shard(nn.Linear(2, 2)), _shard(nn.Linear(3, 3))
    assert isinstance(first, nn.Linear)
    assert isinstance(first, FSDPModule)
    assert type(first) is type(second)
