"""Methods of FSDP2 that change how gradients are reduced, held against what they say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    listen,
    mesh_of,
    own_loss,
    plain_loss,
    said,
    wrap,
)
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


@on_ranks(2, sums_only=[False, True])
def test_a_divide_factor_is_of_one_unit_and_changes_between_steps(sums_only: bool) -> None:
    model: Any = wrap(Stack().double())
    model.set_force_sum_reduction_for_comms(sums_only)
    model.blocks[0].set_force_sum_reduction_for_comms(sums_only)
    names = [name for name, _ in model.named_parameters()]
    block, output = names.index("blocks.0.up.weight"), names.index("output.weight")
    own_loss(model).backward()
    mean = _gradients(model)
    wire = listen(model)
    ratios = []
    for factor in (1.0, 4, 2.0):
        # One of a unit, and of no unit inside it.
        model.blocks[0].set_gradient_divide_factor(factor)
        own_loss(model).backward()
        found = _gradients(model)
        ratios += [float((found[i] / mean[i]).nanmean()) for i in (block, output)]
    assert wire.count("reduce_scatter")
    model.set_reduce_scatter_divide_factor(2.0)
    bad = said(ValueError, lambda: model.set_gradient_divide_factor(0))
    other: Any = wrap(Stack(), sharding_strategy="no_shard")
    with other.no_sync():
        other(batch(0)).sum().backward()
    late = said(RuntimeError, lambda: other.set_gradient_divide_factor(2.0))
    assert ratios == pytest.approx([2.0, 1.0, 0.5, 1.0, 1.0, 1.0])
    assert "must be a positive number, got 0" in bad
    assert "call set_gradient_divide_factor between steps" in late


@on_ranks(2)
def test_a_divide_factor_holds_for_parameters_unfrozen_later() -> None:
    model: Any = nn.Linear(4, 2, bias=False).requires_grad_(False)
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)
    model.requires_grad_(True)
    model(torch.ones(1, 4)).sum().backward()
    (grad,) = _gradients(model)
    assert float(grad.mean()) == 2.0


@on_ranks(4, strategy=STRATEGIES)
def test_a_backward_that_is_finalized_by_a_call_synchronizes_there(strategy: str) -> None:
    torch.manual_seed(0)
    plain = Stack().double()
    model: Any = wrap(copy.deepcopy(plain), sharding_strategy=strategy, mesh=mesh_of(2, 2))
    on_a_unit = said(RuntimeError, lambda: model.blocks[0].set_manual_backward_finalization(True))
    without = said(RuntimeError, model.finalize_backward)
    model.set_manual_backward_finalization(True)
    model.finalize_backward()  # nothing ran
    model.set_is_last_backward(True)  # the call takes precedence
    for micro in range(2):
        plain_loss(plain, micro).backward()
        own_loss(model, micro).backward()
    is_waiting = any(group.has_unreduced for group in unit_of(model).groups)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    model.finalize_backward()
    is_left = any(group.has_unreduced for group in unit_of(model).groups)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    handle = model.finalize_backward(async_op=True)
    handle.wait()
    wanted = [param.grad for param in plain.parameters()]
    found = _gradients(model)
    difference = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
    model.set_manual_backward_finalization(False)
    own_loss(model, 0).backward()
    syncs_again = not any(group.has_unreduced for group in unit_of(model).groups)
    assert "blocks.0 (Block) is not the root; call set_manual_backward_finalization on" in on_a_unit
    assert "synchronize by themselves; call set_manual_backward_finalization(True)" in without
    assert (is_waiting, is_left, syncs_again) == (True, True, True)
    assert isinstance(handle, getattr(fsdp, "GradientReductionHandle", object))
    assert difference < 1e-12


@on_ranks(4, strategy=STRATEGIES)
def test_gradients_accumulate_without_the_outer_axis(strategy: str) -> None:
    torch.manual_seed(0)
    plain = Stack().double()
    model: Any = wrap(copy.deepcopy(plain), sharding_strategy=strategy, mesh=mesh_of(2, 2))
    flat: Any = wrap(copy.deepcopy(plain), sharding_strategy=strategy, mesh=mesh_of(4))
    has_grad, outer = [], 0
    for micro in range(3):
        plain_loss(plain, micro).backward()
        for sharded in (model, flat):
            sharded.set_requires_all_reduce(micro == 2)
            wire = listen(sharded)
            own_loss(sharded, micro).backward()
            sent = [one for one in wire.sent if one.kind != "all_gather" and one.axis_size == 2]
            if micro < 2 and sharded is model and unit_of(model).groups[0].grads.has_partial:
                # The inner axis only: one collective for each unit.
                outer += len(sent) - 4
        weight = flat.output.weight
        has_grad.append(weight.grad is not None or not weight.to_local().numel())
    wanted = [param.grad for param in plain.parameters()]
    found = [*_gradients(model), *_gradients(flat)]
    pairs = zip(found, [*wanted, *wanted], strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-12
    # A 1-D mesh has no all-reduce to leave out.
    assert has_grad == [True] * 3
    assert outer == 0


@on_ranks(2)
def test_values_without_a_meaning_are_rejected() -> None:
    model: Any = wrap(Stack())
    model.set_unshard_in_backward(True)
    model.set_post_optim_event(None)
    model.set_reduce_scatter_max_input_buffers(1)
    assert unit_of(model.blocks[0]).context.reductions.max_live_grad_buffers == 1
    with pytest.warns(UserWarning) as warned:
        model.set_unshard_in_backward(False)
    model(batch(0)).sum().backward()
    buffers = said(ValueError, lambda: model.set_reduce_scatter_max_input_buffers(0))
    hook = said(RuntimeError, lambda: model.set_all_reduce_hook(print))
    assert "the root (Stack) is gathered in its backward all the same" in str(warned[0].message)
    assert "max_input_buffers must be a whole number of at least 1, got 0" in buffers
    assert "give fully_shard a 2-D mesh" in hook
