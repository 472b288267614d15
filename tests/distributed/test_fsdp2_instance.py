"""A sharded module is an instance of torch's `FSDPModule`, and what follows from that works."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TheirModule
from torch.distributed.fsdp import UnshardHandle, share_comm_ctx
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as their_register
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from megatron_fsdp_v2 import FSDPModule, fully_shard, register_fsdp_forward_method
from megatron_fsdp_v2.runtime.torch_fsdp import REFUSED_METHODS
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    pair,
    said,
    shards_of,
    step_all,
    weight_error,
    wrap,
)
from tests.reference.models import INPUT, WIDTH, Block, Stack


def test_no_method_of_any_version_of_fsdp2_reaches_into_its_own_state() -> None:
    names = [name for name in vars(TheirModule) if not name.startswith("__")]
    functions = [name for name in names if callable(getattr(TheirModule, name))]
    assert len(functions) > 15
    assert [n for n in functions if getattr(FSDPModule, n) is getattr(TheirModule, n)] == []


@on_ranks(2)
def test_units_are_instances_and_refuse_by_name_what_they_do_not_have() -> None:
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2))
    wrap(model, model)
    for name in REFUSED_METHODS:
        assert f"has no {name}: " in said(
            RuntimeError, lambda name=name: getattr(model, name)(None)
        )
    with pytest.raises(AttributeError, match="has no '_lazy_init' of FSDP2's internals"):
        model._get_fsdp_state()._lazy_init()
    share_comm_ctx([model, model[0]])
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        their_fully_shard(model)
    instances = [isinstance(part, TheirModule) for part in (model, *model, nn.Linear(1, 1))]
    handle = model[0].unshard(async_op=True)
    instances.append(isinstance(handle, UnshardHandle))
    handle.wait()
    model[0].reshard()
    part = model[:2]
    classes = [type(module).__name__ for module in (part, part[0], model)]
    assert instances == [True, True, True, True, False, True]
    assert classes == ["Sequential", "FSDPBlock", "FSDPSequential"]


@pytest.mark.parametrize("default", [{}, {"sharding_strategy": "optim"}], ids=["", "a default"])
@on_ranks(2)
def test_ours_can_be_put_in_the_place_of_theirs(default: dict[str, Any]) -> None:
    with mock.patch(
        "torch.distributed.fsdp.fully_shard", functools.partial(fully_shard, **default)
    ):
        from torch.distributed import fsdp

        model = fsdp.fully_shard(Block())
    assert isinstance(model, FSDPModule)
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        their_fully_shard(model)


class Scorer(Stack):
    """A model that is also run through a method other than its forward."""

    def score(self, x: torch.Tensor, *, factor: float) -> torch.Tensor:
        return self.forward(x).square().mean() * factor


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2, register=[register_fsdp_forward_method, their_register])
def test_a_registered_forward_method_trains_as_the_forward_does(
    strategy: str, register: Any
) -> None:
    plain, model = pair(Scorer, sharding_strategy=strategy)
    register(model, "score")
    x = torch.randn(2, 4, INPUT)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(2):
        model.score(x[dist.get_rank()], factor=3.0).backward()
        for part in x:
            (plain.score(part, factor=3.0) / 2).backward()
        step_all(*optimizers)
    distance, reference = weight_error(model, plain), weakref.ref(model)
    register(plain, "score")  # not sharded: nothing happens
    del model, optimizers, part
    is_gone = reference() is None
    assert distance < 1e-6
    assert is_gone or register is their_register


class Generator(nn.Module):
    """A method that runs the forward, and computes with the module's own weight around it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.block(x) @ self.embedding.weight.t()) @ self.embedding.weight

    def generate(self, tokens: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = self(x)
        if fails:
            raise KeyboardInterrupt
        return self.embedding(tokens) + x


@on_ranks(2, register=[register_fsdp_forward_method, their_register], strategy=STRATEGIES)
def test_a_registered_method_may_run_the_forward_inside(strategy: str, register: Any) -> None:
    plain, model = pair(Generator, lambda m: [m.block], sharding_strategy=strategy)
    register(model, "generate")
    tokens, x = torch.tensor([1, 3, 3]), torch.randn(4, WIDTH)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    differences = []
    for fails in (False, True, False):
        if fails:
            with contextlib.suppress(KeyboardInterrupt):
                model.generate(tokens, fails=True)
        with torch.no_grad():
            differences.append(float((model.generate(tokens) - plain.generate(tokens)).abs().max()))
        for either in (model, plain):
            (either.generate(tokens).square().mean() + either(x).square().mean()).backward()
        step_all(*optimizers)
    assert max(*differences, weight_error(model, plain)) < 1e-6


@on_ranks(4, strategy=STRATEGIES)
def test_torchs_pipelining_trains_as_the_unsharded_loop_does(strategy: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stages = [nn.Sequential(Block(), Block()) for _ in range(2)]
    x, y = torch.randn(2, 2, 4, 3, WIDTH)
    plain = copy.deepcopy(stages)
    here, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    module = wrap(stages[here], stages[here], mesh=mesh["dp"], sharding_strategy=strategy)
    loss_fn = nn.functional.mse_loss
    stage = PipelineStage(module, here, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    kind = ScheduleGPipe if strategy in ("optim", "optim_grads_params") else Schedule1F1B
    runner = kind(stage, n_microbatches=4, loss_fn=loss_fn)
    whole = nn.Sequential(*plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, whole)]
    for _ in range(2):
        if here == 0:
            runner.step(x[dp])
        else:
            runner.step(target=y[dp])
        for part, target in zip(x, y, strict=True):
            (loss_fn(whole(part), target) / 2).backward()
        step_all(*optimizers)
    assert weight_error(module, plain[here]) < 1e-6


@on_ranks(2)
def test_weights_kept_after_a_backward_change_no_bit() -> None:
    torch.manual_seed(0)
    plain = Stack()
    weights, kept, after = [], [], True
    for keeps in (False, True):
        model = wrap(copy.deepcopy(plain))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for micro in range(3):
                model.set_reshard_after_backward(not keeps or micro == 2)
                model.set_requires_gradient_sync(micro == 2)
                torch.manual_seed(7 * step + micro)
                model(torch.randn(2, INPUT)).square().mean().backward()
                if keeps:
                    kept.append(model.blocks[1]._fsdp_unit.is_unsharded)
            step_all(optimizer)
        weights.append(shards_of(model))
        after = after and not model.blocks[1]._fsdp_unit.is_unsharded
    assert all(map(torch.equal, *weights))
    assert kept == [True, True, False] * 2
    assert after


class Failing(Stack):
    fails = False

    def forward(self, x: torch.Tensor) -> Any:
        x = self.run_blocks(self.input(x))
        if self.fails:
            raise KeyError("in the middle of a forward")
        return self.output(x)


@on_ranks(2)
def test_a_reset_after_an_exception_brings_sharded_parameters_back() -> None:
    model = wrap(Failing())
    model.fails = True
    with pytest.raises(KeyError):
        model(torch.randn(2, INPUT))
    model.reset_iter_state()
    is_sharded = all(hasattr(param, "full_tensor") for param in model.parameters())
    text = said(RuntimeError, model.blocks[0].reset_iter_state)
    model.fails = False
    model(torch.randn(2, INPUT)).sum().backward()
    assert is_sharded
    assert "blocks.0 (Block) is not the root" in text


@on_ranks(2)
def test_torchs_state_dicts_restore_model_and_optimizer() -> None:
    model = wrap(Stack())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model(torch.randn(2, INPUT)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step_all(optimizer)
        return shards_of(model)

    step()
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    first = step()
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert all(map(torch.equal, first, step()))
