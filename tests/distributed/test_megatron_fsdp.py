"""Programs written for NVIDIA's megatron-fsdp (v1) run with this package's names."""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2_for.megatron_fsdp import (
    NO_OP,
    REJECTED,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from tests.cases import quick_only
from tests.distributed import test_meshes, test_tensor_parallel
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    error_message,
    loss_of,
    mesh_of,
    of_all_ranks,
    own_loss,
    plain_loss,
    record_collectives,
    shards_of,
    step_all,
    weight_error,
    whole,
)
from tests.ranks import RankPools
from tests.reference.models import Block, Stack

EXACT = 1e-12
FP64 = MixedPrecisionPolicy(main_params_dtype=None)
MICRO, STEPS = 2, 3


def stack() -> Any:
    torch.manual_seed(0)
    return Stack().double()


def sharded(model: Any = None, **options: Any) -> MegatronFSDP:
    options = {"fsdp_unit_modules": [Block], "mixed_precision_policy": FP64} | options
    return fully_shard_model(stack() if model is None else model, **options)


def adamw(model: nn.Module) -> optim.Optimizer:
    """Two groups with different options."""
    params = list(model.parameters())
    groups = [{"params": params[::2], "weight_decay": 0.0}, {"params": params[1::2], "lr": 0.02}]
    return optim.AdamW(groups, lr=0.01, eps=1e-3, weight_decay=0.1)


def last_by_attribute(model: Any, is_last: bool) -> Any:
    model.is_last_microbatch = is_last
    return nullcontext()


def last_by_setting(model: Any, is_last: bool) -> Any:
    model.set_model_auto_sync(is_last)
    return nullcontext()


def last_by_context(model: Any, is_last: bool) -> Any:
    return nullcontext() if is_last else model.no_sync()


def last_by_sync(model: Any, is_last: bool) -> Any:
    return model.sync() if is_last else nullcontext()


# How a program says which backwards synchronize gradients.
MICRO_BATCHES: dict[str, tuple[bool, Callable[..., Any]]] = {
    "every backward": (True, lambda model, is_last: nullcontext()),
    "no_sync without effect": (True, last_by_context),
    "in the step": (False, lambda model, is_last: nullcontext()),
    "is_last_microbatch": (False, last_by_attribute),
    "set_model_auto_sync": (False, last_by_setting),
    "no_sync": (False, last_by_context),
    "sync": (False, last_by_sync),
}
EVERY, _, IN_THE_STEP, *_ = MICRO_BATCHES


def error_of_training(
    model: Any, optimizer: optim.Optimizer, way: str = EVERY, loss: Any = own_loss
) -> float:
    """Train this model and a plain one; return the largest difference of losses and weights."""
    plain, last = stack(), MICRO_BATCHES[way][1]
    theirs, error = adamw(plain), 0.0
    schedules = [optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (optimizer, theirs)]
    for step in range(STEPS):
        for micro in range(MICRO):
            data = MICRO * step + micro
            with last(model, micro == MICRO - 1):
                mine = loss(model, data)
                mine.backward()
            plain_loss(plain, data).backward()
            wanted = loss(plain, data)
            error = max(error, float((mine - wanted).detach().abs()))
        step_all(optimizer, theirs)
        for schedule in schedules:
            schedule.step()
    model._replace_param_with_distributed_if_needed()
    return max(error, weight_error(model, plain))


@on_ranks(2, strategy=STRATEGIES, way=MICRO_BATCHES)
def test_program_trains_like_the_unsharded_loop(strategy: str, way: str) -> None:
    model = sharded(zero_dp_strategy=strategy, sync_model_each_microbatch=MICRO_BATCHES[way][0])
    optimizer = fully_shard_optimizer(adamw(model))
    assert error_of_training(model, optimizer, way) < EXACT


HYBRID = [*((strategy, "no_shard") for strategy in STRATEGIES), (3, 1)]


@on_ranks(
    4, strategies=HYBRID, way=quick_only((EVERY, IN_THE_STEP, "is_last_microbatch"), IN_THE_STEP)
)
def test_hybrid_program_trains_like_the_unsharded_loop(strategies: Any, way: str) -> None:
    module = stack()
    model, optimizer = fully_shard(
        module,
        adamw(module),
        device_mesh=mesh_of(2, 2),
        dp_shard_dim="inner",
        dp_outer_dim="outer",
        hybrid_fsdp_group=dist.group.WORLD,
        fsdp_unit_modules=["tests.reference.models.Block"],
        zero_dp_strategy=strategies[0],
        outer_dp_sharding_strategy=strategies[1],
        mixed_precision_policy=FP64,
        sync_model_each_microbatch=MICRO_BATCHES[way][0],
    )
    assert error_of_training(model, optimizer, way) < EXACT


OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {name: True} for name in NO_OP},
    **{name: {name: False} for name in REJECTED},
    "overlap_grad_reduce": {"overlap_grad_reduce": False},
    "overlap_param_gather": {"overlap_param_gather": False},
    "calculate_per_token_loss": {"calculate_per_token_loss": True},
    "fsdp_double_buffer": {"fsdp_double_buffer": True},
    "device": {"device": torch.device("cpu")},
    "one unit": {"fsdp_unit_modules": None},
}


@on_ranks(2, name=OPTIONS)
def test_options_do_not_change_the_training(name: str) -> None:
    def mean_loss(model: nn.Module, data: int) -> torch.Tensor:
        loss = own_loss(model, data)
        is_summed = name == "calculate_per_token_loss" and isinstance(model, MegatronFSDP)
        return loss / dist.get_world_size() if is_summed else loss

    model = sharded(**OPTIONS[name])
    optimizer = fully_shard_optimizer(adamw(model))
    if name != "calculate_per_token_loss":
        assert error_of_training(model, optimizer) < EXACT
        return
    plain = stack()
    mean_loss(model, 0).backward()
    plain_loss(plain).backward()
    grads = [whole(param.grad) for param in model.parameters()]
    wanted = [param.grad for param in plain.parameters()]
    assert max(float((a - b).abs().max()) for a, b in zip(grads, wanted, strict=True)) < EXACT


# -- methods --------------------------------------------------------------------------------------


@on_ranks(2, strategy=STRATEGIES)
def test_zero_grad_drops_gradients_that_are_not_reduced(strategy: str) -> None:
    model = sharded(zero_dp_strategy=strategy, sync_model_each_microbatch=False)
    optimizer = fully_shard_optimizer(optim.SGD(model.parameters(), lr=0.1))
    # A second call changes nothing.
    optimizer = fully_shard_optimizer(optimizer)
    plain = stack()
    own_loss(model, 7).backward()
    loss = own_loss(model)
    optimizer.zero_grad()
    loss.backward()
    plain_loss(plain).backward()
    optimizer.step()
    optim.SGD(plain.parameters(), lr=0.1).step()
    assert weight_error(model, plain) < EXACT
    own_loss(model, 7).backward()
    optimizer.zero_grad(zero_grad_buffer=False)
    own_loss(model).backward()
    model.finish_grad_sync()
    kept = [whole(param.grad) for param in model.parameters()]
    plain.zero_grad()
    for data in (7, 0) if strategy in STRATEGIES[:2] else (0,):
        plain_loss(plain, data).backward()
    grads = [param.grad for param in plain.parameters()]
    assert max(float((a - b).abs().max()) for a, b in zip(kept, grads, strict=True)) < EXACT


@on_ranks(2, strategy=STRATEGIES[::2])
def test_step_takes_a_closure_and_can_leave_gradients_unsynchronized(strategy: str) -> None:
    model = sharded(zero_dp_strategy=strategy, sync_model_each_microbatch=False)
    optimizer = fully_shard_optimizer(optim.SGD(model.parameters(), lr=0.1))
    plain = stack()

    def closure() -> torch.Tensor:
        loss = own_loss(model)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    wanted = own_loss(plain)
    plain_loss(plain).backward()
    optim.SGD(plain.parameters(), lr=0.1).step()
    assert abs(float(loss.detach() - wanted.detach())) < EXACT
    assert weight_error(model, plain) < EXACT
    optimizer.zero_grad()
    own_loss(model).backward()
    before = shards_of(model)
    optimizer.step(sync_grad_before_optimizer_step=False, install_optimized_model_weights=False)
    stays = all(map(torch.equal, before, shards_of(model)))
    assert stays is (strategy == "no_shard")


