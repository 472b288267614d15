"""The hybrid CPU and GPU optimizer alone: steps, copies, memory accounting, errors and state."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.diagnostics import memory_tracker
from megatron_fsdp_v2.diagnostics.memory_ledger import Role
from megatron_fsdp_v2.dtensor.sharded_rows import local_of
from megatron_fsdp_v2.params.autograd import is_gathered_weight
from tests.cases import longer
from tests.distributed.wrapping import Dispatched
from tests.mcore.flags import fsdp
from tests.mcore.session import Training, enter_rehearsal, train
from tests.mcore.trained import assert_equal, on_megatron, trained
from tests.ranks import RankPools
from tests.stream_safety import record_streams

SIZES = (12, 7, 5)


class Layers(nn.Module):
    """Independent linear layers; some ranks have no rows of some parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for size in SIZES)

    def forward(self, step: int, without: tuple[int, ...]) -> torch.Tensor:
        loss = torch.zeros(())
        for index, layer in enumerate(self.layers):
            if index not in without:
                torch.manual_seed(100 * step + 10 * index + dist.get_rank())
                loss = loss + layer(torch.randn(4, SIZES[index])).square().sum()
        return loss


def sharded_model(strategy: str = "optim_grads_params", **options: Any) -> Layers:
    """Return a new model with equal weights on every call; options are for `fully_shard`."""
    enter_rehearsal()
    torch.manual_seed(3)
    model = Layers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for module in (*model.layers, model):
        fully_shard(
            module, mesh=mesh, sharding_strategy=strategy, on_missing_grad="zero", **options
        )
    return model


def adam(model: Layers) -> torch.optim.Optimizer:
    """Return torch's AdamW with two parameter groups that differ in options."""
    params = list(model.parameters())
    return torch.optim.AdamW(
        [{"params": params[:3], "lr": 2e-2}, {"params": params[3:]}],
        lr=1e-2,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )


def backward(model: Layers, step: int, without: tuple[int, ...] = ()) -> None:
    """Compute the gradients of a step; layers in `without` have none."""
    model.zero_grad()
    model(step, without).backward()
    for index in without:
        for param in model.layers[index].parameters():
            param.grad = None


def full_parameters(model: Layers) -> list[torch.Tensor]:
    """Return the full parameters. Collective."""
    return [param.detach().full_tensor().clone() for param in model.parameters()]


