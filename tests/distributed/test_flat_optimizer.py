"""Optimizers on flat tensors: bit by bit those on sharded parameters, to all who look."""

from __future__ import annotations

import copy
import dataclasses
import io
import random
from collections.abc import Callable
from pathlib import Path
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

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.diagnostics import Role, memory_tracker
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of
from megatron_fsdp_v2.optim import FlatOptimizer, Muon, flat_optimizer, step_flat
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.cases import longer
from tests.distributed.on_ranks import on_ranks
from tests.distributed.test_drop_in import CLASSES
from tests.distributed.wrapping import (
    BF16,
    STRATEGIES,
    Operations,
    batch,
    on_mesh,
    own_loss,
    said,
    step_all,
    wrap,
)
from tests.reference.models import INPUT, Stack, TiedAcross

ALIGNED = 32
"""A width whose parameters have nothing between them."""


def _num_flat(optimizer: Any) -> tuple[int, int]:
    """Flat tensors of the last step, and parameters that are in them."""
    runs = [run for home in optimizer._plan._homes for run in home.runs]
    return len(runs), sum(len(run.params) for run in runs)


def _rows(value: Any) -> Any:
    return local_of(value) if isinstance(value, UnevenDTensor) else value


def _differences(plain: Any, flat: Any) -> list[str]:
    """Where the state dict of one optimizer is not that of the other."""
    found = []
    if plain["param_groups"] != flat["param_groups"]:
        found.append("groups")
    if list(plain["state"]) != list(flat["state"]):
        return [*found, f"{list(plain['state'])} {list(flat['state'])}"]
    for key, state in plain["state"].items():
        other = flat["state"][key]
        if list(state) != list(other):
            found.append(f"{key}: {list(state)} {list(other)}")
            continue
        found += [f"{key}.{n}" for n, value in state.items() if not _is_equal(value, other[n])]
    return found


def _is_equal(mine: Any, other: Any) -> bool:
    if type(mine) is not type(other) or not isinstance(mine, torch.Tensor):
        return bool(mine == other)
    if mine.shape != other.shape or mine.dtype != other.dtype:
        return False
    if isinstance(mine, UnevenDTensor):
        if mine.row_shards != other.row_shards or mine.placements != other.placements:
            return False
        if local_of(mine).shape != local_of(other).shape:
            return False
    return _have_same_bits(mine, other)


def _have_same_bits(mine: Any, other: Any) -> bool:
    """Also where they are no numbers."""
    pair = [
        _rows(value).detach().contiguous().flatten().view(torch.uint8) for value in (mine, other)
    ]
    return torch.equal(*pair)


def _unequal(plain: tuple[Any, Any], flat: tuple[Any, Any]) -> list[str]:
    """Names of weights and state of a model and its optimizer that differ from those of others."""
    pairs = zip(plain[0].named_parameters(), flat[0].parameters(), strict=True)
    found = [name for (name, mine), other in pairs if not _have_same_bits(mine, other)]
    return found + _differences(plain[1].state_dict(), flat[1].state_dict())


