"""Methods of FSDP2 that change how gradients are reduced, held against what they say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.wrapping import STRATEGIES, batch, listen, mesh_of, said, wrap
from tests.ranks import RankPools
from tests.reference.models import Stack


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    """Full gradients, which are taken away."""
    found = []
    for param in model.parameters():
        grad: Any = param.grad
        full = torch.zeros(param.shape, dtype=param.dtype)
        if grad is not None:
            start, end = grad.local_rows
            full[start:end] = grad.to_local()
        if not param.placements[-1].is_replicate():
            # Every row is held by one rank of the inner axis.
            dist.all_reduce(full, group=param.device_mesh.get_group(param.device_mesh.ndim - 1))
        found.append(full)
        param.grad = None
    return found


def _backward(model: nn.Module, rank: int) -> None:
    model(batch(rank, dtype=torch.float64)).square().mean().backward()


def ratios_of_factors(sums_only: bool) -> tuple[list[float], list[str]]:
    """Gradients of a unit and of the root over the mean's, by divide factor; errors."""
    model: Any = wrap(Stack().double())
    model.set_force_sum_reduction_for_comms(sums_only)
    model.blocks[0].set_force_sum_reduction_for_comms(sums_only)
    names = [name for name, _ in model.named_parameters()]
    block, output = names.index("blocks.0.up.weight"), names.index("output.weight")
    _backward(model, dist.get_rank())
    mean = _gradients(model)
    wire = listen(model)
    ratios = []
    for factor in (1.0, 4, 2.0):
        # One of a unit, and of no unit inside it.
        model.blocks[0].set_gradient_divide_factor(factor)
        _backward(model, dist.get_rank())
        found = _gradients(model)
        ratios += [float((found[i] / mean[i]).nanmean()) for i in (block, output)]
    assert wire.count("reduce_scatter")
    model.set_reduce_scatter_divide_factor(2.0)
    bad = said(ValueError, lambda: model.set_gradient_divide_factor(0))
    other: Any = wrap(Stack(), sharding_strategy="no_shard")
    with other.no_sync():
        other(batch(0)).sum().backward()
    late = said(RuntimeError, lambda: other.set_gradient_divide_factor(2.0))
    return ratios, [bad, late]


@pytest.mark.parametrize("sums_only", [False, True])
def test_a_divide_factor_is_of_one_unit_and_changes_between_steps(
    pools: RankPools, sums_only: bool
) -> None:
    for ratios, errors in pools(2).run(ratios_of_factors, sums_only):
        assert ratios == pytest.approx([2.0, 1.0, 0.5, 1.0, 1.0, 1.0])
        assert "must be a positive number, got 0" in errors[0]
        assert "call set_gradient_divide_factor between steps" in errors[1]


def unfrozen_with_a_factor() -> float:
    """A gradient over the mean's, of a parameter that was frozen when the factor was set."""
    model: Any = nn.Linear(4, 2, bias=False).requires_grad_(False)
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)
    model.requires_grad_(True)
    model(torch.ones(1, 4)).sum().backward()
    (grad,) = _gradients(model)
    return float(grad.mean())


def test_a_divide_factor_holds_for_parameters_unfrozen_later(pools: RankPools) -> None:
    assert pools(2).run(unfrozen_with_a_factor) == [2.0, 2.0]


def accumulated_without_all_reduce(strategy: str) -> tuple[float, list[bool], int]:
    """Distance of accumulated gradients; whether `grad` is set between; outer collectives there."""
    torch.manual_seed(0)
    plain = Stack().double()
    model: Any = wrap(copy.deepcopy(plain), sharding_strategy=strategy, mesh=mesh_of(2, 2))
    flat: Any = wrap(copy.deepcopy(plain), sharding_strategy=strategy, mesh=mesh_of(4))
    size, has_grad, outer = dist.get_world_size(), [], 0
    for micro in range(3):
        for rank in range(size):
            (plain(batch(rank, micro, dtype=torch.float64)).square().mean() / size).backward()
        for sharded in (model, flat):
            sharded.set_requires_all_reduce(micro == 2)
            x = batch(dist.get_rank(), micro, dtype=torch.float64)
            wire = listen(sharded)
            sharded(x).square().mean().backward()
            sent = [one for one in wire.sent if one.kind != "all_gather" and one.axis_size == 2]
            if micro < 2 and sharded is model and unit_of(model).groups[0].grads.has_partial:
                # The inner axis only: one collective for each unit.
                outer += len(sent) - 4
        weight = flat.output.weight
        has_grad.append(weight.grad is not None or not weight.to_local().numel())
    wanted = [param.grad for param in plain.parameters()]
    found = [*_gradients(model), *_gradients(flat)]
    pairs = zip(found, [*wanted, *wanted], strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs), has_grad, outer


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_accumulate_without_the_outer_axis(pools: RankPools, strategy: str) -> None:
    for distance, has_grad, outer in pools(4).run(accumulated_without_all_reduce, strategy):
        assert distance < 1e-12
        # A 1-D mesh has no all-reduce to leave out.
        assert has_grad == [True] * 3
        assert outer == 0


def accepted_and_rejected() -> list[str]:
    """What methods say to values without a meaning here, and that others are taken."""
    model: Any = wrap(Stack())
    model.set_unshard_in_backward(True)
    model.set_post_optim_event(None)
    model.set_reduce_scatter_max_input_buffers(1)
    assert unit_of(model.blocks[0]).context.reductions.max_live_grad_buffers == 1
    with pytest.warns(UserWarning) as warned:
        model.set_unshard_in_backward(False)
    model(batch(0)).sum().backward()
    return [
        str(warned[0].message),
        said(ValueError, lambda: model.set_reduce_scatter_max_input_buffers(0)),
        said(RuntimeError, lambda: model.set_all_reduce_hook(print)),
    ]


def test_values_without_a_meaning_are_rejected(pools: RankPools) -> None:
    for unshard, buffers, hook in pools(2).run(accepted_and_rejected):
        assert "the root (Stack) is gathered in its backward all the same" in unshard
        assert "max_input_buffers must be a whole number of at least 1, got 0" in buffers
        assert "give fully_shard a 2-D mesh" in hook