def bitwise_identical(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Return whether parameters are bitwise identical."""
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


STEPS = 4


def _offloaded(model: Any, **options: Any) -> Any:
    from megatron_fsdp_v2_mcore.optim.offload import ShardedHybridOptimizer

    return ShardedHybridOptimizer(adam(model), **options)


# -- steps ----------------------------------------------------------------------------------------


def _trained(strategy: str, offload: dict[str, Any] | None) -> Any:
    model = sharded_model(strategy)
    optimizer = adam(model) if offload is None else _offloaded(model, **offload)
    for step in range(STEPS):
        # In the third step layer 1 has no gradients: those of the second must not be used again.
        # Layer 2 has its first gradients in that step.
        backward(model, step, without=[(2,), (2,), (1,), ()][step])
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
    return full_parameters(model)


def test_a_shared_embedding_is_offloaded_with_every_fraction_above_zero() -> None:
    from megatron_fsdp_v2_mcore.optim.offload import choose_offloaded

    stages = [40, 8, 2], [40, 30, 20, 10]
    for fraction, others in (
        (0.01, (set(), set())),
        (0.9, ({1}, {1, 2})),
        (1.0, ({1, 2}, {1, 2, 3})),
    ):
        found = [choose_offloaded(numels, fraction, first=[0]) for numels in stages]
        assert found == [{0} | more for more in others]
    assert choose_offloaded(stages[0], 0.0, first=[0]) == set()
    assert choose_offloaded([0, 8], 0.5, first=[0]) == {1}


@pytest.mark.parametrize(
    ("world_size", "strategy"), [(1, "optim"), (2, "no_shard"), longer(3, "optim_grads_params")]
)
@on_megatron("world_size")
def test_steps_are_bitwise_identical_to_steps_without_offload(
    world_size: int, strategy: str
) -> None:
    plain = _trained(strategy, None)
    ways: list[dict[str, Any]] = [
        {"fraction": fraction, "overlaps": overlaps}
        for fraction, overlaps in ((0, False), (0.5, True), (0.5, False), (1, True))
    ]
    ways.append({"fraction": 0.5, "uses_torch_on_device": True})
    differing = [way for way in ways if not bitwise_identical(plain, _trained(strategy, way))]
    assert differing == []


@on_megatron(2)
def test_step_dispatches_no_operations_through_dtensor() -> None:
    model = sharded_model()
    optimizer = _offloaded(model, fraction=0.5, overlaps=True)
    calls: Counter[bool] = Counter()

    def count(func: Any, args: Any, result: Any) -> None:
        calls[any(isinstance(arg, DTensor) for arg in tree_leaves(args))] += 1

    # The first step creates state; the second copies changed weights.
    for step in range(2):
        backward(model, step)
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        with Dispatched(count):
            optimizer.step()
    assert calls[False] > 20 and calls[True] == 0
    with Dispatched(count):
        next(model.parameters()).detach().clone()
    assert calls[True] > 0


@on_megatron(2)
def test_step_uses_externally_changed_weights() -> None:
    results = []
    for make in (adam, functools.partial(_offloaded, fraction=1.0)):
        model = sharded_model()
        optimizer = make(model)
        for step in range(3):
            backward(model, step)
            optimizer.step()
            params = list(model.parameters())
            with torch.no_grad():
                params[0].mul_(3)
                torch._foreach_mul_(params[1:3], 0.5)
                params[3].data.copy_(torch.ones_like(params[3]))
                params[4].data = torch.full_like(params[4], 0.5)
        results.append(full_parameters(model))
    assert bitwise_identical(*results)


@on_megatron(1, pins_params=[True, False])
def test_host_copies_follow_the_pin_options_and_are_allocated_once(pins_params: bool) -> None:
    from megatron_fsdp_v2_mcore.optim import offload

    asked = []
    make = offload.empty_in_host_memory

    def empty(shape: Any, dtype: Any, *, pin_memory: bool) -> torch.Tensor:
        asked.append(("params" if is_building else "grads", pin_memory))
        return make(shape, dtype, pin_memory=pin_memory)

    model = sharded_model()
    with mock.patch.object(offload, "empty_in_host_memory", empty):
        is_building = True
        pins = {"pin_params": pins_params, "pin_grads": not pins_params}
        optimizer = _offloaded(model, fraction=1.0, **pins)
        is_building = False
        for step in range(2):
            backward(model, step)
            optimizer.step()
    assert asked == [("params", pins_params)] * 6 + [("grads", not pins_params)] * 6


@on_megatron(1, overlaps=[True, False])
def test_every_part_steps_after_its_copies(overlaps: bool) -> None:
    """On recorded streams of both parts; gradients and weights have different dtypes."""
    model = sharded_model(mp_policy=MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16))
    with (
        record_streams(model) as recording,
        mock.patch.object(torch.cuda, "Stream", lambda: recording.new_stream("copies")),
        mock.patch.object(torch.cuda, "current_stream", recording.current_stream),
        mock.patch.object(torch.cuda, "stream", recording.use),
    ):
        optimizer = _offloaded(model, fraction=0.5, overlaps=overlaps)
        for step in range(3):
            backward(model, step)
            optimizer.step()
    streams = {op.stream for op in recording.schedule.operations()}
    assert streams == {"compute", "host"} | ({"copies", "copies 2"} if overlaps else set())
    races = [str(violation) for violation in recording.violations()]
    assert races == []


# -- state ----------------------------------------------------------------------------------------


@on_megatron(2, form=["rows of a run on one rank", "full"])
def test_state_of_another_world_size_is_sharded_to_local_rows(form: str) -> None:
    # Every rank has all rows, like the only rank of a run on one rank.
    model = sharded_model("no_shard")
    optimizer = adam(model)
    backward(model, 0)
    optimizer.step()
    state = optimizer.state_dict()
    full_moments = {
        (index, name): value.detach().full_tensor().clone()
        for index, values in state["state"].items()
        for name, value in values.items()
        if name != "step"
    }
    if form == "full":
        for index, name in full_moments:
            state["state"][index][name] = full_moments[index, name]
    other = sharded_model()
    loaded = _offloaded(other, fraction=0.5)
    loaded.load_state_dict(state)
    found = []
    for index, param in enumerate(other.parameters()):
        if not local_of(param).numel():
            continue
        start, end = param.local_rows
        for name in ("exp_avg", "exp_avg_sq"):
            expected = full_moments[index, name][start:end]
            moment = local_of(loaded.state[param][name])
            found.append(bool(expected.any()) and torch.equal(moment, expected))
    assert len(found) >= 6
    assert all(found)


@on_megatron(1, name=["exp_avg_sq", "step"])
def test_incomplete_state_is_rejected_by_name(name: str) -> None:
    model = sharded_model()
    optimizer = _offloaded(model, fraction=1.0)
    backward(model, 0)
    optimizer.step()
    state = optimizer.state_dict()
    del state["state"][0][name]
    # Keep the model alive: the error reads the names of its parameters.
    other = sharded_model()
    loaded = _offloaded(other, fraction=0.5)
    with pytest.raises(RuntimeError, match=rf"state of .*weight.* has no {name}; load a state"):
        loaded.load_state_dict(state)


# -- bad input ------------------------------------------------------------------------------------


@on_megatron(1)
def test_offloaded_optimizer_rejects_additional_groups() -> None:
    optimizer = _offloaded(sharded_model(), fraction=1.0)
    with pytest.raises(RuntimeError, match="an offloaded optimizer takes no further parameter gro"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})


def train_offloading(flags: Sequence[str], modules: Sequence[str]) -> Training:
    """Train while Megatron offloads the activations of some modules to the host.

    Megatron's command line supports this offload only with Transformer Engine and CUDA tensors.
    `extras` has the number of offloaded tensors, and the number of gathered weights among them.
    """
    gpt = enter_rehearsal()["gpt"]
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    make, move = gpt.core_transformer_config_from_args, offload.ChunkOffloadHandler.offload
    moved: list[bool] = []

    def with_modules(*args: Any, **kwargs: Any) -> Any:
        config = make(*args, **kwargs)
        config.fine_grained_activation_offloading = bool(modules)
        config.offload_modules = list(modules)
        config.min_offloaded_tensor_size = 0
        return config

    def noted(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        moved.append(is_gathered_weight(tensor))
        return move(self, tensor, *args, **kwargs)

    def is_managed(tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, torch.nn.Parameter)

    handler = offload.ChunkOffloadHandler
    with (
        # Megatron uses this module only to notify Transformer Engine's own layers.
        mock.patch.object(transformer_engine, "cpu_offload", SimpleNamespace()),
        mock.patch.object(gpt, "core_transformer_config_from_args", with_modules),
        mock.patch.object(handler, "offload", noted),
        mock.patch.object(handler, "_can_manage_tensor_for_offload", staticmethod(is_managed)),
    ):
        try:
            result = train(flags)
        finally:
            offload.PipelineOffloadManager.reset_instance()
    return dataclasses.replace(result, extras=(len(moved), sum(moved)))


MOMENTS, COUNTER = 8, 4
"""Bytes of an element's two moments, and of a parameter's step counter."""


@pytest.mark.parametrize(
    ("tracks_from_the_start", "fraction"), [(True, None), (True, 0.5), (False, 0.5), (False, 1.0)]
)
@on_megatron(2)
def test_memory_tracker_separates_offloaded_state_from_state_on_the_device(
    tracks_from_the_start: bool, fraction: float | None
) -> None:
    model = sharded_model()
    # Live tensors that earlier tests offloaded would be counted.
    gc.collect()
    optimizer = adam(model) if fraction is None else _offloaded(model, fraction=fraction)
    if not tracks_from_the_start:
        backward(model, 0)
        optimizer.step()
    with memory_tracker(model, optimizer) as memory:
        for step in range(1, 3):
            backward(model, step)
            optimizer.step()
    slots = [] if fraction is None else optimizer._slots
    on_host = [slot.param for slot in slots if slot.is_on_host]
    numels = [param.to_local().numel() for param in model.parameters()]
    elements = sum(param.to_local().numel() for param in on_host)
    # An offloaded optimizer has no state of parameters without rows.
    num_stepped = sum(numel > 0 or fraction is None for numel in numels)
    rest = sum(numels) - elements, num_stepped - len(on_host)
    device, offloaded = memory.live[Role.OPTIMIZER], dict(memory.offloaded)
    assert elements >= (fraction or 0) * sum(numels)
    assert device == MOMENTS * rest[0] + COUNTER * rest[1]
    # Moments, a copy of the main weight, and a copy of its gradient.
    of_optimizer = (MOMENTS + 8) * elements + COUNTER * len(on_host)
    assert offloaded.pop(Role.OPTIMIZER, 0) == of_optimizer
    assert sum(offloaded.values()) == 0
    assert ("Offloaded to host memory: optimizer" in memory.report()) == bool(fraction)
    if fraction == 1.0:
        assert device == 0
    if fraction == 0.5:
        assert 0 < device <= MOMENTS * sum(numels) / 2 + COUNTER * rest[1]
    if fraction == 1.0 and not tracks_from_the_start:
        # Not even temporarily.
        assert memory.role_peaks[Role.OPTIMIZER] == 0


@pytest.mark.slow
def test_megatrons_activation_offload_composes_with_sharded_parameters(megatron: RankPools) -> None:
    modules = ("attn_norm", "qkv_linear", "core_attn", "attn_proj")
    plain, moved = (
        trained(megatron, 2, fsdp(), "--train-iters 3", by=train_offloading, modules=names)
        for names in ((), modules)
    )
    assert_equal(moved, plain)
    for num_moved, num_weights in moved.extras:
        assert num_moved > 20
        assert num_weights == 0
