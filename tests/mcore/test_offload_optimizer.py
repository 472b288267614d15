"""The optimizer of two devices, by itself: what it steps, moves, says and loads."""

from __future__ import annotations

import functools
from typing import Any, override
from unittest import mock

import pytest
import torch

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from tests.cases import longer
from tests.mcore.offloading import (
    OPTIMIZERS,
    DTensorCalls,
    adam,
    backward,
    same,
    sharded_model,
    whole,
)
from tests.mcore.session import enter_rehearsal
from tests.mcore.trained import on_megatron
from tests.stream_safety import record_streams

STEPS = 4


def _offloaded(model: Any, kind: str = "adam", **options: Any) -> Any:
    from megatron_fsdp_v2_mcore.optim.offload import ShardedHybridOptimizer

    return ShardedHybridOptimizer(OPTIMIZERS[kind](model), **options)


# -- which parameters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "numels", [[5, 0, 3, 3, 0, 1], [78, 30, 24], [100, 1, 1, 1], [7], [0, 0], []]
)
def test_at_least_the_fraction_is_offloaded_and_less_than_a_parameter_beyond(
    numels: list[int],
) -> None:
    from megatron_fsdp_v2_mcore.optim.offload import choose_offloaded

    for fraction in (0.0, 0.1, 0.25, 0.5, 0.9, 1.0):
        chosen = choose_offloaded(numels, fraction)
        offloaded = sum(numels[i] for i in chosen)
        assert all(numels[i] for i in chosen)
        assert offloaded >= fraction * sum(numels)
        # Without any one of them it would be too little.
        if chosen:
            assert offloaded - min(numels[i] for i in chosen) < fraction * sum(numels)
        assert not chosen or fraction > 0
        assert fraction < 1 or offloaded == sum(numels)


# -- steps ----------------------------------------------------------------------------------------


def _trained(kind: str, strategy: str, offload: dict[str, Any] | None) -> Any:
    model = sharded_model(strategy)
    make = OPTIMIZERS[kind] if offload is None else functools.partial(_offloaded, kind=kind)
    optimizer = make(model, **(offload or {}))
    for step in range(STEPS):
        # In the third step a layer has no gradients: those of the second must not be used again.
        # Another layer has its first ones then.
        backward(model, step, without=[(2,), (2,), (1,), ()][step])
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
    return whole(model)


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(1, "optim"), (2, "no_shard"), longer(3, "optim_grads_params")],
)
@on_megatron("world_size")
def test_steps_are_bit_for_bit_those_without_offload(world_size: int, strategy: str) -> None:
    plain = {kind: _trained(kind, strategy, None) for kind in OPTIMIZERS}
    ways: list[tuple[str, dict[str, Any]]] = [
        (kind, {"fraction": fraction, "overlaps": overlaps})
        for kind in OPTIMIZERS
        for fraction, overlaps in ((0, False), (0.5, True), (0.5, False), (1, True))
    ]
    ways.append(("counting", {"fraction": 0.5, "uses_torch_on_device": True}))
    differing = [
        f"{kind} {options}"
        for kind, options in ways
        if not same(plain[kind], _trained(kind, strategy, options))
    ]
    assert differing == []


@on_megatron(2, fraction=[0.0, 0.5, 1.0])
def test_nothing_is_dispatched_through_dtensor_in_a_step(fraction: float) -> None:
    model = sharded_model()
    optimizer = _offloaded(model, fraction=fraction, overlaps=True)
    calls = DTensorCalls()
    # The first step makes state, the second copies weights that were changed.
    for step in range(2):
        backward(model, step)
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        with calls:
            optimizer.step()
    control = DTensorCalls()
    with control:
        next(model.parameters()).detach().clone()
    assert calls.counts["plain"] > 20
    assert calls.counts["dtensor"] == 0
    assert control.counts["dtensor"] > 0


