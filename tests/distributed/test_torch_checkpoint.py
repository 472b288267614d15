"""`torch.distributed.checkpoint`, its state-dict functions and `torch.save` of sharded models."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megatron_fsdp_v2 import checkpoint, fully_shard
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from tests.cases import longer
from tests.distributed.checkpoint_trainings import (
    WAYS,
    digests,
    muon,
    net,
    torch_load,
    torch_save,
    train,
)
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    MESHES,
    STRATEGIES,
    batch,
    error_message,
    fill,
    mesh_of,
    of_all_ranks,
    own_loss,
    pair,
    shards_of,
    step_all,
    weight_error,
    whole,
    wrap,
)
from tests.ranks import RankPools, free_port
from tests.reference.models import Formula, Stack, TiedInside
from tests.reference.wrapping_momentum import WrappingMomentum

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda model: optim.SGD(model.parameters(), lr=0.1),
    "SGD, momentum": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adam, amsgrad": lambda model: optim.Adam(model.parameters(), lr=0.1, amsgrad=True),
    "AdamW": lambda model: optim.AdamW(model.parameters(), lr=0.1),
    "AdamW, tensor": lambda model: optim.AdamW(model.parameters(), lr=torch.tensor(0.1)),
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
# Mesh and strategy.
SHARDINGS = [
    ("1", "no_shard"),
    ("2", "optim"),
    ("3", "optim_grads"),
    ("4", "optim_grads_params"),
    ("HSDP 2x2", "optim_grads_params"),
    ("HFSDP 2x2", "optim_grads_params"),
]
SAVED_BY = ("3", "optim_grads_params")
FULL = StateDictOptions(full_state_dict=True)

Digests = dict[str, dict[str, str]]


def _file_of(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def _saved(
    folder: str, way: str, names: list[str], mesh_name: str, strategy: str
) -> tuple[Digests, bool]:
    """Digests by optimizer, and whether a parameter has no rows on this rank."""
    found, is_empty = {}, False
    for name in names:
        model = net(mesh_name, sharding_strategy=strategy)
        optimizer = OPTIMIZERS[name](model)
        train(model, optimizer, 2)
        WAYS[way][0](f"{folder}/{name}", model, optimizer)
        found[name] = digests(model, optimizer)
        is_empty |= any(param.to_local().numel() == 0 for param in model.parameters())
    return found, is_empty


def _loaded(
    folder: str, way: str, names: list[str], mesh_name: str, strategy: str, steps: int = 0
) -> Digests:
    """Digests by optimizer after a load, before which the model is trained for some steps."""
    found = {}
    for name in names:
        model = net(mesh_name, sharding_strategy=strategy)
        fill(model, 0.5)
        optimizer = OPTIMIZERS[name](model)
        train(model, optimizer, steps, first=7)
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 70
        WAYS[way][1](f"{folder}/{name}", model, optimizer)
        assert all(group["lr"] == 0.1 for group in optimizer.param_groups)
        found[name] = digests(model, optimizer)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shardings", [SHARDINGS[1::4], longer(SHARDINGS)], ids=len)
def test_every_optimizer_loads_bit_equal_at_other_sizes_and_strategies(
    pools: RankPools, tmp_path: Path, shardings: list[tuple[str, str]]
) -> None:
    names, folder = list(OPTIMIZERS), str(tmp_path)
    results = pools(3).run(_saved, folder, "torch", names, *SAVED_BY)
    saved = results[0][0]
    for number, sharding in enumerate(shardings):
        ranks = pools(math.prod(MESHES[sharding[0]][0]))
        # Every second model is loaded during its training.
        for found in ranks.run(_loaded, folder, "torch", names, *sharding, steps=number % 2):
            assert found == saved, sharding
    assert any(is_empty for _, is_empty in results)


@pytest.mark.parametrize("rows", [4, 1], ids=["ranks hold other rows", "a rank holds no rows"])
@on_ranks(2)
def test_state_of_a_parameter_without_rows_is_saved_and_loaded(tmp_path: Path, rows: int) -> None:
    def made() -> tuple[Any, optim.Optimizer]:
        # Rows of 16 bytes, so that a rank can hold a single row.
        parts = {"none": torch.zeros(0, 4), "some": torch.ones(rows, 4)}
        params = {name: nn.Parameter(part) for name, part in parts.items()}
        model = fully_shard(Formula(lambda m: torch.cat([m.none, m.some]).square().sum(), **params))
        return model, optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = made()
    for _ in range(2):
        model().backward()
        step_all(optimizer)
    torch_save(str(tmp_path), model, optimizer)
    model, optimizer = made()
    torch_load(str(tmp_path), model, optimizer)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert [float(of_one["step"]) for of_one in state.values()] == [2.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "loads"), [("ours", "torch"), ("torch", "ours")])
def test_checkpoints_of_torch_and_this_package_are_interchangeable(
    pools: RankPools, tmp_path: Path, saves: str, loads: str
) -> None:
    names = ["AdamW", "AdamW, tensor", "SGD", "SGD, momentum", "Adagrad", "Muon"]
    saved = pools(3).run(_saved, str(tmp_path), saves, names, *SAVED_BY)[0][0]
    for found in pools(2).run(_loaded, str(tmp_path), loads, names, "2", "optim_grads"):
        assert found == saved


# -- names -----------------------------------------------------------------------------------------


def _with_block(wrapper: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def build(model: Any) -> Any:
        model.blocks[0] = wrapper(model.blocks[0])
        return model

    return build


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: model,
    "recomputed block": _with_block(checkpoint_wrapper),
    "compiled, recomputed block": _with_block(lambda b: torch.compile(checkpoint_wrapper(b))),
    "compiled": torch.compile,
    "compiled replica": lambda model: torch.compile(DistributedDataParallel(model)),
    "replica inside": _with_block(DistributedDataParallel),
}


@on_ranks(2)
def test_wrappers_of_torch_change_no_name_in_a_checkpoint(tmp_path: Path) -> None:
    def values_of(model: Any, optimizer: optim.Optimizer) -> list[torch.Tensor]:
        means = [whole(state["exp_avg"]) for state in optimizer.state.values()]
        return [whole(param).detach().clone() for param in model.parameters()] + means

    def made(wrapper: str, value: float) -> tuple[Any, optim.Optimizer, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = WRAPPERS[wrapper](Stack(1))
        if "replica" not in wrapper:
            model = wrap(model, [])
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, value + number)
        step_all(optimizer)
        return model, optimizer, values_of(model, optimizer)

    plain, optimizer, values = made("none", 1.0)
    checkpoint.save(tmp_path / "plain", plain, optimizer)
    names = set(get_optimizer_state_dict(plain, optimizer)["state"])
    for wrapper in WRAPPERS:
        model, optimizer, _ = made(wrapper, 7.0)
        checkpoint.save(tmp_path / wrapper, model, optimizer)
        keys = CheckpointFolder(tmp_path / wrapper).entries
        stepped = {key.removesuffix(".step") for key in keys if key.endswith(".step")}
        assert stepped == {f"optimizer.state.{name}" for name in names}, wrapper
        checkpoint.load(tmp_path / "plain", model, optimizer)
        assert all(map(torch.equal, values_of(model, optimizer), values)), wrapper


# -- every saver, stager and executor ------------------------------------------------------------

type Save = Callable[[Any, str, Any], Callable[[], object]]
"""Starts to save a state to a folder over a process group; returns what waits for the end."""


def _in_call(**options: Any) -> Save:
    def save(state: Any, folder: str, group: Any) -> Callable[[], object]:
        dcp.save(state, checkpoint_id=folder, process_group=group, **options)
        return lambda: None

    return save


def _async(stager: Callable[[], Any], executor: str = "THREAD") -> Save:
    def save(state: Any, folder: str, group: Any) -> Callable[[], object]:
        saving: Any = dcp.async_save(
            state,
            checkpoint_id=folder,
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType[executor],
            async_stager=stager(),
        )
        if isinstance(saving, AsyncSaveResponse):
            saving.staging_completion.result()
            saving = saving.upload_completion
        return saving.result

    return save


def _staging(*, shares: bool, in_thread: bool) -> Callable[[], DefaultStager]:
    # Pinned memory and copies beside the host's work need a GPU.
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=shares,
        use_async_staging=in_thread,
        use_non_blocking_copy=False,
    )
    return lambda: DefaultStager(options)


STAGERS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "in the call": _staging(shares=False, in_thread=False),
    "in a thread": _staging(shares=False, in_thread=True),
    "shared memory": _staging(shares=True, in_thread=False),
    "shared memory in a thread": _staging(shares=True, in_thread=True),
    "blocking": BlockingAsyncStager,
}
SAVES: dict[str, Save] = {
    "in the call": _in_call(),
    "cached plans": _in_call(planner=DefaultSavePlanner(enable_plan_caching=True)),
    **{f"staged, {name}": _async(stager) for name, stager in STAGERS.items()},
}


def _check_saves(saves: dict[str, Save], folder: str) -> None:
    group = dist.new_group()
    for name, save in saves.items():
        model = net()
        optimizer = OPTIMIZERS["AdamW"](model)
        train(model, optimizer, 2)
        saved = digests(model, optimizer)
        weights, state = get_state_dict(model, optimizer)
        finish = save({"model": weights, "optimizer": state}, f"{folder}/{name}", group)
        # The state of the call is saved, not that of later steps.
        train(model, optimizer, 1, first=7)
        finish()
        model = net()
        fill(model, 0.5)
        optimizer = OPTIMIZERS["AdamW"](model)
        torch_load(f"{folder}/{name}", model, optimizer)
        assert digests(model, optimizer) == saved, name
    empty = of_all_ranks(any(not param.to_local().numel() for param in model.parameters()))
    assert any(empty) or dist.get_world_size() < 3


@pytest.mark.slow
@on_ranks("size", size=[3, longer(2)])
def test_every_saver_and_stager_of_torch_saves_the_state_of_its_call(
    tmp_path: Path, size: int
) -> None:
    _check_saves(SAVES, str(tmp_path))


def _check_in_processes(rank: int, size: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    _check_saves({name: _async(each, "PROCESS") for name, each in STAGERS.items()}, folder)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [longer(2), longer(3)])
def test_every_stager_of_torch_saves_in_another_process(tmp_path: Path, size: int) -> None:
    # Ranks of a pool may not start processes.
    args = (size, free_port(), str(tmp_path))
    torch.multiprocessing.spawn(_check_in_processes, args, nprocs=size)


@on_ranks(3, name=["AdamW", "SGD, momentum", "Muon"])
def test_full_state_dicts_are_plain_and_load_at_another_strategy(name: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 3)
    weights = get_model_state_dict(model, options=FULL)
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    entries = torch.load(_file_of(state), weights_only=True)["state"].values()
    kinds = {type(value) for each in (weights, *entries) for value in each.values()}
    again = net(sharding_strategy="optim")
    other = OPTIMIZERS[name](again)
    set_model_state_dict(again, weights, options=FULL)
    set_optimizer_state_dict(again, other, state, options=FULL)
    assert kinds == {torch.Tensor}
    assert digests(again, other) == digests(model, optimizer)


# -- state of plain DTensors -----------------------------------------------------------------------


def losses_around_a_save(
    folder: str, way: str, strategy: str, kind: Any, *, saves: bool
) -> list[float]:
    """Losses of steps 3 to 5, after a save here or a load of a save by other ranks."""
    model = net(sharding_strategy=strategy if saves else "optim_grads_params")
    optimizer = kind(model.parameters(), lr=0.05)
    if saves:
        train(model, optimizer, 3)
    save, load = WAYS[way]
    (save if saves else load)(folder, model, optimizer)
    return train(model, optimizer, 3, first=3)


@pytest.mark.parametrize(
    ("strategy", "way", "kind"),
    [
        ("no_shard", "ours", WrappingMomentum),
        ("optim_grads_params", "torch", WrappingMomentum),
        ("optim_grads_params", "ours", optim.Adafactor),
    ],
)
def test_training_with_state_of_plain_dtensors_resumes_at_another_size(
    pools: RankPools, tmp_path: Path, way: str, strategy: str, kind: Any
) -> None:
    folder = str(tmp_path / "saved")
    expected = pools(2).run(losses_around_a_save, folder, way, strategy, kind, saves=True)
    found = pools(3).run(losses_around_a_save, folder, way, strategy, kind, saves=False)
    for losses in found:
        assert losses == pytest.approx(expected[0], rel=1e-6)


@on_ranks(2, optimizer=["SGD", "AdamW", "AdamW, fused"], strategy=STRATEGIES[-1:])
def test_rank_without_rows_initializes_state_without_collectives(
    optimizer: str, strategy: str
) -> None:
    """Torch initializes state by an optimizer step, which must not issue collectives."""
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


# -- full state dicts and files -------------------------------------------------------------------


def _two_rows() -> nn.Module:
    return nn.Linear(5, 2)


@on_ranks(2, timeout_s=15, build=[Stack, _two_rows])
def test_full_weights_are_gathered_and_broadcast_from_rank_0(build: Any) -> None:
    plain, model = pair(build)
    weights = get_model_state_dict(model, options=FULL)
    fresh = wrap(build())
    fill(fresh, 0.1)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    are_equal = all(torch.equal(weights[n], value) for n, value in plain.state_dict().items())
    given = {} if dist.get_rank() > 0 else weights
    set_model_state_dict(fresh, given, options=from_rank_0)
    assert are_equal
    assert weight_error(fresh, plain) == 0.0


@on_ranks("mesh", mesh=["2", "HSDP 2x2"])
def test_rank_0_loads_a_model_that_is_on_the_meta_device_elsewhere(mesh: str) -> None:
    found = []
    for shard in (their_fully_shard, fully_shard):
        torch.manual_seed(0)
        with nullcontext() if dist.get_rank() == 0 else torch.device("meta"):
            model: Any = nn.Sequential(Stack(2), nn.BatchNorm1d(3))
        given = model.state_dict() if dist.get_rank() == 0 else {}
        for unit in (*model[0].blocks, model):
            shard(unit, mesh=mesh_of(*MESHES[mesh][0]))
        model = model.to("cpu") if dist.get_rank() == 0 else model.to_empty(device="cpu")
        from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, given, options=from_rank_0)
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            model(batch(dist.get_rank(), step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([whole(tensor) for tensor in model.state_dict().values()])
    assert all(map(torch.equal, *found))


@on_ranks(3, timeout_s=20)
def test_next_forward_uses_weights_that_a_load_wrote_in_place(tmp_path: Path) -> None:
    """A rank without rows of the second layer refreshes its model weights with the others."""
    layers = [nn.Linear(1, 8), nn.Linear(8, 1)]
    model, found = wrap(nn.Sequential(*layers), layers, sharding_strategy="optim"), []
    for value in (1.0, 2.0):
        fill(model, value)
        dcp.save(model.state_dict(), checkpoint_id=str(tmp_path / str(value)))
    for value in (1.0, 2.0):
        dcp.load(model.state_dict(), checkpoint_id=str(tmp_path / str(value)))
        with torch.no_grad():
            found.append(float(model(torch.ones(1, 1))))
    assert found == [17.0, 66.0]


@on_ranks(2, strategy=["no_shard", "optim_grads_params"])
def test_training_resumes_from_one_file_per_rank(tmp_path: Path, strategy: str) -> None:
    path = tmp_path / f"{strategy}-{dist.get_rank()}.pt"
    model = net(sharding_strategy=strategy)
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer, 1)
    # Between a forward and its backward, the state dict contains sharded parameters too.
    loss = model(torch.ones(4, 5)).sum()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    loss.backward()
    train(model, optimizer, 1, first=2)
    for assign in (False, True):
        other = net(sharding_strategy=strategy)
        state = torch.load(path, weights_only=True)
        other.load_state_dict(state["model"], assign=assign)
        resumed = OPTIMIZERS["AdamW"](other)
        resumed.load_state_dict(state["optimizer"])
        train(other, resumed, 1, first=2)
        assert all(map(torch.equal, shards_of(other), shards_of(model)))


@on_ranks(2, strategy=["no_shard", "optim_grads_params"])
def test_state_dict_has_only_sharded_parameters_while_some_are_gathered(strategy: str) -> None:
    """Also under the second name of a parameter that a unit shares with its gathered root."""
    model = TiedInside().double()
    wrap(model, [model.embedding, *model.blocks], sharding_strategy=strategy)
    model.unshard()
    states = [model.state_dict()]
    model.reshard()
    # Between a forward and its backward.
    loss = own_loss(model)
    states.append(model.state_dict())
    found = {type(value).__name__ for state in states for value in state.values()}
    assert found == {"UnevenDTensor"}
    # The gathered parameters are installed again for the backward.
    assert not isinstance(model.head.weight, DTensor)
    loss.backward()
    assert model.head.weight.grad is not None


@on_ranks(2, strategy=["no_shard", "optim_grads_params"])
def test_torch_saves_and_loads_while_weights_are_kept_after_a_backward(strategy: str) -> None:
    models = [net(sharding_strategy=strategy) for _ in range(2)]
    optimizers = [OPTIMIZERS["AdamW"](model) for model in models]
    for number in range(2):
        models[number].set_reshard_after_backward(False)
        train(models[number], optimizers[number], number + 1)
    weights, state = get_state_dict(models[1], optimizers[1])
    set_model_state_dict(models[0], weights)
    set_optimizer_state_dict(models[0], optimizers[0], state)
    assert digests(models[0], optimizers[0]) == digests(models[1], optimizers[1])
    losses = [train(m, o, 1, first=2) for m, o in zip(models, optimizers, strict=True)]
    assert losses[0] == losses[1]


@on_ranks(2)
def test_unsupported_uses_of_one_ranks_file_raise() -> None:
    model = wrap(Stack())
    state = model.state_dict()
    loaded = torch.load(_file_of(state), weights_only=True)
    files = of_all_ranks(_file_of(state).getvalue())
    theirs = torch.load(io.BytesIO(files[1 - dist.get_rank()]), weights_only=True)
    weight = loaded["output.weight"]
    other = fully_shard(Stack(), mesh=mesh_of(2), sharding_strategy="optim")
    copied = copy.deepcopy(state)
    shallow = copy.copy(model.output.weight)
    parameter = pickle.loads(pickle.dumps(model.output.weight))
    with torch.no_grad():
        model.output.weight.zero_()
    rows = error_message(RuntimeError, lambda: other.load_state_dict(loaded))
    another_rank = error_message(RuntimeError, lambda: model.load_state_dict(theirs))
    assert "holds other rows than this rank has of the parameter" in rows
    assert "load the file of this rank" in another_rank
    assert "loaded from a file has one rank's rows" in error_message(
        RuntimeError, weight.full_tensor
    )
    flat = error_message(RuntimeError, lambda: safetensors.torch.save(state))
    assert "Write a gathered state dict" in flat
    assert torch.equal(weight.to_local(), copied["output.weight"].to_local())
    assert bool((copied["output.weight"].to_local() != 0).all())
    assert bool((shallow.to_local() == 0).all()) and isinstance(shallow, nn.Parameter)
    assert isinstance(parameter, nn.Parameter) and parameter.requires_grad
