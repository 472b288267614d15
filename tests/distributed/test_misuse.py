"""Misuse of state is an error that says what to do, and what follows an error works."""

from __future__ import annotations

from typing import Any, override

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_fsdp_v2 import fully_shard
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    batch,
    check_said,
    gradient_error,
    mesh_of,
    pair,
    said,
    wrap,
)
from tests.reference.models import INPUT, WIDTH, Stack


def _while_unsharded() -> None:
    model = Stack()
    fully_shard(model.blocks[0]).unshard()
    fully_shard(model)


def _in_the_middle_of_a_step() -> None:
    model = Stack()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    model(torch.ones(2, 5))
    fully_shard(model)


def _shared_with_another_root() -> None:
    first, second = Stack(), Stack()
    second.blocks[0].up.weight = first.blocks[0].up.weight
    for model in (first, second):
        fully_shard(model.blocks[0])
        fully_shard(model)
    first(torch.ones(2, 5))
    second(torch.ones(2, 5))


def _tied_to_a_gathered_unit() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    fully_shard(first).unshard()
    fully_shard(second)


def _non_leaf() -> None:
    module = nn.Linear(3, 3)
    # What code that computes weights from others leaves behind.
    module._parameters["weight"] = module.weight * 2.0
    fully_shard(module)


def _cuda_mesh() -> None:
    mesh = DeviceMesh("cuda", torch.arange(dist.get_world_size()), _init_backend=False)
    fully_shard(nn.Linear(3, 3), mesh=mesh)


def _within_itself() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.is_inner = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_inner:
                return x * self.weight
            self.is_inner = True
            return self(x)

    fully_shard(Recursive())(torch.ones(3))


def _opts_out_between_backwards() -> None:
    model = wrap(Stack(), sharding_strategy="no_shard")
    with model.no_sync():
        model(torch.ones(2, 5)).sum().backward()
    model.set_requires_gradient_reduction(False)


RUNTIME = {
    "call reshard() on it, or wrap its parent before the first step": _while_unsharded,
    "is gathered or has a reduction under way": _in_the_middle_of_a_step,
    "which belongs to another root; call fully_shard on a module that": _shared_with_another_root,
    "which is gathered; call reshard() on its module first": _tied_to_a_gathered_unit,
    "a module must not be run inside its own forward": _within_itself,
    "has gradients that are not synchronized yet": _opts_out_between_backwards,
}
VALUE = {"parameter weight is not a leaf tensor": _non_leaf}
if not torch.cuda.is_available():
    # On a machine with a GPU that is a mesh like any other.
    VALUE["mesh is of device type 'cuda', and there is no CUDA device here"] = _cuda_mesh


@on_ranks(2)
def test_every_misuse_says_what_is_wrong() -> None:
    check_said(RuntimeError, RUNTIME)
    check_said(ValueError, VALUE)


@on_ranks(2, strategy=["no_shard", "optim_grads", "optim_grads_params"])
def test_a_second_backward_on_one_graph_is_torchs_error_or_adds(strategy: str) -> None:
    x = torch.linspace(-1, 1, 10).view(2, 5)
    plain, model = pair(sharding_strategy=strategy)
    plain(x).square().mean().backward()
    loss = model(x).square().mean()
    loss.backward()
    text = said(RuntimeError, loss.backward)
    model.zero_grad()
    model(x).square().mean().backward()
    errors = [gradient_error(model, plain)]
    model.zero_grad()
    plain(x).square().mean().backward()
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    errors.append(gradient_error(model, plain))
    assert "backward through the graph a second time" in text
    assert max(errors) < 1e-6


@on_ranks(2)
def test_a_tied_parameter_is_one_parameter_reduced_once() -> None:
    first, middle, second = nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, middle, second)
    fully_shard(first)
    fully_shard(second)
    fully_shard(model)
    assert len(list(model.parameters())) == 1
    seen = []
    for layer in (first, second):
        layer.register_forward_pre_hook(lambda m, _: seen.append(tuple(m.weight.shape) == (4, 4)))
    with torch.profiler.profile() as profile:
        model(torch.ones(2, 4)).square().mean().backward()
    names = [event.name for event in profile.events()]
    rests = first.weight is second.weight and first.weight.to_local().shape[0] < 4
    assert all(seen)
    assert rests
    # One per use in the forward, one in the backward that the prefetch holds from one use to
    # the other, and one for the comparison at the first use.
    assert names.count("gloo:all_gather") == 4
    assert names.count("gloo:all_to_all") == 1


