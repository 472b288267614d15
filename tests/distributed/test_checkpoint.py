"""`checkpoint.save` and `load`: any size to any size, and nothing half-written is ever loaded."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from megatron_fsdp_v2 import checkpoint, fully_shard
from megatron_fsdp_v2.checkpoint import CheckpointError, saving
from megatron_fsdp_v2.checkpoint.exporting import export
from megatron_fsdp_v2.checkpoint.manifest import Manifest
from megatron_fsdp_v2.checkpoint.verifying import verify
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from tests.distributed.checkpoint_trainings import Net, Sharding, digests, flip, net, train
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, said, wrap
from tests.ranks import RankPools


def _over_all(strategy: str) -> Sharding:
    return Sharding((dist.get_world_size(),), strategy)


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@on_ranks("world_size", world_size=[1, 3])
def test_training_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, world_size: int, is_async: bool
) -> None:
    folder = str(tmp_path / "saved")
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, 3)
    future = checkpoint.save(folder, model, optimizer, async_save=is_async)
    # Training changes what was copied, and must not change what is written.
    uninterrupted = train(model, optimizer, 3, first=3)
    if future is not None:
        future.result()
    again = net(_over_all("optim"))
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    other = torch.optim.AdamW(again.parameters(), lr=1.0)
    checkpoint.load(folder, again, other)
    assert train(again, other, 3, first=3) == uninterrupted


def _saves(folder: str, *mesh: int) -> tuple[dict[str, str], dict[str, Any]]:
    """Digests of all, and full weights."""
    model = net(Sharding(mesh))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, 2)
    checkpoint.save(folder, model, optimizer)
    weights = {name: param.full_tensor().tolist() for name, param in model.named_parameters()}
    return digests(model, optimizer), weights


def _loads_plain(folder: str) -> dict[str, str]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    checkpoint.load(folder, model, optimizer)
    return digests(model, optimizer)


def test_replicas_write_once_and_an_unsharded_model_loads_it(
    pools: RankPools, tmp_path: Path
) -> None:
    saved, _ = pools(4).run(_saves, str(tmp_path / "saved"), 2, 2)[0]
    assert pools(1).run(_loads_plain, str(tmp_path / "saved"))[0] == saved
    manifest = Manifest.read(tmp_path / "saved")
    assert manifest is not None
    assert manifest.world_size == 4
    assert "up.weight" in manifest.units


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_an_export_of_a_sharded_run_is_the_plain_models_state_dict(
    pools: RankPools, tmp_path: Path, suffix: str
) -> None:
    _, weights = pools(3).run(_saves, str(tmp_path / "saved"), 3)[0]
    (file,) = export(tmp_path / "saved", tmp_path / f"model{suffix}").files
    loaded = load_file(file) if suffix == ".safetensors" else torch.load(file, weights_only=True)
    plain = Net()
    plain.load_state_dict(loaded)
    assert {name: p.tolist() for name, p in plain.named_parameters()} == weights


@on_ranks(2, strategy=STRATEGIES)
def test_loaded_weights_are_used_by_the_next_forward(tmp_path: Path, strategy: str) -> None:
    folder, model = str(tmp_path / "saved"), net(_over_all(strategy))
    x = torch.ones(2, 5)
    with torch.no_grad():
        expected = model(x).sum().item()
    checkpoint.save(folder, model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
        model(x)
        checkpoint.load(folder, model)
        assert model(x).sum().item() == expected


# -- what does not fit ---------------------------------------------------------------------------


@on_ranks(2)
def test_another_model_is_rejected_with_names_and_shapes(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    checkpoint.save(folder, net(), extra=1)
    other = net(width=9)
    shapes = said(CheckpointError, lambda: checkpoint.load(folder, other))
    smaller = fully_shard(Net().up)
    names = said(CheckpointError, lambda: checkpoint.load(folder, smaller))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.load(folder, smaller, strict=False)
    difference = checkpoint.compare(folder, smaller)
    assert "model.up.weight is (8, 5) there and (9, 5) here" in shapes
    assert "missing in the checkpoint: model.weight, model.bias" in names
    assert "strict=False loads what both have" in names
    assert "not in the model: model." in str(caught[-1].message)
    assert (len(difference.missing), len(difference.unexpected)) == (2, 5)


@on_ranks(1)
def test_what_cannot_be_saved_or_found_is_said(tmp_path: Path) -> None:
    model, extra = net(), {"net": object()}
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    Path(tmp_path, "mine").mkdir()
    Path(tmp_path, "mine", "notes.txt").touch()
    taken = said(ValueError, lambda: checkpoint.save(f"{tmp_path}/mine", model))
    unkept = said(CheckpointError, lambda: checkpoint.save(f"{tmp_path}/a", model, extra=extra))
    strange = said(ValueError, lambda: checkpoint.save(f"{tmp_path}/b", model, stranger))
    nowhere = said(CheckpointError, lambda: checkpoint.load(f"{tmp_path}/nowhere", model))
    assert "exists and is not a checkpoint" in taken
    assert "extra['net'] is of the type object, which a checkpoint does not keep" in unkept
    assert "is not one of the model" in strange
    assert "there is no checkpoint at" in nowhere


@on_ranks(2)
def test_two_saves_to_one_path_do_not_mix(tmp_path: Path) -> None:
    folder, model = str(tmp_path / "saved"), net()
    first = checkpoint.save(folder, model, extra=1, async_save=True)
    assert first is not None
    kind: Any = CheckpointError if dist.get_rank() else RuntimeError
    second = said(kind, lambda: checkpoint.save(folder, model, extra=2))
    first.result()
    checkpoint.save(folder, model, extra=3)
    assert "is under way" in second
    assert checkpoint.load(folder, model) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


@on_ranks(3)
def test_what_one_rank_cannot_save_is_an_error_on_all(tmp_path: Path) -> None:
    """Only the last rank cannot save."""
    busy, model, last = tmp_path / "saved", net(), dist.get_rank() == 2
    extra = object() if last else 1
    unkept = said(CheckpointError, lambda: checkpoint.save(str(busy), model, extra=extra))
    checkpoint.save(f"{busy}/../{busy.name}", model, extra=2)
    assert checkpoint.load(str(busy), model) == 2
    if last:
        assert unkept.startswith("extra is of the type object")
    else:
        assert "rank 2 could not save to" in unkept and "does not keep" in unkept


@on_ranks(2)
def test_a_flipped_byte_is_found_on_load_on_every_rank_and_by_verify(tmp_path: Path) -> None:
    folder, model = tmp_path / "saved", net()
    checkpoint.save(str(folder), model)
    manifest = Manifest.read(folder)
    assert manifest is not None
    item = manifest.files["__1_0.distcp"].items[0]
    flip(folder / "__1_0.distcp", lambda _: item.offset + item.length // 2)
    error = said(CheckpointError, lambda: checkpoint.load(str(folder), model))
    (problem,) = verify(folder).problems
    assert "__1_0.distcp" in error
    assert "__1_0.distcp" in problem


# -- what a save costs ----------------------------------------------------------------------------

MOST_BYTES = 1.02
"""Bytes written over bytes of state."""


@on_ranks(2)
def test_little_more_is_written_than_there_is_state(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    layers = [nn.Linear(512, 512, bias=False) for _ in range(4)]
    model = wrap(nn.Sequential(*layers), units=layers)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    checkpoint.save(folder, model, optimizer)
    tensors: list[Any] = [*model.parameters()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, UnevenDTensor)]
    local = torch.tensor(sum(tensor.to_local().nbytes for tensor in tensors))
    dist.all_reduce(local)
    nbytes = int(local)
    written = sum(file.stat().st_size for file in Path(folder).iterdir())
    assert nbytes == 3 * 4 * 512 * 512 * 4
    assert nbytes < written <= MOST_BYTES * nbytes


@on_ranks(2)
def test_training_waits_for_a_copy_and_for_no_writing(tmp_path: Path) -> None:
    """A save whose writing may not begin before training has gone on."""
    folder = str(tmp_path / "saved")
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, 2)
    saved = digests(model, optimizer)
    may_write = threading.Event()
    saving._BACKGROUND.submit(may_write.wait)
    future = checkpoint.save(folder, model, optimizer, async_save=True)
    assert future is not None
    waits = not future.done() and not list(Path(folder).parent.rglob("*.distcp"))
    train(model, optimizer, 2, first=2)
    moved = digests(model, optimizer)
    dist.barrier()
    may_write.set()
    future.result()
    checkpoint.load(folder, model, optimizer)
    assert waits
    assert moved != saved == digests(model, optimizer)


@on_ranks(3)
def test_saves_that_run_at_once_do_not_meet(tmp_path: Path) -> None:
    model, futures = net(width=64), []
    for number in range(5):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(number)
        path = f"{tmp_path}/{number}"
        futures.append(checkpoint.save(path, model, extra=number, async_save=True))
    assert checkpoint.save(f"{tmp_path}/blocking", model, extra="blocking") is None
    for number, future in enumerate(futures):
        assert future is not None
        future.result()
        assert checkpoint.load(f"{tmp_path}/{number}", model) == number
        values = torch.cat([p.full_tensor().flatten() for p in model.parameters()]).unique()
        assert values.tolist() == [float(number)]
    assert all(verify(path).is_good for path in tmp_path.iterdir())
