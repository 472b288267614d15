"""`checkpoint.save` and `load` at any world size; an incomplete checkpoint is never loaded."""

from __future__ import annotations

import errno
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2 import checkpoint, fully_shard
from megatron_fsdp_v2.checkpoint import CheckpointError, saving
from megatron_fsdp_v2.checkpoint.entries import OPTIMIZER_GROUPS
from megatron_fsdp_v2.checkpoint.exporting import export
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.manifest import Manifest
from megatron_fsdp_v2.checkpoint.verifying import verify
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from tests.distributed.checkpoint_trainings import Net, digests, flip_bit, net, train
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import error_message, fill, mesh_of, wrap
from tests.ranks import RankPool, RankPools
from tests.unit.checkpoints import no_file_longer_than


def _saves(folder: str) -> dict[str, str]:
    """Train replicas and save; return digests."""
    model = net("HSDP 2x2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, 2)
    checkpoint.save(folder, model, optimizer)
    return digests(model, optimizer)


def _loads_plain(folder: str) -> dict[str, str]:
    """Load into an unsharded model; check that its weights are those of an export."""
    model, exported = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    checkpoint.load(folder, model, optimizer)
    (file,) = export(folder, f"{folder}.safetensors").files
    exported.load_state_dict(load_file(file))
    assert all(map(torch.equal, exported.state_dict().values(), model.state_dict().values()))
    return digests(model, optimizer)


@pytest.mark.slow
def test_replicas_write_once_and_an_unsharded_model_loads_the_checkpoint_and_its_export(
    pools: RankPools, tmp_path: Path
) -> None:
    saved = pools(4).run(_saves, str(tmp_path / "saved"))[0]
    assert pools(1).run(_loads_plain, str(tmp_path / "saved"))[0] == saved
    manifest = Manifest.read(tmp_path / "saved")
    assert manifest.world_size == 4
    # Replicas write no file.
    assert verify(tmp_path / "saved").notes == []


# -- mismatches ----------------------------------------------------------------------------------


@on_ranks(2)
def test_load_into_a_different_model_is_rejected_with_names_and_shapes(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    checkpoint.save(folder, net(), extra=1)
    other = net(width=9)
    shapes = error_message(CheckpointError, lambda: checkpoint.load(folder, other))
    smaller = fully_shard(Net().up)
    names = error_message(CheckpointError, lambda: checkpoint.load(folder, smaller))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.load(folder, smaller, strict=False)
    difference = checkpoint.compare(folder, smaller)
    assert "model.up.weight is (8, 5) there and (9, 5) here" in shapes
    assert "missing in the checkpoint: model.weight, model.bias" in names
    assert "strict=False loads what both have" in names
    assert "not in the model: model." in str(caught[-1].message)
    assert (len(difference.missing), len(difference.unexpected)) == (2, 5)


@on_ranks(2)
def test_compare_on_one_rank_between_forward_and_backward_changes_nothing(tmp_path: Path) -> None:
    """The backward would wait for this rank, if it had to gather weights again."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, 1)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    differences = []
    for _ in range(2):
        loss = model(torch.ones(4, 5)).square().mean()
        if dist.get_rank() == 1:
            gathered = [param for param in model.parameters() if type(param) is not UnevenDTensor]
            differences.append(str(checkpoint.compare(tmp_path / "saved", model, optimizer)))
            assert gathered
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 1:
            differences.append(str(checkpoint.compare(tmp_path / "saved", model, optimizer)))
    assert set(differences) <= {"everything fits"}


@on_ranks(1)
def test_an_optimizer_of_other_parameters_is_rejected(tmp_path: Path) -> None:
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    strange = error_message(ValueError, lambda: checkpoint.save(f"{tmp_path}/b", net(), stranger))
    assert "is not one of the model" in strange


@on_ranks(2)
def test_two_saves_to_one_path_do_not_mix(tmp_path: Path) -> None:
    folder, model, may_write = str(tmp_path / "saved"), net(), threading.Event()
    saving._BACKGROUND.submit(may_write.wait)
    first = checkpoint.save(folder, model, extra=1, async_save=True)
    kind: Any = CheckpointError if dist.get_rank() else RuntimeError
    second = error_message(kind, lambda: checkpoint.save(folder, model, extra=2))
    may_write.set()
    first.result()
    checkpoint.save(folder, model, extra=3)
    assert "is under way" in second
    assert checkpoint.load(folder, model) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


@on_ranks(3)
def test_save_error_of_one_rank_raises_on_all_ranks(tmp_path: Path) -> None:
    """Only the last rank cannot save."""
    busy, model, last = tmp_path / "saved", net(), dist.get_rank() == 2
    extra = object() if last else 1
    unkept = error_message(CheckpointError, lambda: checkpoint.save(str(busy), model, extra=extra))
    checkpoint.save(f"{busy}/../{busy.name}", model, extra=2)
    assert checkpoint.load(str(busy), model) == 2
    if last:
        assert unkept.startswith("extra is of the type object")
    else:
        assert "rank 2 could not save to" in unkept and "does not keep" in unkept


# -- models on parts of a job ----------------------------------------------------------------------


def _half() -> tuple[int, Any]:
    """Number of this rank's half of four ranks, and its mesh."""
    return dist.get_rank() // 2, mesh_of(2, 2)["inner"]


def _weights(model: Any) -> torch.Tensor:
    return torch.cat([param.full_tensor().flatten() for param in model.parameters()])


@on_ranks(4, is_async=[False, True])
def test_parts_of_a_job_save_and_load_their_models_at_the_same_time(
    tmp_path: Path, is_async: bool
) -> None:
    part, mesh = _half()
    folders = [f"{tmp_path}/{name}" for name in ("actor", "critic")]
    model = net(mesh=mesh)
    fill(model, part + 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    # The second save finds the process group of the first one.
    for _ in range(2):
        future = checkpoint.save(folders[part], model, optimizer, extra=part, async_save=is_async)
        if future is not None:
            future.result()
    before = _weights(model)
    uninterrupted = train(model, optimizer, 1, first=1)
    loaded = checkpoint.load(folders[part], model, optimizer)
    after, again = _weights(model), train(model, optimizer, 1, first=1)
    dist.barrier()
    on_all, found = net(), []
    for folder in folders:
        found.append((checkpoint.load(folder, on_all), _weights(on_all)))
    assert loaded == part
    assert torch.equal(before, after) and uninterrupted == again
    assert [extra for extra, _ in found] == [0, 1]
    assert torch.equal(found[part][1], before)
    assert verify(folders[part]).is_good and Manifest.read(Path(folders[part])).world_size == 2


@on_ranks(3)
def test_one_part_of_a_job_saves_and_loads_alone(tmp_path: Path) -> None:
    """A model on two ranks, and one on a single rank; the other part does nothing meanwhile."""
    folder, rank = str(tmp_path / "saved"), dist.get_rank()
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2])]
    found = []
    for part, mesh in enumerate(meshes):
        if part == rank // 2:
            model = net(mesh=mesh)
            fill(model, part + 1.0)
            checkpoint.save(f"{folder}.{part}", model, extra=part, async_save=True).result()
            checkpoint.save(f"{folder}.{part}", model, extra=part)
            fill(model, 0.0)
            found = [checkpoint.load(f"{folder}.{part}", model), *_weights(model).unique().tolist()]
        dist.barrier()
    assert found == [rank // 2, rank // 2 + 1.0]


@on_ranks(4)
def test_saves_that_would_overwrite_each_other_are_rejected_before_they_write(
    tmp_path: Path,
) -> None:
    (part, mesh), rank, pair = _half(), dist.get_rank(), 2 * (dist.get_rank() // 2)
    model, shared = net(mesh=mesh), f"{tmp_path}/shared"

    def save(path: str, **options: Any) -> str:
        return error_message(ValueError, lambda: checkpoint.save(path, model, **options))

    differ = save(f"{tmp_path}/{rank}"), save(f"{tmp_path}/{rank}", async_save=True)
    names = [path.name for path in tmp_path.iterdir()]
    dist.barrier()
    first = save(shared, extra=0) if part == 0 else "no error"
    dist.barrier()
    second = save(shared, extra=1) if part == 1 else "other ranks save"
    dist.barrier()
    smaller = save(shared, process_group=mesh_of(2, 2).get_group("outer"))
    extra = checkpoint.load(shared, model)
    assert names == []
    for text in differ:
        assert f"rank {pair} {tmp_path}/{pair}, rank {pair + 1} {tmp_path}/{pair + 1}" in text
    assert first == "no error" and "other ranks" in second and extra == 0
    assert "process_group has the ranks" in smaller


@on_ranks(4)
def test_process_group_saves_models_of_several_parts_in_one_checkpoint(tmp_path: Path) -> None:
    part, mesh = _half()
    stage = nn.Module()
    stage.add_module(f"stage{part}", wrap(nn.Linear(4, 4), mesh=mesh))
    fill(stage, part + 1.0)
    world: Any = dist.group.WORLD
    checkpoint.save(f"{tmp_path}/saved", stage, process_group=world)
    fill(stage, 0.0)
    with pytest.warns(UserWarning, match=f"not in the model: model.stage{1 - part}"):
        checkpoint.load(f"{tmp_path}/saved", stage, strict=False, process_group=world)
    alike = wrap(nn.Linear(4, 4), mesh=mesh)
    # Copies of a parameter on several stages may have one name.
    fill(alike, 1.0)
    checkpoint.save(f"{tmp_path}/copies", alike, process_group=world)
    fill(alike, part + 1.0)
    differ = error_message(
        ValueError, lambda: checkpoint.save(f"{tmp_path}/two", alike, process_group=world)
    )
    assert "ranks 0 and 2 have different parameters named weight" in differ
    assert not (tmp_path / "two").exists()
    assert _weights(stage).unique().tolist() == [part + 1.0]
    assert Manifest.read(tmp_path / "saved").world_size == 4


@on_ranks(4, rates=[(0.1, 0.1), (0.1, 0.2)])
def test_options_of_all_stages_are_saved(tmp_path: Path, rates: tuple[float, float]) -> None:
    """Stages have other parameters in their groups, and perhaps other options."""
    (part, mesh), world = _half(), dist.group.WORLD

    def made(rate: float) -> tuple[Any, Any]:
        stage = nn.Module()
        stage.add_module(f"stage{part}", wrap(nn.Linear(4, 4), mesh=mesh))
        weight, bias = stage.parameters()
        groups = [{"params": [weight]}, {"params": [bias], "weight_decay": 0.5}]
        return stage, torch.optim.AdamW(groups, lr=rate)

    stage, optimizer = made(rates[part])
    checkpoint.save(f"{tmp_path}/saved", stage, optimizer, process_group=world)
    saved = CheckpointFolder(tmp_path / "saved").object(OPTIMIZER_GROUPS)
    other, fresh = made(7.0)
    difference = checkpoint.compare(f"{tmp_path}/saved", other, fresh)
    with pytest.warns(UserWarning, match="fits in part: not in the model"):
        checkpoint.load(f"{tmp_path}/saved", other, fresh, strict=False, process_group=world)
    assert [(g["lr"], g["weight_decay"]) for g in fresh.param_groups] == [
        (rates[part], 0.01),
        (rates[part], 0.5),
    ]
    assert not difference.missing and not difference.regrouped
    # A model of all stages has one group where their options are equal.
    assert len(saved) == 2 * len({*rates})
    assert sorted(n for group in saved for n in group["params"]) == [
        f"stage{number}.{name}" for number in (0, 1) for name in ("bias", "weight")
    ]


@on_ranks(4)
def test_ranks_of_a_save_are_those_of_all_meshes_of_the_model(tmp_path: Path) -> None:
    whole, (part, inner), sizes = mesh_of(2, 2), _half(), {}
    meshes = {"whole": (whole, whole), "experts on a part": (inner, whole), "part": (inner, inner)}
    for name, (of_up, of_root) in meshes.items():
        torch.manual_seed(0)
        model = Net()
        fully_shard(model.up, mesh=of_up)
        if of_up is not of_root:
            # Other ranks have other experts.
            model.add_module(f"up{part}", model._modules.pop("up"))
        folder = tmp_path / (f"{name} {part}" if of_root is inner else name)
        checkpoint.save(folder, fully_shard(model, mesh=of_root))
        sizes[name] = Manifest.read(folder).world_size
    assert sizes == {"whole": 4, "experts on a part": 4, "part": 2}


# -- cost of a save, concurrent saves and failures ------------------------------------------------

MOST_BYTES = 1.02
"""Maximum ratio of written bytes to bytes of state."""


@on_ranks(2)
def test_save_writes_at_most_two_percent_more_than_the_state(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    model = _model(1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    checkpoint.save(folder, model, optimizer)
    # Weights and two moments of four layers in fp32.
    nbytes = 3 * 4 * 256 * 256 * 4
    written = sum(file.stat().st_size for file in Path(folder).iterdir())
    assert nbytes < written <= MOST_BYTES * nbytes


@on_ranks("world_size", world_size=[1, 3])
def test_async_save_blocks_training_only_for_the_copy_and_training_resumes(
    tmp_path: Path, world_size: int
) -> None:
    """The save cannot start to write before training has continued and changed the weights."""
    folder = str(tmp_path / "saved")
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, 3)
    may_write = threading.Event()
    saving._BACKGROUND.submit(may_write.wait)
    future = checkpoint.save(folder, model, optimizer, async_save=True)
    waits = not future.done() and not list(tmp_path.rglob("*.distcp"))
    uninterrupted = train(model, optimizer, 3, first=3)
    dist.barrier()
    may_write.set()
    future.result()
    again = net(sharding_strategy="optim")
    fill(again, 0.0)
    other = torch.optim.AdamW(again.parameters(), lr=1.0)
    checkpoint.load(folder, again, other)
    assert waits
    assert train(again, other, 3, first=3) == uninterrupted
    assert digests(again, other) == digests(model, optimizer)


@on_ranks(3)
def test_concurrent_saves_do_not_interfere(tmp_path: Path) -> None:
    model, futures = _model(0.0), []
    for number in range(5):
        fill(model, number)
        path = f"{tmp_path}/{number}"
        futures.append(checkpoint.save(path, model, extra=number, async_save=True))
    assert checkpoint.save(f"{tmp_path}/blocking", model, extra="blocking") is None
    for number, future in enumerate(futures):
        future.result()
        assert _reads(f"{tmp_path}/{number}") == (number, [float(number)])
    assert all(verify(path).is_good for path in tmp_path.iterdir())


def _model(value: float) -> Any:
    layers = [nn.Linear(256, 256, bias=False) for _ in range(4)]
    model = wrap(nn.Sequential(*layers), units=layers)
    fill(model, value)
    return model


def _reads(folder: str) -> tuple[int, list[float]]:
    model = _model(0.0)
    extra = checkpoint.load(folder, model)
    found = torch.cat([param.full_tensor().flatten() for param in model.parameters()])
    return extra, found.unique().tolist()


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@on_ranks(2)
def test_full_disk_raises_on_every_rank_and_keeps_the_checkpoint(
    tmp_path: Path, is_async: bool
) -> None:
    folder = str(tmp_path / "saved")

    def save() -> None:
        future = checkpoint.save(folder, _model(2.0), extra=2, async_save=is_async)
        if future is not None:
            future.result()

    model = _model(1.0)
    checkpoint.save(folder, model, extra=1)
    with no_file_longer_than(100_000):
        error = error_message(CheckpointError, save)
    first = checkpoint.load(folder, model)
    save()
    assert "failed, and nothing there has changed" in error
    assert "a file may not become that long" in error
    assert (first, checkpoint.load(folder, model)) == (1, 2)


@on_ranks(2)
def test_save_that_can_rename_nothing_back_says_where_the_checkpoint_is(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    checkpoint.save(folder, _model(1.0), extra=1)
    rename = Path.rename

    def fail(self: Path, target: Any) -> Any:
        if Path(target) == folder:
            raise OSError(errno.EIO, "the file system failed")
        return rename(self, target)

    Path.rename = fail  # type: ignore[method-assign]
    try:
        error = error_message(CheckpointError, lambda: checkpoint.save(folder, _model(2.0)))
    finally:
        Path.rename = rename  # type: ignore[method-assign]
    # On a shared folder, the other rank may be faster than the first one.
    dist.barrier()
    assert "nothing there has changed" not in error
    assert re.search(r"failed, and the previous checkpoint is now \S+\.previous, where a l", error)
    assert not folder.exists()
    with pytest.warns(UserWarning, match="loading the previous checkpoint"):
        assert checkpoint.load(folder, _model(0.0)) == 1


def _destroys_its_group(folder: str, destroyers: list[int], moment: str) -> None:
    """Destroy the process group of a save during the write; check that the save fails."""
    checkpoint.save(folder, _model(1.0), extra=1)
    model, is_destroyed = _model(2.0), threading.Event()
    place: Any = saving.Writer if moment == "write_data" else saving
    original = getattr(place, moment)

    def wait_and_go_on(*args: Any, **kwargs: Any) -> Any:
        assert is_destroyed.wait(20.0)
        return original(*args, **kwargs)

    setattr(place, moment, wait_and_go_on)
    future = checkpoint.save(folder, model, extra=2, async_save=True)
    if dist.get_rank() in destroyers:
        dist.destroy_process_group()
    is_destroyed.set()
    error = future.exception(timeout=20.0)
    assert type(error) is CheckpointError
    assert "failed, and nothing there has changed" in str(error)
    if not dist.is_initialized():
        assert "the process group was destroyed" in str(error)


@pytest.mark.parametrize(
    ("destroyers", "moment"),
    [
        ([1], "write_data"),
        # Torch then starts a single-process save on both ranks.
        ([0, 1], "save_state_dict"),
    ],
    ids=["second", "both, before"],
)
def test_save_without_its_process_group_fails_and_keeps_the_checkpoint(
    pools: RankPools, tmp_path: Path, destroyers: list[int], moment: str
) -> None:
    pool = RankPool(2)
    try:
        pool.run(_destroys_its_group, str(tmp_path / "saved"), destroyers, moment)
    finally:
        pool.close()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    ((extra, values),) = pools(1).run(_reads, str(tmp_path / "saved"))
    assert (extra, values) == (1, [1.0])


def _saves_often(folder: str, first: int, num_saves: int) -> tuple[int, int]:
    """Save repeatedly; return the numbers of completed and of rejected saves."""
    done, rejected = 0, 0
    for number in range(num_saves):
        value = first + 2 * number
        try:
            checkpoint.save(folder, _model(float(value)), extra=value)
            done += 1
        except (RuntimeError, CheckpointError) as error:
            # The error names the owner after the owner has written its name into the lock file.
            assert "is under way, by " in str(error), error
            rejected += 1
    return done, rejected


@pytest.mark.slow
def test_two_saving_jobs_and_a_reading_job_on_one_path_do_not_mix(
    pools: RankPools, tmp_path: Path
) -> None:
    folder, jobs = str(tmp_path / "saved"), (pools(2), pools(3))
    jobs[0].run(_saves_often, folder, 1, 1)
    with ThreadPoolExecutor(2) as threads:
        running = [
            threads.submit(job.run, _saves_often, folder, number, 15)
            for number, job in enumerate(jobs)
        ]
        num_reads = 0
        while not all(job.done() for job in running):
            ((extra, values),) = pools(1).run(_reads, folder)
            assert values == [float(extra)]
            num_reads += 1
    assert num_reads
    counts = [job.result() for job in running]
    for of_job in counts:
        assert len(set(of_job)) == 1
    assert all(done + rejected == 15 for ((done, rejected), *_) in counts)
    assert sum(done for ((done, _), *_) in counts) >= 2
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@on_ranks(2, rank=[0, 1])
def test_damage_read_by_one_rank_changes_nothing_on_all_ranks(tmp_path: Path, rank: int) -> None:
    folder, file = str(tmp_path / "saved"), tmp_path / "saved" / f"__{rank}_0.distcp"
    model = _model(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    checkpoint.save(folder, model, optimizer, extra=torch.get_rng_state())
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.7
    before = digests(model, optimizer)
    flip_bit(file, lambda length: length * 7 // 8)
    error = error_message(CheckpointError, lambda: checkpoint.load(folder, model, optimizer))
    assert file.name in error
    assert digests(model, optimizer) == before
    assert optimizer.param_groups[0]["lr"] == 0.7
