"""`checkpoint.save` and `load`: any size to any size, and nothing half-written is ever loaded."""

from __future__ import annotations

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
from tests.distributed.checkpoint_trainings import Net, Sharding, digests, net, train
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, mesh_of, said
from tests.ranks import RankPools


def _over_all(strategy: str) -> Sharding:
    return Sharding((dist.get_world_size(),), strategy)


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks("world_size")
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


def _saves_hybrid(folder: str) -> dict[str, str]:
    model = net(Sharding((2, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, 2)
    checkpoint.save(folder, model, optimizer)
    return digests(model, optimizer)


def _loads_plain(folder: str) -> dict[str, str]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    checkpoint.load(folder, model, optimizer)
    return digests(model, optimizer)


def test_replicas_write_once_and_an_unsharded_model_loads_it(
    pools: RankPools, tmp_path: Path
) -> None:
    saved = pools(4).run(_saves_hybrid, str(tmp_path / "saved"))[0]
    assert pools(1).run(_loads_plain, str(tmp_path / "saved"))[0] == saved
    manifest = Manifest.read(tmp_path / "saved")
    assert manifest is not None
    assert manifest.world_size == 4
    assert "up.weight" in manifest.units


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_an_export_of_a_sharded_run_is_the_plain_models_state_dict(
    pools: RankPools, tmp_path: Path, suffix: str
) -> None:
    weights = pools(3).run(_saves_weights, str(tmp_path / "saved"))[0]
    (file,) = export(tmp_path / "saved", tmp_path / f"model{suffix}").files
    loaded = load_file(file) if suffix == ".safetensors" else torch.load(file, weights_only=True)
    plain = Net()
    plain.load_state_dict(loaded)
    assert {name: p.tolist() for name, p in plain.named_parameters()} == weights


def _saves_weights(folder: str) -> dict[str, Any]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, 2)
    checkpoint.save(folder, model, optimizer)
    return {name: param.full_tensor().tolist() for name, param in model.named_parameters()}


def _weights_are_active(folder: str, strategy: str) -> tuple[float, float]:
    model = net(_over_all(strategy))
    x = torch.ones(2, 5)
    with torch.no_grad():
        expected = model(x).sum().item()
    checkpoint.save(folder, model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
        model(x)
        checkpoint.load(folder, model)
        return expected, model(x).sum().item()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loaded_weights_are_used_by_the_next_forward(
    pools: RankPools, tmp_path: Path, strategy: str
) -> None:
    for expected, found in pools(2).run(_weights_are_active, str(tmp_path / "saved"), strategy):
        assert found == expected


# -- what does not fit ---------------------------------------------------------------------------


@on_ranks(2)
def test_another_model_is_rejected_with_names_and_shapes(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    checkpoint.save(folder, net(), extra=1)
    other = net(width=9)
    errors = [said(CheckpointError, lambda: checkpoint.load(folder, other))]
    smaller = fully_shard(Net().up, mesh=mesh_of(dist.get_world_size()))
    errors.append(said(CheckpointError, lambda: checkpoint.load(folder, smaller)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.load(folder, smaller, strict=False)
    errors.append(str(caught[-1].message))
    difference = checkpoint.compare(folder, smaller)
    errors.append(f"{len(difference.missing)} {len(difference.unexpected)}")
    shapes, names, warning, counts = errors
    assert "model.up.weight is (8, 5) there and (9, 5) here" in shapes
    assert "missing in the checkpoint: model.weight, model.bias" in names
    assert "strict=False loads what both have" in names
    assert "not in the model: model." in warning
    assert counts == "2 5"


@on_ranks(1)
def test_what_cannot_be_saved_or_found_is_said(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model = net()
    Path(folder, "mine").mkdir(exist_ok=True)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    folder = said(ValueError, lambda: checkpoint.save(f"{folder}/mine", model))
    extra = said(
        CheckpointError, lambda: checkpoint.save(f"{folder}/a", model, extra={"net": object()})
    )
    optimizer = said(ValueError, lambda: checkpoint.save(f"{folder}/b", model, stranger))
    nowhere = said(CheckpointError, lambda: checkpoint.load(f"{folder}/nowhere", model))
    assert "exists and is no checkpoint" in folder
    assert "extra['net'] is of the type object, which a checkpoint does not keep" in extra
    assert "is not one of the model" in optimizer
    assert "there is no checkpoint at" in nowhere


def _two_saves(folder: str) -> list[Any]:
    model = net()
    first = checkpoint.save(folder, model, extra=1, async_save=True)
    assert first is not None
    second = said(RuntimeError, lambda: checkpoint.save(folder, model, extra=2))
    first.result()
    checkpoint.save(folder, model, extra=3)
    return [second, checkpoint.load(folder, model)]


def test_two_saves_to_one_path_do_not_mix(pools: RankPools, tmp_path: Path) -> None:
    for rejected, extra in pools(2).run(_two_saves, str(tmp_path / "saved")):
        assert "is under way" in rejected
        assert extra == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


def _rejected_on_one_rank(folder: str) -> list[str]:
    """Errors where only the last rank cannot save, and what is there afterwards."""
    model, last = net(), dist.get_rank() == dist.get_world_size() - 1
    kind: Any = CheckpointError
    unkept = object() if last else 1
    errors = [said(kind, lambda: checkpoint.save(folder, model, extra=unkept))]
    busy = Path(folder)
    if last:
        saving._UNDER_WAY.add(busy)
    kind = RuntimeError if last else CheckpointError
    errors.append(said(kind, lambda: checkpoint.save(folder, model, async_save=True)))
    saving._UNDER_WAY.discard(busy)
    checkpoint.save(f"{folder}/../{busy.name}", model, extra=2)
    return [*errors, checkpoint.load(folder, model)]


def test_what_one_rank_cannot_save_is_an_error_on_all(pools: RankPools, tmp_path: Path) -> None:
    first, second, last = pools(3).run(_rejected_on_one_rank, str(tmp_path / "saved"))
    for unkept, busy, extra in (first, second):
        assert "rank 2 could not save to" in unkept and "does not keep" in unkept
        assert "rank 2 could not save to" in busy and "is under way" in busy
        assert extra == 2
    assert last[0].startswith("extra is of the type object")
    assert last[1].startswith("a save to")
    assert last[2] == 2


def _damaged(folder: str) -> list[str]:
    model = net()
    checkpoint.save(folder, model)
    dist.barrier()
    if dist.get_rank() == 0:
        file = Path(folder) / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        manifest = Manifest.read(Path(folder))
        assert manifest is not None
        item = manifest.files[file.name].items[0]
        content[item.offset + item.length // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()
    return [said(CheckpointError, lambda: checkpoint.load(folder, model))]


def test_a_flipped_byte_is_found_on_load_on_every_rank_and_by_verify(
    pools: RankPools, tmp_path: Path
) -> None:
    for (error,) in pools(2).run(_damaged, str(tmp_path / "saved")):
        assert "__1_0.distcp" in error
    (problem,) = verify(tmp_path / "saved").problems
    assert "__1_0.distcp" in problem
