"""Misuse of state is an error that says what to do, and what follows an error works."""

from __future__ import annotations

from typing import Any, override

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2 import fully_shard
from tests.distributed.wrapping import mesh_of, said, wrap
from tests.ranks import RankPools
from tests.reference.models import Stack


def _sharded(strategy: str = "optim_grads_params") -> Any:
    torch.manual_seed(0)
    return wrap(Stack(), sharding_strategy=strategy)


def _while_unsharded() -> None:
    model = Stack()
    mesh = mesh_of(dist.get_world_size())
    fully_shard(model.blocks[0], mesh=mesh).unshard()
    fully_shard(model, mesh=mesh)


def _in_the_middle_of_a_step() -> None:
    model = Stack()
    mesh = mesh_of(dist.get_world_size())
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    model(torch.ones(2, 5))
    fully_shard(model, mesh=mesh)


def _shared_with_another_root() -> None:
    mesh = mesh_of(dist.get_world_size())
    first, second = Stack(), Stack()
    second.blocks[0].up.weight = first.blocks[0].up.weight
    for model in (first, second):
        fully_shard(model.blocks[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    first(torch.ones(2, 5))
    second(torch.ones(2, 5))


def _tied_to_a_gathered_unit() -> None:
    mesh = mesh_of(dist.get_world_size())
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    fully_shard(first, mesh=mesh).unshard()
    fully_shard(second, mesh=mesh)


def _non_leaf() -> None:
    module = nn.Linear(3, 3)
    # What code that computes weights from others leaves behind.
    module._parameters["weight"] = module.weight * 2.0
    fully_shard(module, mesh=mesh_of(dist.get_world_size()))


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

    fully_shard(Recursive(), mesh=mesh_of(dist.get_world_size()))(torch.ones(3))


def _opts_out_between_backwards() -> None:
    model = _sharded("no_shard")
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
VALUE = {
    "parameter weight is not a leaf tensor": _non_leaf,
}
if not torch.cuda.is_available():
    # On a machine with a GPU that is a mesh like any other.
    VALUE["mesh is of device type 'cuda', and there is no CUDA device here"] = _cuda_mesh


def messages() -> list[tuple[str, str]]:
    """What is expected, and what every misuse says."""
    pairs = [(expected, said(RuntimeError, call)) for expected, call in RUNTIME.items()]
    return pairs + [(expected, said(ValueError, call)) for expected, call in VALUE.items()]


def test_every_misuse_says_what_is_wrong(pools: RankPools) -> None:
    for pairs in pools(2).run(messages):
        for expected, text in pairs:
            assert expected in text


def twice_on_one_graph(strategy: str) -> tuple[str, bool, bool]:
    """A second backward without and with a retained graph; whether gradients add up after."""
    x = torch.linspace(-1, 1, 10).view(2, 5)
    once = _sharded(strategy)
    once(x).square().mean().backward()
    model = _sharded(strategy)
    loss = model(x).square().mean()
    loss.backward()
    text = said(RuntimeError, loss.backward)
    model.zero_grad()
    model(x).square().mean().backward()
    works_after = _same(model, once, 1.0)
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return text, works_after, _same(model, once, 2.0)


def _same(model: Any, other: Any, factor: float) -> bool:
    return all(
        a.grad is b.grad is None or torch.allclose(a.grad.to_local(), factor * b.grad.to_local())
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads", "optim_grads_params"])
def test_a_second_backward_on_one_graph_is_torchs_error_or_adds(
    pools: RankPools, strategy: str
) -> None:
    for text, works_after, adds in pools(2).run(twice_on_one_graph, strategy):
        assert "backward through the graph a second time" in text
        assert works_after
        assert adds


def tied_step() -> tuple[bool, bool, int, int]:
    """A tied pair of units: one parameter, gathered while either runs, and how often."""
    torch.manual_seed(0)
    mesh = mesh_of(dist.get_world_size())
    first, middle, second = nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, middle, second)
    fully_shard(first, mesh=mesh)
    fully_shard(second, mesh=mesh)
    fully_shard(model, mesh=mesh)
    one = len(list(model.parameters())) == 1
    seen = []
    for layer in (first, second):
        layer.register_forward_pre_hook(lambda m, _: seen.append(tuple(m.weight.shape) == (4, 4)))
    with torch.profiler.profile() as profile:
        model(torch.ones(2, 4)).square().mean().backward()
    names = [event.name for event in profile.events()]
    rests = first.weight is second.weight and first.weight.to_local().shape[0] < 4
    gathers = sum(name == "gloo:all_gather" for name in names)
    return one and all(seen), rests, gathers, sum(name == "gloo:all_to_all" for name in names)


def test_a_tied_parameter_is_one_parameter_reduced_once(pools: RankPools) -> None:
    for fine, rests, gathers, reductions in pools(2).run(tied_step):
        assert fine
        assert rests
        # One per use in the forward, one in the backward that the prefetch holds from one use to
        # the other, and one for the comparison at the first use.
        assert gathers == 4
        assert reductions == 1


def ignored() -> tuple[bool, bool, bool]:
    """An ignored parameter stays the object it is, and gets its own plain gradient."""
    model = Stack()
    kept = model.blocks[0].up.weight
    mesh = mesh_of(dist.get_world_size())
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params={kept})
    fully_shard(model, mesh=mesh, ignored_params={kept})
    model(torch.ones(2, 5)).sum().backward()
    grad = kept.grad
    return model.blocks[0].up.weight is kept, type(grad) is torch.Tensor, bool((grad != 0).any())


def test_ignored_parameters_are_left_alone(pools: RankPools) -> None:
    assert set(pools(2).run(ignored)) == {(True, True, True)}


class _KeepsItsWeight(nn.Linear):
    """Computes with the parameter it was built with, past where that is registered."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.kept = [self.weight]

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kept[0].t() + self.bias


def gradient_of_a_kept_parameter() -> str:
    """What a backward says that brings a gradient to an original parameter."""
    model = fully_shard(_KeepsItsWeight(), mesh=mesh_of(dist.get_world_size()))
    return said(RuntimeError, lambda: model(torch.ones(2, 4)).sum().backward())


def test_a_module_that_computes_with_an_original_parameter_is_named(pools: RankPools) -> None:
    for text in pools(2).run(gradient_of_a_kept_parameter):
        assert "a gradient arrived for weight of" in text
        assert "as it was before fully_shard" in text


def clip_with_an_empty_rank(sizes: tuple[int, ...]) -> tuple[float, float, bool]:
    """Norm and clipped gradients of a model with fewer rows than ranks."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 3 if len(sizes) == 1 else 1, bias=False)
    weight = plain.weight.detach().clone().requires_grad_()
    outer = "optim" if len(sizes) == 2 else "no_shard"
    model = fully_shard(plain, mesh=mesh_of(*sizes), outer_dp_sharding_strategy=outer)
    (torch.ones(2, 4) @ weight.t()).square().sum().backward()
    model(torch.ones(2, 4)).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    expected = torch.nn.utils.clip_grad_norm_([weight], 0.5)
    grad = model.weight.grad
    start, end = model.weight.local_rows
    if start == end:
        return float(expected), float(expected), grad is None
    value = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    same = torch.allclose(grad.to_local(), weight.grad[start:end])
    return float(value), float(expected), same


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_gradients_are_clipped_where_a_rank_holds_none_at_all(
    pools: RankPools, sizes: tuple[int, ...]
) -> None:
    for norm, expected, same in pools(4).run(clip_with_an_empty_rank, sizes):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert same