def _made(
    kind: Any = optim.AdamW, *, is_flat: bool, width: int = ALIGNED, **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = wrap(Stack(2, width), **options)
    kind = flat_optimizer(kind) if is_flat else kind
    return model, kind(model.parameters(), lr=0.01, weight_decay=0.1)


def _both(
    kind: Any, build: Callable[[], nn.Module], how: dict[str, Any], **options: Any
) -> list[tuple[Any, Any]]:
    """The same model twice, with an optimizer as it is and with a flat one.

    Args:
        kind: Of the optimizer.
        build: Makes the model.
        how: Options of the optimizer.
        options: For `wrap`.
    """
    made = []
    for make in (kind, flat_optimizer(kind)):
        torch.manual_seed(0)
        model = wrap(build(), **options)
        made.append((model, make(model.parameters(), **how)))
    return made


def _train(model: Any, optimizer: Any, steps: range = range(2)) -> None:
    for step in steps:
        own_loss(model, step).backward()
        step_all(optimizer)


def _trained_pair(steps: int = 2, **options: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Model and optimizer, as they are and flat."""
    plain, flat = _made(is_flat=False, **options), _made(is_flat=True, **options)
    for model, optimizer in (plain, flat):
        _train(model, optimizer, range(steps))
    return plain, flat


# -- the same bits --------------------------------------------------------------------------------


@on_ranks(2, how=[{"foreach": False}, {"foreach": True}])
def test_no_bit_of_weights_or_state_depends_on_flat_tensors(how: dict[str, Any]) -> None:
    unequal = {}
    for cls in CLASSES:
        options = {"momentum": 0.9} if cls in (optim.SGD, optim.RMSprop) else {}
        made = _both(cls, lambda: Stack(2), {"lr": 0.01, **options, **how})
        for each in made:
            _train(*each)
        unequal[cls.__name__] = _unequal(*made)
    assert unequal == {cls.__name__: [] for cls in CLASSES}


class _Case:
    """A model, groups and a history, at random."""

    def __init__(self, seed: int, options: dict[str, Any]) -> None:
        self._seed, self._options = seed, options

    def run(self, *, is_flat: bool) -> tuple[Any, Any]:
        rng = random.Random(self._seed)
        torch.manual_seed(self._seed)
        is_tied = rng.random() < 0.3
        width = rng.choice([7, 16, ALIGNED])
        whole = TiedAcross() if is_tied else Stack(rng.randint(1, 3), width)
        params = list(whole.parameters())
        for param in rng.sample(params, rng.randint(0, len(params) // 3)):
            param.requires_grad_(False)
        if rng.random() < 0.5:
            whole.blocks[0].unused = nn.Parameter(torch.randn(4, 3))
        units = [whole.embedding, *whole.blocks, whole.head] if is_tied else None
        model = wrap(whole, units, **self._options)
        names = [name for name, _ in model.named_parameters()]
        optimizer = self._optimizer(rng, dict(model.named_parameters()), is_flat)
        kept: Any = None
        for step in range(6):
            own_loss(model, step).backward()
            self._disturb(rng, model, names, optimizer)
            optimizer.step()
            if rng.random() < 0.3:
                kept = optimizer.state_dict()
            elif rng.random() < 0.5:
                kept = None
            optimizer.zero_grad(set_to_none=rng.random() < 0.8)
            if rng.random() < 0.2:
                # What is trained from now on, or not any more.
                param = model.get_parameter(rng.choice(names))
                param.requires_grad_(not param.requires_grad)
        assert kept is None or kept["param_groups"]
        return model, optimizer

    @staticmethod
    def _optimizer(rng: random.Random, params: dict[str, Any], is_flat: bool) -> Any:
        kind, options = rng.choice(
            [
                (optim.AdamW, {}),
                (optim.AdamW, {"amsgrad": True, "foreach": True}),
                (optim.Adam, {"eps": 0.0, "maximize": True}),
                (optim.SGD, {"momentum": 0.9, "nesterov": True}),
                (optim.RMSprop, {"centered": True}),
                (optim.Adagrad, {"initial_accumulator_value": 0.1}),
            ]
        )
        decayed = [p for name, p in params.items() if "bias" not in name and "norm" not in name]
        others = [p for p in params.values() if not any(p is each for each in decayed)]
        groups: list[Any] = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
        if rng.random() < 0.5:
            groups = list(params.values())
        return (flat_optimizer(kind) if is_flat else kind)(groups, lr=0.01, **options)

    @staticmethod
    def _disturb(rng: random.Random, model: Any, names: list[str], optimizer: Any) -> None:
        name, what = rng.choice(names), rng.random()
        param = model.get_parameter(name)
        if what < 0.2:
            param.grad = None
        elif what < 0.4 and param.grad is not None:
            param.grad = param.grad.clone().mul_(0.5)
        elif what < 0.5:
            optimizer.param_groups[0]["lr"] *= 0.5
        elif what < 0.6 and optimizer.state.get(param):
            state = optimizer.state[param]
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()


@pytest.mark.parametrize(
    ("mesh", "strategy", "seeds"),
    [
        ("1", "optim_grads_params", 6),
        ("2", "no_shard", 6),
        ("3", "optim_grads_params", 6),
        ("HFSDP 2x2", "optim", 4),
        *(
            longer(mesh, strategy, 30)
            for mesh in ("2", "3", "4", "HSDP 2x2")
            for strategy in STRATEGIES
        ),
    ],
)
@on_ranks("mesh", timeout_s=180.0)
def test_any_model_and_history_leads_to_the_same_bits(mesh: str, strategy: str, seeds: int) -> None:
    options = {**on_mesh(mesh), "sharding_strategy": strategy}
    unequal = {}
    for seed in range(seeds):
        case = _Case(seed, options)
        unequal[seed] = _unequal(case.run(is_flat=False), case.run(is_flat=True))
    assert unequal == {seed: [] for seed in range(seeds)}


@on_ranks(2, grads=["fp32", "bf16"])
def test_weights_in_another_dtype_follow_main_weights_that_were_stepped_flat(grads: str) -> None:
    policy = BF16
    if grads == "bf16":
        policy = dataclasses.replace(BF16, main_grads_dtype=torch.bfloat16)
    # Torch's Adam takes no gradients of another dtype than the weights'.
    kind: Any = optim.AdamW if grads == "fp32" else optim.SGD
    sharding = {"mp_policy": policy, "sharding_strategy": "optim"}
    made = _both(kind, lambda: Stack(2, ALIGNED), {"lr": 0.01}, **sharding)
    for each in made:
        _train(*each)
    assert _num_flat(made[1][1])[0] == 3
    assert _unequal(*made) == []
    outputs = [model(batch(0).to(torch.float32)) for model, _ in made]
    assert torch.equal(*outputs)


# -- few tensors ----------------------------------------------------------------------------------


@on_ranks(2)
def test_a_group_of_aligned_parameters_is_one_tensor_and_takes_no_more_operations() -> None:
    plain, flat = _trained_pair()
    names = []
    for model, optimizer in (plain, flat):
        own_loss(model, 2).backward()
        with Operations() as seen:
            optimizer.step()
        names.append(seen.names)
    # Two blocks and the root; what has no rows here is left alone.
    num_runs, num_params = _num_flat(flat[1])
    assert num_runs == 3
    assert num_params == sum(local_of(p).numel() > 0 for p in flat[0].parameters())
    of_weights = [sum(name in ("sqrt", "addcdiv_") for name in found) for found in names]
    assert of_weights[1] == 2 * num_runs
    assert of_weights[0] > 2 * of_weights[1]


@on_ranks(2)
def test_memory_of_gradients_goes_with_zero_grad_as_ever() -> None:
    _, (model, optimizer) = _trained_pair()
    own_loss(model, 3).backward()
    groups = [group for module in (model, *model.blocks) for group in unit_of(module).groups]
    storages = [group.main_grad.tensor.untyped_storage() for group in groups]
    assert all(storage.nbytes() for storage in storages)
    del storages
    optimizer.step()
    optimizer.zero_grad()
    assert all(group.grads.main is None for group in groups)


# -- state ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_state_dicts_go_from_one_kind_to_the_other_and_back() -> None:
    plain, flat = _trained_pair()
    for source, target in ((plain, flat), (flat, plain)):
        file = io.BytesIO()
        torch.save(source[1].state_dict(), file)
        file.seek(0)
        other = _made(is_flat=target is flat)
        other[0].load_state_dict(source[0].state_dict())
        other[1].load_state_dict(torch.load(file, weights_only=False))
        _train(*other, range(2, 4))
        _train(*source, range(2, 4))
        assert _unequal(source, other) == []


@on_ranks(2)
def test_what_is_done_to_state_counts_in_the_next_step_also_by_who_kept_it() -> None:
    plain, flat = _trained_pair()
    kept = [optimizer.state[model.blocks[0].up.weight] for model, optimizer in (plain, flat)]
    for (model, optimizer), state in zip((plain, flat), kept, strict=True):
        _train(model, optimizer, range(2, 3))
        # Its count of steps is that of now.
        assert state["step"].item() == 3
        state["exp_avg"].zero_()
        state["step"].zero_()
        _train(model, optimizer, range(3, 5))
        optimizer.state[model.blocks[1].up.weight].clear()
        _train(model, optimizer, range(5, 6))
    assert _unequal(plain, flat) == []
    # And who lets go of it has one tensor for each group again but for what differs.
    del kept, state
    _train(*plain, range(6, 8))
    _train(*flat, range(6, 8))
    assert flat[1]._shown is None
    assert _unequal(plain, flat) == []


@on_ranks(1)
def test_who_looked_at_state_once_pays_for_it_once_also_of_what_is_stepped_as_it_is() -> None:
    layers = [nn.Linear(INPUT, ALIGNED), nn.Linear(ALIGNED, 1), nn.Linear(1, 1, bias=False)]
    model = wrap(nn.Sequential(*layers), layers)
    optimizer: Any = flat_optimizer(optim.AdamW)(model.parameters())
    _train(model, optimizer)
    # One element is stepped as it is.
    assert _num_flat(optimizer) == (2, 4)
    optimizer.state_dict()
    _train(model, optimizer)
    plan = optimizer._plan
    _train(model, optimizer)
    assert optimizer._shown is None
    assert optimizer._plan is plan


@on_ranks(2)
def test_torchs_calls_and_deep_copies_see_the_state_of_parameters() -> None:
    plain, flat = _trained_pair()
    dicts = [get_optimizer_state_dict(*made) for made in (plain, flat)]
    assert _differences(*dicts) == []
    fresh = [_made(is_flat=False), _made(is_flat=True)]
    # A fresh optimizer makes state by a step with gradients of zeros.
    assert _differences(*(get_optimizer_state_dict(*made) for made in fresh)) == []
    for made in fresh:
        made[0].load_state_dict(plain[0].state_dict())
        set_optimizer_state_dict(*made, copy.deepcopy(dicts[1]))
    for made in (plain, *fresh):
        _train(*made, range(2, 4))
    assert _unequal(plain, fresh[0]) == _unequal(plain, fresh[1]) == []
    twin, params = copy.deepcopy(flat[1]), flat[1].param_groups[0]["params"]
    assert isinstance(twin, FlatOptimizer)
    copied = twin.param_groups[0]["params"]
    assert all(
        _is_equal(value, twin.state[other][name])
        for param, other in zip(params, copied, strict=True)
        for name, value in flat[1].state.get(param, {}).items()
    )


@on_ranks(4)
def test_a_checkpoint_is_the_same_and_loads_into_the_other_kind_elsewhere(tmp_path: Path) -> None:
    two = on_mesh("HSDP 2x2")
    for source, target in ((False, True), (True, False)):
        folder = tmp_path / f"{source}"
        saved = _made(is_flat=source)
        _train(*saved)
        checkpoint.save(folder, *saved)
        loaded = _made(is_flat=target, sharding_strategy="optim", **two)
        _train(*loaded, range(5, 6))
        checkpoint.load(folder, *loaded)
        like = _made(is_flat=source, sharding_strategy="optim", **two)
        checkpoint.load(folder, *like)
        for made in (loaded, like):
            _train(*made, range(2, 4))
        unequal = _unequal(loaded, like)
        assert unequal == []


# -- what optimizers are used with ----------------------------------------------------------------


@on_ranks(2)
def test_schedulers_closures_hooks_clipping_and_new_groups_work_as_ever() -> None:
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

            def closure(
                model: Any = model, optimizer: Any = optimizer, step: int = step
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = own_loss(model, step)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                return loss

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
        # Widths of which no vector of a fused kernel is filled in part.
        model = nn.Sequential(nn.Linear(INPUT, 64), nn.Linear(64, 64))
        model[0].weight.requires_grad_(False)
        return model

    made = _both(optim.AdamW, build, {"lr": 0.01, "fused": how == "fused"})
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
def test_the_step_gathers_what_the_next_forward_begins_with_here_too() -> None:
    plain, flat = _trained_pair(enable_unshard_after_step=True)
    for model, _ in (plain, flat):
        gathered = [unit_of(module).is_unsharded for module in (model, *model.blocks)]
        assert gathered == [True, True, False]
    assert _unequal(plain, flat) == []


@on_ranks(2)
def test_state_on_the_host_and_what_a_tracker_counts_are_as_ever() -> None:
    plain, flat = _trained_pair(offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))
    assert _num_flat(flat[1])[0] == 3
    assert _unequal(plain, flat) == []
    found = []
    for model, optimizer in (_made(is_flat=False), _made(is_flat=True)):
        with memory_tracker(model, optimizer) as memory:
            _train(model, optimizer, range(3))
        found.append(memory.live[Role.OPTIMIZER])
        assert memory.peak.total <= memory.bound.total
    # Alignment leaves something between parameters.
    assert 0 < found[0] <= found[1] < 1.05 * found[0]


@on_ranks(2)
def test_an_optimizer_that_others_made_is_flat_from_then_on() -> None:
    plain, flat = _made(is_flat=False), _made(is_flat=False)
    _train(*plain, range(1))
    _train(*flat, range(1))
    assert step_flat(flat[1]) is flat[1]
    assert isinstance(flat[1], optim.AdamW)
    for model, optimizer in (plain, flat):
        _train(model, optimizer, range(1, 3))
    assert _num_flat(flat[1])[0] == 3
    assert _unequal(plain, flat) == []


@on_ranks(1)
def test_a_step_asks_nothing_of_models_that_it_does_not_step() -> None:
    (model, optimizer), (other, _) = _made(is_flat=True), _made(is_flat=True)
    asked = []
    for each in (model, other):
        members = unit_of(each).groups[0].members
        looks = members.check_no_late_gradient
        members.check_no_late_gradient = lambda looks=looks, each=each: (
            asked.append(each),
            looks(),
        )
        own_loss(each).backward()
    optimizer.step()
    assert [each is model for each in asked] == [True]
    versions = [unit_of(each).context.weight_version for each in (model, other)]
    optimizer.step()
    assert unit_of(model).context.weight_version == versions[0] + 1
    assert unit_of(other).context.weight_version == versions[1]


@on_ranks(2)
def test_a_frozen_parameter_of_integers_stays_as_it_is() -> None:
    def build() -> Any:
        model = Stack(2)
        model.blocks[0].table = nn.Parameter(torch.arange(30).view(10, 3), requires_grad=False)
        return model

    (plain, _), (flat, _) = made = _both(optim.AdamW, build, {"lr": 0.01})
    for each in made:
        _train(*each)
    assert _unequal(*made) == []
    others = optim.AdamW(plain.parameters()), step_flat(optim.AdamW(flat.parameters()))
    _train(plain, others[0])
    _train(flat, others[1])
    assert _unequal((plain, others[0]), (flat, others[1])) == []


# -- what is refused ------------------------------------------------------------------------------


class _Own(optim.SGD):
    """Elementwise, which only its author knows."""


class _Lamb(optim.SGD):
    pass


_Lamb.__name__ = "LAMB"


@on_ranks(2)
def test_what_is_not_elementwise_is_refused_by_name_and_the_unknown_has_to_be_asserted() -> None:
    for kind in (optim.LBFGS, optim.Adafactor, optim.SparseAdam, Muon, _Lamb):
        for elementwise in (False, True):
            text = said(
                ValueError,
                lambda kind=kind, known=elementwise: flat_optimizer(kind, elementwise=known),
            )
            assert f"{kind.__name__} cannot step flat tensors" in text
    assert "elementwise=True" in said(ValueError, lambda: flat_optimizer(_Own))
    kind = flat_optimizer(_Own, elementwise=True)
    assert flat_optimizer(kind) is kind
    model = wrap(Stack(2, ALIGNED))
    text = said(
        ValueError, lambda: flat_optimizer(optim.Adam)(model.parameters(), differentiable=True)
    )
    assert "leave differentiable=True out" in text
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    assert "before that" in said(RuntimeError, lambda: step_flat(optimizer))
    _train(model, kind(model.parameters(), lr=0.1))
