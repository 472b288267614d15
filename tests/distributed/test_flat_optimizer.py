"""Optimizers on flat tensors are bitwise identical to optimizers on sharded parameters."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron_fsdp_v2.diagnostics import Role, memory_tracker
from megatron_fsdp_v2.dtensor.sharded_rows import local_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.optim import FlatOptimizer, Muon, flat_optimizer, step_flat
from tests.cases import longer
from tests.distributed.on_ranks import on_ranks
from tests.distributed.test_drop_in import CLASSES
from tests.distributed.wrapping import (
    BF16,
    batch,
    error_message,
    on_mesh,
    own_loss,
    step_all,
    wrap,
)
from tests.reference.models import INPUT, Stack

ALIGNED = 32
"""A width at which parameters have no padding between them."""


def _num_flat(optimizer: Any) -> tuple[int, int]:
    """Number of flat tensors in the last step, and of the parameters in them."""
    runs = [run for _, runs in optimizer._plan._runs for run in runs]
    return len(runs), sum(len(run.members) for run in runs)


def _bits(value: Any) -> Any:
    """A value that compares bitwise, so that equal NaN compare equal."""
    if not isinstance(value, torch.Tensor):
        return value
    rows, local = None, value.detach()
    if isinstance(value, UnevenDTensor):
        rows, local = (value.row_shards, value.placements), local_of(value).detach()
    found = local.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return type(value), value.dtype, value.shape, rows, local.shape, found


def _differences(plain: Any, flat: Any) -> list[str]:
    """Names of entries in which two state dicts of optimizers differ."""
    found: list[dict[str, Any]] = []
    for each in (plain, flat):
        found.append({"groups": each["param_groups"], "keys": list(each["state"])})
        for key, state in each["state"].items():
            found[-1].update({f"{key}.{name}": _bits(value) for name, value in state.items()})
    mine, other = found
    names = {**mine, **other}
    return [name for name in names if mine.get(name, "none") != other.get(name, "none")]


def _unequal(plain: tuple[Any, Any], flat: tuple[Any, Any]) -> list[str]:
    """Names of weights and state that differ between two models with their optimizers."""
    pairs = zip(plain[0].named_parameters(), flat[0].parameters(), strict=True)
    found = [name for (name, mine), other in pairs if _bits(mine) != _bits(other)]
    return found + _differences(plain[1].state_dict(), flat[1].state_dict())


def _made(
    kind: Any = optim.AdamW,
    *,
    is_flat: bool,
    build: Callable[[], nn.Module] = lambda: Stack(2, ALIGNED),
    how: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """A model and its optimizer with options `how`, plain or flat."""
    torch.manual_seed(0)
    model = wrap(build(), **options)
    kind = flat_optimizer(kind) if is_flat else kind
    return model, kind(model.parameters(), **{"lr": 0.01, "weight_decay": 0.1, **(how or {})})


def _train(model: Any, optimizer: Any, steps: range = range(2)) -> None:
    for step in steps:
        own_loss(model, step).backward()
        step_all(optimizer)


def _trained_pair() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """A trained model and its optimizer, with a plain and with a flat optimizer."""
    plain, flat = _made(is_flat=False), _made(is_flat=True)
    for made in (plain, flat):
        _train(*made)
    return plain, flat


# -- bitwise identity -----------------------------------------------------------------------------

_OPTIONS: dict[Any, dict[str, Any]] = {
    optim.SGD: {"momentum": 0.9, "nesterov": True},
    optim.Adam: {"maximize": True},
    optim.AdamW: {"amsgrad": True},
    optim.RMSprop: {"momentum": 0.9, "centered": True},
    optim.Adagrad: {"initial_accumulator_value": 0.1},
}


def _trained_with_changes(
    kind: Any, width: int, how: dict[str, Any], **options: Any
) -> tuple[Any, Any]:
    """A model and its optimizer after six steps, with changes of gradients, state and options."""
    torch.manual_seed(0)
    whole = Stack(2, width)
    whole.blocks[0].unused = nn.Parameter(torch.randn(4, 3))
    whole.blocks[0].table = nn.Parameter(torch.arange(30).view(10, 3), requires_grad=False)
    model: Any = wrap(whole, **options)
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
    optimizer = kind(groups, lr=0.01, **how)
    param, other = model.blocks[0].up.weight, model.output.weight
    for step in range(6):
        own_loss(model, step).backward()
        if step == 1:
            param.grad = None
        if step == 2 and param.grad is not None:
            param.grad = param.grad.clone().mul_(0.5)
        if step == 3:
            optimizer.param_groups[0]["lr"] *= 0.5
            for value in optimizer.state.get(other, {}).values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step > 2:
            # Freeze a parameter, and unfreeze it again.
            param.requires_grad_(step == 4)
    return model, optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "strategy", "width", "foreach"),
    [
        longer("1", "optim_grads_params", 7, True),
        longer("2", "no_shard", 16, False),
        ("3", "optim_grads_params", 7, False),
        longer("HFSDP 2x2", "optim", ALIGNED, True),
    ],
)
@on_ranks("mesh")
def test_flat_optimizers_are_bitwise_identical_for_every_class(
    mesh: str, strategy: str, width: int, foreach: bool
) -> None:
    options = {**on_mesh(mesh), "sharding_strategy": strategy}
    unequal = {}
    for cls in CLASSES:
        how = {"foreach": foreach, **_OPTIONS.get(cls, {})}
        made = [
            _trained_with_changes(kind, width, how, **options)
            for kind in (cls, flat_optimizer(cls))
        ]
        unequal[cls.__name__] = _unequal(*made)
    assert unequal == {cls.__name__: [] for cls in CLASSES}


SHARDINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bf16": (optim.AdamW, {"mp_policy": BF16, "sharding_strategy": "optim"}),
    # Torch's Adam does not support gradients whose dtype differs from the weights'.
    "bf16 gradients": (
        optim.SGD,
        {"mp_policy": dataclasses.replace(BF16, main_grads_dtype=torch.bfloat16)},
    ),
    "offloaded": (optim.AdamW, {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)}),
}


@on_ranks(2, name=SHARDINGS)
def test_flat_optimizers_are_bitwise_identical_for_every_kind_of_sharding(name: str) -> None:
    kind, options = SHARDINGS[name]
    made = [_made(kind, is_flat=is_flat, **options) for is_flat in (False, True)]
    for each in made:
        _train(*each)
    assert _num_flat(made[1][1])[0] == 3
    assert _unequal(*made) == []
    assert torch.equal(*(model(batch(0)) for model, _ in made))


# -- state ----------------------------------------------------------------------------------------


def _by_state_dict(source: Any, target: Any) -> None:
    file = io.BytesIO()
    torch.save(source[1].state_dict(), file)
    file.seek(0)
    target[1].load_state_dict(torch.load(file, weights_only=False))


def _by_distributed_state_dict(source: Any, target: Any) -> None:
    # A new optimizer initializes its state by a step with zero gradients.
    get_optimizer_state_dict(*target)
    set_optimizer_state_dict(*target, copy.deepcopy(get_optimizer_state_dict(*source)))


@on_ranks(2, move=[_by_state_dict, _by_distributed_state_dict])
def test_state_dicts_load_between_plain_and_flat_optimizers(move: Callable[..., None]) -> None:
    plain, flat = _trained_pair()
    fresh = [_made(is_flat=is_flat) for is_flat in (False, True)]
    for pair in ((plain, flat), fresh):
        assert _differences(*(get_optimizer_state_dict(*made) for made in pair)) == []
    for source in (plain, flat):
        other = _made(is_flat=source is plain)
        other[0].load_state_dict(source[0].state_dict())
        move(source, other)
        for made in (source, other):
            _train(*made, range(2, 4))
        assert _unequal(source, other) == []


@on_ranks(2)
def test_changes_of_kept_state_take_effect_in_the_next_step() -> None:
    plain, flat = _trained_pair()
    kept = [optimizer.state[model.blocks[0].up.weight] for model, optimizer in (plain, flat)]
    for (model, optimizer), state in zip((plain, flat), kept, strict=True):
        _train(model, optimizer, range(2, 3))
        # A kept state has the current step count.
        assert state["step"].item() == 3
        state["exp_avg"].zero_()
        state["step"].zero_()
        _train(model, optimizer, range(3, 5))
        optimizer.state[model.blocks[1].up.weight].clear()
        _train(model, optimizer, range(5, 6))
    assert _unequal(plain, flat) == []
    # Without the references, each group is one tensor again, except for parameters that differ.
    del kept, state
    _train(*plain, range(6, 8))
    _train(*flat, range(6, 8))
    assert _unequal(plain, flat) == []


@on_ranks(2)
def test_a_deep_copy_has_the_state_of_parameters() -> None:
    _, (_, flat) = _trained_pair()
    twin = copy.deepcopy(flat)
    assert isinstance(twin, FlatOptimizer)
    assert flat.state_dict()["state"]
    assert _differences(flat.state_dict(), twin.state_dict()) == []


# -- schedulers, closures, hooks and scalers ------------------------------------------------------


def _clipped_loss(model: Any, optimizer: Any, step: int) -> torch.Tensor:
    """Compute the loss of a step and its gradients, which are clipped."""
    optimizer.zero_grad()
    loss = own_loss(model, step)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return loss


@on_ranks(2)
def test_schedulers_closures_hooks_clipping_and_new_groups_work() -> None:
    made = []
    for is_flat in (False, True):
        torch.manual_seed(0)
        model = wrap(Stack(2, ALIGNED))
        kind: Any = flat_optimizer(optim.AdamW) if is_flat else optim.AdamW
        first, *rest = model.parameters()
        optimizer = kind([first], lr=0.1)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        calls: list[Any] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        for step in range(3):
            closure = functools.partial(_clipped_loss, model, optimizer, step)
            assert optimizer.step(closure).requires_grad
            scheduler.step()
            if step == 0:
                optimizer.add_param_group({"params": rest, "lr": 0.01})
        assert calls == ["before", "after"] * 3
        made.append((model, optimizer))
    assert _unequal(*made) == []


@on_ranks(2, how=["for-loop", "fused"])
def test_steps_with_a_gradient_that_is_not_finite_are_skipped(how: str) -> None:
    def build() -> nn.Module:
        # Widths that fill every vector of a fused kernel.
        model = nn.Sequential(nn.Linear(INPUT, 64), nn.Linear(64, 64))
        model[0].weight.requires_grad_(False)
        return model

    fused = {"fused": how == "fused"}
    made = [_made(is_flat=is_flat, build=build, how=fused) for is_flat in (False, True)]
    for model, optimizer in made:
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(3):
            scale = float("inf") if step == 1 else 1.0
            scaler.scale(model(batch(dist.get_rank(), step)).square().mean() * scale).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert _unequal(*made) == []


@on_ranks(2)
def test_state_takes_no_more_memory_than_alignment_needs() -> None:
    found = []
    for model, optimizer in (_made(is_flat=False), _made(is_flat=True)):
        with memory_tracker(model, optimizer) as memory:
            _train(model, optimizer, range(3))
        found.append(memory.live[Role.OPTIMIZER])
    # Alignment adds padding between parameters.
    assert 0 < found[0] <= found[1] < 1.05 * found[0]


@on_ranks(2)
def test_step_flat_converts_an_optimizer_in_use() -> None:
    plain, flat = _made(is_flat=False), _made(is_flat=False)
    _train(*plain, range(1))
    _train(*flat, range(1))
    assert step_flat(flat[1]) is flat[1]
    assert isinstance(flat[1], optim.AdamW)
    for model, optimizer in (plain, flat):
        _train(model, optimizer, range(1, 3))
    assert _num_flat(flat[1])[0] == 3
    assert _unequal(plain, flat) == []


# -- rejected optimizers --------------------------------------------------------------------------


class _Own(optim.SGD):
    """An elementwise optimizer that this package does not know."""


@on_ranks(2)
def test_unknown_optimizers_need_an_assertion() -> None:
    for kind in (optim.LBFGS, Muon, _Own):
        text = error_message(ValueError, lambda kind=kind: flat_optimizer(kind))
        assert f"{kind.__name__} is not known" in text and "elementwise=True" in text
    kind = flat_optimizer(_Own, elementwise=True)
    assert flat_optimizer(kind) is kind
    model = wrap(Stack(2, ALIGNED))
    text = error_message(
        ValueError, lambda: flat_optimizer(optim.Adam)(model.parameters(), differentiable=True)
    )
    assert "leave differentiable=True out" in text
    optimizer = optim.SGD(model.parameters(), lr=0.1, differentiable=True)
    assert text.replace("Adam", "SGD") == error_message(ValueError, lambda: step_flat(optimizer))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    assert "call step_flat first" in error_message(RuntimeError, lambda: step_flat(optimizer))
    _train(model, kind(model.parameters(), lr=0.1))