@on_megatron(2)
def test_weights_that_others_change_are_stepped_as_they_are() -> None:
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
        results.append(whole(model))
    assert same(*results)


@on_megatron(1, pins_params=[True, False])
def test_copies_are_pinned_as_the_options_say_and_made_once(pins_params: bool) -> None:
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


@on_megatron(1, kind=["adam", "counting"], overlaps=[True, False])
def test_no_part_steps_before_the_copies_it_needs_are_made(kind: str, overlaps: bool) -> None:
    """On a GPU: the device's part, and the host's, with gradients of another dtype than weights."""
    model = sharded_model(mp_policy=MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16))
    with record_streams(model) as recording:
        device = recording.recorder
        with (
            mock.patch.object(torch.cuda, "Stream", lambda: device.new_stream("copies")),
            mock.patch.object(torch.cuda, "current_stream", device.current_stream),
            mock.patch.object(torch.cuda, "stream", device.use),
        ):
            optimizer = _offloaded(model, kind, fraction=0.5, overlaps=overlaps)
            for step in range(3):
                backward(model, step)
                optimizer.step()
    streams = {op.stream for op in recording.schedule.operations()}
    assert streams == {"compute", "host"} | ({"copies", "copies 2"} if overlaps else set())
    races = [str(violation) for violation in recording.violations()]
    assert races == []


# -- state ----------------------------------------------------------------------------------------


def _continued(kind: str, model: Any, state: Any, fraction: float) -> Any:
    optimizer = _offloaded(model, kind, fraction=fraction)
    optimizer.load_state_dict(state)
    for step in range(2, STEPS):
        backward(model, step)
        optimizer.step()
    return whole(model)


@on_megatron(
    2,
    kind=["adam", "counting"],
    fractions=[(1.0, 1.0), (0.5, 1.0), (1.0, 0.0), (0.0, 0.5)],
)
def test_state_loads_at_another_fraction_and_is_that_without_offload(
    kind: str, fractions: tuple[float, float]
) -> None:
    """And a run goes on with it bit for bit."""
    saved_with, loaded_with = fractions
    model = sharded_model()
    optimizer = _offloaded(model, kind, fraction=saved_with)
    plain = sharded_model()
    reference = OPTIMIZERS[kind](plain)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        backward(plain, step)
        reference.step()
    state, theirs = optimizer.state_dict(), reference.state_dict()
    # As without offload, and so is what is in it.
    keys, their_keys = (
        {key: sorted(values) for key, values in of["state"].items()} for of in (state, theirs)
    )
    groups, their_groups = state["param_groups"], theirs["param_groups"]
    weights = [param.detach().clone() for param in model.parameters()]
    for step in range(2, STEPS):
        backward(plain, step)
        reference.step()
    other = sharded_model()
    with torch.no_grad():
        for param, weight in zip(other.parameters(), weights, strict=True):
            param.copy_(weight)
    assert keys == their_keys
    assert groups == their_groups
    assert same(whole(plain), _continued(kind, other, state, loaded_with))


@on_megatron(2, form=["rows of a run on one rank", "whole"])
def test_state_of_another_number_of_ranks_is_cut_to_the_rows_here(form: str) -> None:
    # Every rank has all rows, as one rank of a run on one has.
    model = sharded_model("no_shard")
    optimizer = adam(model)
    backward(model, 0)
    optimizer.step()
    state = optimizer.state_dict()
    whole_moments = {
        (index, name): value.detach().full_tensor().clone()
        for index, values in state["state"].items()
        for name, value in values.items()
        if name != "step"
    }
    if form == "whole":
        for index, name in whole_moments:
            state["state"][index][name] = whole_moments[index, name]
    other = sharded_model()
    loaded = _offloaded(other, fraction=0.5)
    loaded.load_state_dict(state)
    found = []
    for index, param in enumerate(other.parameters()):
        if not local_of(param).numel():
            continue
        start, end = param.local_rows
        for name in ("exp_avg", "exp_avg_sq"):
            expected = whole_moments[index, name][start:end]
            moment = local_of(loaded.state[param][name])
            found.append(bool(expected.any()) and torch.equal(moment, expected))
    assert len(found) >= 6
    assert all(found)


