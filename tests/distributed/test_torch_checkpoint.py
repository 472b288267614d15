"""Torch's own `torch.distributed.checkpoint` and state-dict calls on sharded models."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from tests.cases import longer
from tests.distributed.checkpoint_trainings import (
    WAYS,
    Sharding,
    digests,
    muon,
    net,
    torch_loads,
    torch_saves,
    train,
)
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import step_all
from tests.ranks import RankPools
from tests.reference.models import Formula
from tests.reference.wrapping_adam import WrappingAdam

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda model: optim.SGD(model.parameters(), lr=0.1),
    "SGD, momentum": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adam, amsgrad": lambda model: optim.Adam(model.parameters(), lr=0.1, amsgrad=True),
    "AdamW": lambda model: optim.AdamW(model.parameters(), lr=0.1),
    "AdamW, fused": lambda model: optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "NAdam": lambda model: optim.NAdam(model.parameters(), lr=0.1),
    "RAdam": lambda model: optim.RAdam(model.parameters(), lr=0.1),
    "Adagrad": lambda model: optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.1),
    "RMSprop": lambda model: optim.RMSprop(model.parameters(), lr=0.1, momentum=0.9),
    "Adamax": lambda model: optim.Adamax(model.parameters(), lr=0.1),
    "Adadelta": lambda model: optim.Adadelta(model.parameters(), lr=0.1),
    "ASGD": lambda model: optim.ASGD(model.parameters(), lr=0.1),
    "Rprop": lambda model: optim.Rprop(model.parameters(), lr=0.1),
    "Muon": muon,
}
SHARDINGS = {
    "ZeRO-0, 1": Sharding((1,), "no_shard"),
    "ZeRO-1, 2": Sharding((2,), "optim"),
    "ZeRO-2, 3": Sharding((3,), "optim_grads"),
    "ZeRO-3, 4": Sharding((4,)),
    "HSDP, 2x2": Sharding((2, 2)),
    "HFSDP, 2x2": Sharding((2, 2), outer="optim"),
}
SAVED_BY = Sharding((3,))

Digests = dict[str, dict[str, str]]


def ranks(sharding: Sharding) -> int:
    return math.prod(sharding.mesh)


def _saved(folder: str, way: str, names: list[str], sharding: Sharding) -> tuple[Digests, bool]:
    """Digests by optimizer, and whether some parameter has no rows here."""
    found, is_empty = {}, False
    for name in names:
        model = net(sharding)
        optimizer = OPTIMIZERS[name](model)
        train(model, optimizer, 2)
        WAYS[way][0](f"{folder}/{name}", model, optimizer)
        found[name] = digests(model, optimizer)
        is_empty |= any(param.to_local().numel() == 0 for param in model.parameters())
    return found, is_empty


def _loaded(folder: str, way: str, names: list[str], sharding: Sharding) -> Digests:
    found = {}
    for name in names:
        model = net(sharding)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.5)
        optimizer = OPTIMIZERS[name](model)
        for group in optimizer.param_groups:
            group["lr"] = 7.0
        WAYS[way][1](f"{folder}/{name}", model, optimizer)
        assert all(group["lr"] == 0.1 for group in optimizer.param_groups)
        found[name] = digests(model, optimizer)
    return found


def _check_loads(
    pools: RankPools, folder: Path, saved: Digests, names: list[str], labels: list[str]
) -> None:
    for label in labels:
        sharding = SHARDINGS[label]
        for found in pools(ranks(sharding)).run(_loaded, str(folder), "torch", names, sharding):
            for name in names:
                assert found[name] == saved[name], (label, name)


QUICK = ["ZeRO-1, 2", "HFSDP, 2x2"]


@pytest.mark.parametrize("labels", [QUICK, longer(list(SHARDINGS))], ids=len)
def test_every_optimizer_loads_bit_equal_at_other_sizes_and_strategies(
    pools: RankPools, tmp_path: Path, labels: list[str]
) -> None:
    names = list(OPTIMIZERS)
    results = pools(3).run(_saved, str(tmp_path), "torch", names, SAVED_BY)
    assert any(is_empty for _, is_empty in results)
    _check_loads(pools, tmp_path, results[0][0], names, labels)


@pytest.mark.parametrize("rows", [4, 1], ids=["ranks hold others", "a rank holds nothing"])
@on_ranks(2)
def test_state_of_a_parameter_of_no_rows_is_saved_and_loaded(tmp_path: Path, rows: int) -> None:
    def made() -> tuple[Any, optim.Optimizer]:
        # Rows of 16 bytes, so that ranks can hold single ones.
        parts = {"none": torch.zeros(0, 4), "some": torch.ones(rows, 4)}
        params = {name: nn.Parameter(part) for name, part in parts.items()}
        model = fully_shard(Formula(lambda m: torch.cat([m.none, m.some]).square().sum(), **params))
        return model, optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = made()
    for _ in range(2):
        model().backward()
        step_all(optimizer)
    torch_saves(str(tmp_path), model, optimizer)
    model, optimizer = made()
    torch_loads(str(tmp_path), model, optimizer)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert [float(of_one["step"]) for of_one in state.values()] == [2.0, 2.0]


@pytest.mark.parametrize("saving", ["HSDP, 2x2", "HFSDP, 2x2", "ZeRO-0, 1"])
def test_what_any_strategy_saved_every_other_loads(
    pools: RankPools, tmp_path: Path, saving: str
) -> None:
    names, sharding = ["AdamW", "Muon"], SHARDINGS[saving]
    saved = pools(ranks(sharding)).run(_saved, str(tmp_path), "torch", names, sharding)[0][0]
    _check_loads(pools, tmp_path, saved, names, list(SHARDINGS))


@pytest.mark.parametrize(("saves", "loads"), [("ours", "torch"), ("torch", "ours")])
def test_folders_of_torch_and_of_this_package_are_the_same(
    pools: RankPools, tmp_path: Path, saves: str, loads: str
) -> None:
    names = ["AdamW", "SGD, momentum", "Adagrad", "Muon"]
    saved = pools(3).run(_saved, str(tmp_path), saves, names, SAVED_BY)[0][0]
    for found in pools(2).run(_loaded, str(tmp_path), loads, names, Sharding((2,), "optim_grads")):
        assert found == saved


# -- ranks without rows --------------------------------------------------------------------------


@on_ranks(3, name=["AdamW", "Adagrad", "NAdam", "Muon"], way=WAYS)
def test_a_run_that_went_on_saves_the_count_of_all_its_steps(
    tmp_path: Path, name: str, way: str
) -> None:
    save, load = WAYS[way]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    for loads, saves, steps in ((None, first, 2), (first, second, 3)):
        model = net()
        optimizer = OPTIMIZERS[name](model)
        if loads is not None:
            load(loads, model, optimizer)
        train(model, optimizer, steps)
        save(saves, model, optimizer)
    saved = CheckpointFolder(second)
    keys = [key for key, _ in saved.tensors() if key.endswith(".step")]
    assert {float(saved.read_tensor(key)) for key in keys} == {5.0}


@on_ranks(3, name=["SGD, momentum", "AdamW", "Adagrad", "ASGD", "Muon"])
def test_a_training_in_progress_goes_back_to_a_checkpoint(tmp_path: Path, name: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 2)
    torch_saves(str(tmp_path), model, optimizer)
    saved = digests(model, optimizer)
    train(model, optimizer, 2, first=2)
    moved = digests(model, optimizer)
    optimizer.zero_grad()
    torch_loads(str(tmp_path), model, optimizer)
    assert moved != saved
    assert digests(model, optimizer) == saved


def _full_state(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Whole tensors from `get_model_state_dict` and `get_optimizer_state_dict`."""
    model = net()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 3)
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    plain = torch.load(file, weights_only=True)["state"]
    assert all(type(v) is torch.Tensor for entry in plain.values() for v in entry.values())
    # Torch puts sharded tensors into what it is given to load.
    numbers = {key: value.tolist() for key, value in weights.items()}
    state_numbers = {
        param: {key: value.tolist() for key, value in entry.items()}
        for param, entry in state["state"].items()
    }
    again = net(Sharding((3,), "optim"))
    other = OPTIMIZERS[name](again)
    set_model_state_dict(again, weights, options=options)
    set_optimizer_state_dict(again, other, state, options=options)
    assert digests(again, other) == digests(model, optimizer)
    return numbers, state_numbers