@on_ranks(2, strategy=STRATEGIES[::3])
def test_an_optimizer_that_keeps_its_list_of_parameters_steps_the_sharded_ones(
    strategy: str,
) -> None:
    module, plain = stack(), stack()
    optimizers = [optim.LBFGS(each.parameters(), 0.1, max_iter=2) for each in (module, plain)]
    model, _ = fully_shard(
        module, optimizers[0], zero_dp_strategy=strategy, mixed_precision_policy=FP64
    )

    def closure(each: nn.Module, loss_of_all: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
        each.zero_grad()
        loss = loss_of_all(each)
        loss.backward()
        return loss.detach()

    optimizers[0].step(lambda: closure(model, plain_loss))  # type: ignore[arg-type]
    optimizers[1].step(lambda: closure(plain, plain_loss))  # type: ignore[arg-type]
    assert weight_error(model, plain) < EXACT


@on_ranks(2)
def test_a_step_unknown_to_torch_is_followed_by_an_installation() -> None:
    model, plain = sharded(zero_dp_strategy=1), stack()
    own_loss(model).backward()
    for param in (*model.parameters(), *plain.parameters()):
        local = param.to_local() if isinstance(param, DTensor) else param
        # As a kernel that advances no version counter.
        local.data.mul_(0.5)
    model.install_optimized_model_weights()
    difference = float((own_loss(model) - own_loss(plain)).detach().abs())
    assert difference < EXACT


@on_ranks(2)
def test_a_deleted_model_and_its_optimizer_are_freed() -> None:
    model = sharded()
    optimizer = fully_shard_optimizer(optim.SGD(model.parameters(), lr=0.1))
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    own_loss(model).backward()
    optimizer.step()
    schedule.step()
    found = weakref.ref(model.module), weakref.ref(optimizer)
    del model, optimizer, schedule
    assert [each() for each in found] == [None, None]


@on_ranks(2)
def test_a_schedule_may_be_made_before_the_optimizer_is_sharded() -> None:
    model, plain = sharded(zero_dp_strategy=1, sync_model_each_microbatch=False), stack()
    optimizers = [optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    schedules = [optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in optimizers]
    fully_shard_optimizer(optimizers[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for step in range(2):
            own_loss(model, step).backward()
            plain_loss(plain, step).backward()
            step_all(*optimizers)
            for schedule in schedules:
                schedule.step()
    assert weight_error(model, plain) < EXACT


# -- precision ------------------------------------------------------------------------------------

BF16, FP32 = torch.bfloat16, torch.float32
POLICIES: dict[str, tuple[MixedPrecisionPolicy, tuple[torch.dtype, ...]]] = {
    "default": (MixedPrecisionPolicy(), (FP32, FP32, BF16)),
    "gradients in fp32": (MixedPrecisionPolicy(main_grads_dtype=FP32), (FP32, FP32, FP32)),
    "gradients in bf16": (MixedPrecisionPolicy(main_grads_dtype=BF16), (FP32, FP32, BF16)),
    "communication": (
        MixedPrecisionPolicy(main_grads_dtype=BF16, grad_comm_dtype=FP32),
        (FP32, FP32, FP32),
    ),
    "model's": (MixedPrecisionPolicy(main_params_dtype=None), (BF16, BF16, BF16)),
}


@on_ranks(2, name=POLICIES)
def test_each_dtype_of_a_policy_is_applied(name: str) -> None:
    policy, (main, grad, sent) = POLICIES[name]
    model = fully_shard_model(Stack().to(BF16), mixed_precision_policy=policy)
    recorded = record_collectives(model)
    model(batch(dist.get_rank(), dtype=BF16)).float().square().mean().backward()
    recorded.sent.pop()
    optim.AdamW(model.parameters()).step()
    assert recorded.dtypes(gathers=True) == {BF16}
    assert recorded.dtypes(gathers=False) == {sent}
    assert {(p.dtype, p.grad.dtype) for p in model.parameters()} == {(main, grad)}


@on_ranks(2)
def test_gradients_that_are_not_finite_are_reported() -> None:
    messages = []
    for reports in (False, True):
        model = sharded(report_nan_in_param_grad=reports)
        loss = own_loss(model) * float("nan")
        messages.append(error_message(ValueError, loss.backward))
    assert messages[0] == "no error"
    assert "report_nan_in_param_grad: rank" in messages[1]
    assert any("gradient of" in message for _, message in of_all_ranks(messages))


# -- models ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_model_on_the_meta_device_has_the_values_of_the_unsharded_one() -> None:
    def build() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 3))

    plain = build()
    with torch.device("meta"):
        model = build()
    model = fully_shard_model(
        model, fsdp_unit_modules=[nn.MultiheadAttention], init_model_with_meta_device=True
    )
    assert weight_error(model, plain) == 0


@functools.cache
def meshes_with_experts(shape: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh]:
    """Meshes of dense parameters and of experts, whose last axis is `ep`."""
    names = ("outer", "inner", "ep")[-len(shape) :]
    experts = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return mesh_of(*shape[:-2], shape[-2] * shape[-1]), experts


# On 8 ranks, a case takes seconds.
WITH_EXPERTS: list[Any] = [((2, 2), 3, 0)]
WITH_EXPERTS += [
    pytest.param(((2, 2, 2), *strategies), marks=pytest.mark.slow) for strategies in HYBRID
]


@pytest.mark.parametrize("way", [EVERY, IN_THE_STEP])
@on_ranks(lambda case, **_: math.prod(case[0]), case=WITH_EXPERTS)
def test_experts_have_their_own_mesh(case: tuple[tuple[int, ...], Any, Any], way: str) -> None:
    shape, strategy, outer = case
    (mesh, experts), has_outer = meshes_with_experts(shape), len(shape) == 3
    model, share = test_meshes.build().double(), experts.get_local_rank("ep")
    for layer in model[:2]:
        layer.group = experts.get_group("ep")
        layer.up = nn.Parameter(layer.up.detach().chunk(2)[share].clone())
        layer.up.allreduce = False
    model = fully_shard_model(
        model,
        device_mesh=mesh,
        dp_shard_dim="inner",
        dp_outer_dim="outer" if has_outer else None,
        hybrid_fsdp_group=dist.group.WORLD if has_outer else None,
        hybrid_fsdp_expt_group=experts["outer", "inner"]._flatten().get_group()
        if has_outer
        else None,
        expt_device_mesh=experts,
        fsdp_unit_modules=[test_meshes.Mixture],
        zero_dp_strategy=strategy,
        outer_dp_sharding_strategy=outer,
        mixed_precision_policy=FP64,
        sync_model_each_microbatch=MICRO_BATCHES[way][0],
    )
    optimizer, plain = fully_shard_optimizer(adamw(model)), test_meshes.build().double()
    theirs, error = adamw(plain), 0.0
    for step in range(STEPS):
        for micro in range(MICRO):
            own_loss(model, MICRO * step + micro).backward()
            plain_loss(plain, MICRO * step + micro).backward()
        model.finish_grad_sync()
        norms = [whole(nn.utils.clip_grad_norm_(m.parameters(), 0.1)) for m in (model, plain)]
        error = max(error, float((norms[0] - norms[1]).abs()))
        step_all(optimizer, theirs)
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        rows = whole(mine)
        part = wanted if rows.shape == wanted.shape else wanted.chunk(2)[share]
        error = max(error, float((rows - part).abs().max()))
    assert error < EXACT


@on_ranks(4)
def test_tensor_parallel_parameters_are_sharded_along_the_named_axes() -> None:
    mesh = test_tensor_parallel.mesh_with_tp(2, 2)
    theirs = test_tensor_parallel.sharded(2, 2)
    model = fully_shard_model(
        test_tensor_parallel.parallelized(mesh, test_tensor_parallel.plain()),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Block],
    )
    for each in (theirs, model):
        optimizer = optim.AdamW(each.parameters(), lr=0.01)
        for step in range(2):
            test_tensor_parallel.loss_of(each, mesh.get_local_rank("dp"), step).backward()
            step_all(optimizer)
    assert all(map(torch.equal, shards_of(model), shards_of(theirs)))


# -- checkpoints ----------------------------------------------------------------------------------


def program(folder: str, strategy: int = 3, *, steps: int, saves: bool) -> dict[str, Any]:
    """The program of the library's page: save or load, then train; return the whole state."""
    module = stack()
    module.output.bias.requires_grad_(False)
    model = sharded(module, zero_dp_strategy=strategy)
    optimizer = fully_shard_optimizer(adamw(model))
    schedule = optim.lr_scheduler.StepLR(optimizer, 100)
    if not saves:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
    for step in range(steps):
        loss_of(model, 0, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if saves:
        dcp.save(state, checkpoint_id=folder)
    held = state["optimizer"]["state"]
    values = [held[key][name] for key in sorted(held) for name in sorted(held[key])]
    return {"weights": list(map(whole, state["model"].values())), "state": list(map(whole, values))}


@pytest.mark.parametrize("before", [0, 2], ids=["before the first step", "after two steps"])
def test_a_checkpoint_of_torch_resumes_at_any_size_and_strategy(
    pools: RankPools, tmp_path: Path, before: int
) -> None:
    (saved, *_) = pools(2).run(program, str(tmp_path), steps=before, saves=True)
    (fresh, *_) = pools(2).run(program, str(tmp_path / "other"), steps=1, saves=True)
    for size, strategy in ((2, 3), (3, 1)):
        (loaded, *_) = pools(size).run(program, str(tmp_path), strategy, steps=0, saves=False)
        (after, *_) = pools(size).run(program, str(tmp_path), strategy, steps=1, saves=False)
        assert all(map(torch.equal, loaded["weights"], saved["weights"]))
        assert len(loaded["state"]) == len(saved["state"]) > 0
        assert all(map(torch.equal, loaded["state"], saved["state"]))
        if not before:
            assert all(map(torch.allclose, after["weights"], fresh["weights"]))


@on_ranks(2)
def test_the_first_step_after_a_load_of_no_steps_is_a_first_step() -> None:
    models, optimizers = (sharded(), sharded()), []
    for model in models:
        # Dampening does not apply to the first step.
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        optimizers.append(fully_shard_optimizer(optimizer))
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for model, optimizer in zip(models, optimizers, strict=True):
        own_loss(model).backward()
        optimizer.step()
    assert all(map(torch.equal, *map(shards_of, models)))


@on_ranks(2)
def test_an_optimizer_with_state_from_its_construction_keeps_it() -> None:
    model = sharded()
    optimizer = fully_shard_optimizer(optim.Adagrad(model.parameters(), lr=0.1))
    optimizer.load_state_dict(optimizer.state_dict())
    own_loss(model).backward()
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


# -- errors ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_each_rejected_argument_is_named() -> None:
    given: dict[str, dict[str, Any]] = {name: {name: True} for name in REJECTED}
    given |= {
        "zero_dp_strategy must be one of": {"zero_dp_strategy": 4},
        "outer_dp_sharding_strategy must be one of": {"outer_dp_sharding_strategy": "optim_grads"},
        "outer_dp_sharding_strategy='optim' needs a 2-D mesh": {"outer_dp_sharding_strategy": 1},
        "dp_outer_dim='outer' needs a device_mesh": {"dp_outer_dim": "outer"},
        "device_mesh has no axes ('absent',)": {
            "device_mesh": mesh_of(2),
            "dp_shard_dim": "absent",
        },
        "device_mesh has no axes ('tp',)": {
            "device_mesh": mesh_of(2),
            "dp_shard_dim": "inner",
            "tp_dim": "tp",
        },
        "device_mesh needs dp_shard_dim": {"device_mesh": mesh_of(2)},
        "*_dim must name different axes, got ['inner', 'inner']": {
            "device_mesh": mesh_of(2),
            "dp_shard_dim": "inner",
            "tp_dim": "inner",
        },
        "of expt_device_mesh is given without": {"hybrid_fsdp_expt_group": dist.group.WORLD},
        "expt_device_mesh has no axes ('fsdp',)": {"expt_device_mesh": mesh_of(2)},
        "must have the ranks of ('inner',): [0, 1]": {
            "device_mesh": mesh_of(2),
            "dp_shard_dim": "inner",
            "hybrid_fsdp_group": dist.new_group([dist.get_rank()], use_local_synchronization=True),
        },
        "Stack has no experts": {
            "device_mesh": mesh_of(2),
            "dp_shard_dim": "inner",
            "expt_device_mesh": mesh_of(2),
        },
        "no module of fsdp_unit_modules": {"fsdp_unit_modules": [nn.Conv2d]},
        "main_grads_dtype=torch.float64 needs main weights": {
            "mixed_precision_policy": MixedPrecisionPolicy(main_grads_dtype=torch.float64)
        },
    }
    found = {
        text: error_message(ValueError, lambda options=options: sharded(**options))  # type: ignore[misc]
        for text, options in given.items()
    }
    assert [text for text, message in found.items() if text not in message] == []
    assert "no argument 'check_for_nan_in_grad'" in error_message(
        TypeError, lambda: sharded(check_for_nan_in_grad=True)
    )
    model = stack()
    model.blocks[0].up.weight.allreduce = False
    assert "blocks.0.up.weight has allreduce=False" in error_message(
        ValueError, lambda: sharded(model)
    )
    with torch.device("meta"):
        model = Stack()
    assert "init_model_with_meta_device=True" in error_message(ValueError, lambda: sharded(model))


@on_ranks(2)
def test_optimizers_that_cannot_be_sharded_are_rejected() -> None:
    model, other = stack(), stack()
    stepped = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own_loss(model).backward()
    stepped.step()
    for optimizer in (stepped, optim.SGD(other.parameters(), lr=0.1)):
        message = error_message(ValueError, lambda o=optimizer: fully_shard(model, o))  # type: ignore[misc]
        assert "has state already, or parameters that the model does not have" in message
    assert "no parameter of a MegatronFSDP model" in error_message(
        ValueError, lambda: fully_shard_optimizer(optim.SGD(other.parameters()))
    )
    kept = sharded()
    replaced = optim.SGD(kept.parameters())
    replaced.step = nullcontext  # type: ignore[assignment]
    message = error_message(ValueError, lambda: fully_shard_optimizer(replaced))
    assert "optimizer.step was replaced" in message