@on_megatron(1, name=["exp_avg_sq", "step"])
def test_state_that_lacks_something_is_rejected_by_name(name: str) -> None:
    model = sharded_model()
    optimizer = _offloaded(model, fraction=1.0)
    backward(model, 0)
    optimizer.step()
    state = optimizer.state_dict()
    del state["state"][0][name]
    # Held, as names of parameters are asked of their model.
    other = sharded_model()
    loaded = _offloaded(other, fraction=0.5)
    with pytest.raises(RuntimeError, match=rf"state of .*weight.* has no {name}; load a state"):
        loaded.load_state_dict(state)


# -- bad input ------------------------------------------------------------------------------------


@on_megatron(1)
def test_what_cannot_be_offloaded_is_rejected_by_name() -> None:
    from megatron_fsdp_v2_mcore.optim.offload import ShardedHybridOptimizer

    model = sharded_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer_offload_fraction is from 0 to 1, got 1\.5"):
        _offloaded(model, fraction=1.5)
    with pytest.raises(ValueError, match="optimizer_cpu_offload cannot be used with SGD: there is"):
        ShardedHybridOptimizer(sgd, fraction=1.0)
    optimizer = _offloaded(model, fraction=1.0)
    with pytest.raises(RuntimeError, match="an offloaded optimizer takes no further parameter gro"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})


# -- others ---------------------------------------------------------------------------------------


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on a GPU, from which Megatron's class offloads."""

    is_cuda = True

    @override
    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return self.detach().as_subclass(torch.Tensor).clone()


def _with_megatrons_own(optimizer_cls: Any, **options: Any) -> list[torch.Tensor]:
    """Weights, and what is in the state dict, after steps of one that offloads."""
    torch.manual_seed(5)
    params = [torch.nn.Parameter(torch.randn(size).as_subclass(OnDevice)) for size in (30, 7, 3)]
    optimizer = optimizer_cls([{"params": params, "lr": 1e-2}], **options)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape).as_subclass(OnDevice)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    kept = [state[key][name] for key in sorted(state) for name in sorted(state[key])]
    return [tensor.detach().as_subclass(torch.Tensor).clone() for tensor in (*params, *kept)]


@on_megatron(1)
def test_who_uses_the_optimizer_without_sharding_sees_no_change() -> None:
    """Megatron's own class is in its place, and so is what it steps and keeps."""
    from megatron.core import optimizer as megatron_optimizers
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    import megatron_fsdp_v2_mcore

    def stepped() -> list[list[torch.Tensor]]:
        return [
            _with_megatrons_own(
                megatron_optimizers.HybridDeviceOptimizer,
                offload_fraction=fraction,
                cpu_optimizer_cls=torch.optim.AdamW,
                gpu_optimizer_cls=torch.optim.AdamW,
                param_update_in_fp32=True,
                overlap_cpu_optimizer_d2h_h2d=overlaps,
                lr=1e-2,
            )
            for fraction in (0.0, 0.5, 1.0)
            for overlaps in (False, True)
        ]

    enter_rehearsal()
    alone = stepped()
    megatron_fsdp_v2_mcore.enable()
    try:
        is_theirs = megatron_optimizers.HybridDeviceOptimizer is HybridDeviceOptimizer
        beside = stepped()
    finally:
        megatron_fsdp_v2_mcore.uninstall()
    plain = _with_megatrons_own(torch.optim.AdamW)
    assert is_theirs
    assert all(same(a, b) for a, b in zip(alone, beside, strict=True))
    # It does step them.
    assert all(same(a[:3], plain[:3]) for a in alone)