@pytest.mark.parametrize("name", ["AdamW", "SGD, momentum", "Muon"])
def test_full_state_dicts_are_whole_and_alike_on_all_ranks_and_load(
    pools: RankPools, name: str
) -> None:
    first, *others = pools(3).run(_full_state, name)
    assert all(other == first for other in others)
    weights, state = first
    assert state.keys() == weights.keys() - {"scale"}
    for param, entry in state.items():
        assert entry
        for key, value in entry.items():
            assert value == 3.0 if key == "step" else _size(value) == _size(weights[param]), key


def _size(nested: Any) -> int:
    return sum(map(_size, nested)) if isinstance(nested, list) else 1


# -- state of plain DTensors -----------------------------------------------------------------------


def losses_around_a_save(folder: str, way: str, strategy: str, *, saves: bool) -> list[float]:
    """Losses of steps 3 to 5, with a save before them here, or on other ranks."""
    model = net(Sharding((2,), strategy) if saves else Sharding((3,)))
    optimizer = WrappingAdam(model.parameters(), lr=0.05)
    save, load = WAYS[way]
    if saves:
        train(model, optimizer, 3)
    (save if saves else load)(folder, model, optimizer)
    return train(model, optimizer, 3, first=3)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("way", ["ours", "torch"])
def test_training_with_state_of_plain_dtensors_goes_on_at_another_size(
    pools: RankPools, tmp_path: Path, way: str, strategy: str
) -> None:
    folder = str(tmp_path / "saved")
    expected = pools(2).run(losses_around_a_save, folder, way, strategy, saves=True)
    found = pools(3).run(losses_around_a_save, folder, way, strategy, saves=False)
    for losses in found:
        assert losses == pytest.approx(expected[0], rel=1e-6)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "AdamW, fused"])
@on_ranks(2)
def test_a_rank_without_rows_makes_state_by_itself_and_the_others_need_not_know(
    optimizer: str, strategy: str
) -> None:
    """Torch steps an optimizer to make state; what follows from other steps is collective."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 1, bias=False), sharding_strategy=strategy)
    made = OPTIMIZERS[optimizer](model)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        made.step()
        with torch.no_grad():
            model(torch.ones(1, 8))
        state = get_optimizer_state_dict(model, made)
        made.zero_grad()
        set_optimizer_state_dict(model, made, get_optimizer_state_dict(model, made))
    assert state["param_groups"]
    with torch.no_grad():
        found = model(torch.ones(1, 8))
    assert torch.allclose(found, model.weight.full_tensor().sum())