@on_ranks(2)
def test_ignored_parameters_are_left_alone() -> None:
    """An ignored parameter stays the object it is, and gets its own plain gradient."""
    model = Stack()
    kept = model.blocks[0].up.weight
    wrap(model, ignored_params={kept})
    model(torch.ones(2, 5)).sum().backward()
    assert model.blocks[0].up.weight is kept
    assert type(kept.grad) is torch.Tensor
    assert bool((kept.grad != 0).any())


class _KeepsItsWeight(nn.Linear):
    """Computes with the parameter it was built with, past where that is registered."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.kept = [self.weight]

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kept[0].t() + self.bias


@on_ranks(2)
def test_a_module_that_computes_with_an_original_parameter_is_named() -> None:
    model = fully_shard(_KeepsItsWeight())
    text = said(RuntimeError, lambda: model(torch.ones(2, 4)).sum().backward())
    assert "a gradient arrived for weight of" in text
    assert "as it was before fully_shard" in text


@on_ranks(2)
def test_other_wrappers_around_and_inside_are_named() -> None:
    def around() -> nn.Module:
        return nn.Sequential(wrap(Stack()), nn.Linear(3, 3))

    def fsdp1(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"))

    ddp, inner = DistributedDataParallel, nn.Sequential(nn.Linear(3, 3))
    their_fully_shard(inner[0], mesh=mesh_of(2))
    for module in (wrap(Stack()), around()):
        by_ddp = said(RuntimeError, lambda module=module: ddp(module))
        by_fsdp1 = said(RuntimeError, lambda module=module: fsdp1(module))
        assert f"{ddp.__name__} was called on a module that is, or contains, a FSDPStack" in by_ddp
        assert "FullyShardedDataParallel (FSDP1) was called on a module" in by_fsdp1
    by_fsdp2 = said(RuntimeError, lambda: their_fully_shard(around(), mesh=mesh_of(2)))
    assert "torch.distributed.fsdp.fully_shard was called on a module" in by_fsdp2
    reduces = {
        "0 (DistributedDataParallel) reduces its gradients through": ddp(nn.Linear(3, 3)),
        "0 (FullyShardedDataParallel) reduces its gradients through": fsdp1(nn.Linear(3, 3)),
        "0.0 (FSDPLinear) reduces its gradients through torch.distributed.fsdp.fully_": inner,
    }
    for text, module in reduces.items():
        outer = nn.Sequential(module)
        assert text in said(ValueError, lambda outer=outer: fully_shard(outer))
    itself = said(ValueError, lambda: fully_shard(ddp(nn.Linear(3, 3))))
    assert "the module (DistributedDataParallel) reduces its gradients" in itself


@on_ranks(2)
def test_a_module_run_outside_of_its_units_forward_is_named() -> None:
    model: Any = wrap(Stack())
    block, x = model.blocks[1], torch.randn(2, WIDTH)
    embedding: Any = fully_shard(nn.Sequential(nn.Embedding(9, WIDTH)))
    functional = nn.functional
    for name, call in (
        ("input.weight of Stack", lambda: functional.linear(batch(0), model.input.weight)),
        ("up.weight of blocks.1", lambda: block.up(x)),
        ("norm.weight of blocks.1", lambda: block.norm(x)),
        ("0.weight of Sequential", lambda: embedding[0](torch.tensor([1, 2]))),
        ("up.weight of blocks.1", lambda: torch.matmul(torch.randn(2, INPUT), block.up.weight)),
    ):
        text = said(RuntimeError, call)
        assert "which is sharded: this rank holds some of its rows" in text, name
        assert "unshard()" in text and "register_fsdp_forward_method" in text
        assert f"computes with {name}" in text
    # What has another reason keeps its message.
    shape = said(RuntimeError, lambda: model.input.weight.view(-1, 11))
    assert "which is sharded" not in shape and shape != "no error"
    block.unshard()
    assert block.up(x).shape == (2, 2 * WIDTH + 1)
    block.reshard()
