"""A save that is cut short leaves the checkpoint before it, and says what it left."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint import CheckpointError, saving
from megatron_fsdp_v2.dtensor.uneven_dtensor import rows_of
from tests.distributed.checkpoint_trainings import flip
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import said, wrap
from tests.ranks import RankFailure, RankPool, RankPools

POINTS, MOST_POINTS = 6, 20


def _model(value: float) -> Any:
    layers = [nn.Linear(256, 256, bias=False) for _ in range(4)]
    model = wrap(nn.Sequential(*layers), units=layers)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def _killed_in_a_save(folder: str, victim: int, fraction: float) -> None:
    checkpoint.save(folder, _model(1.0), extra=1)
    start = time.perf_counter()
    checkpoint.save(folder, _model(1.0), extra=1)
    took = time.perf_counter() - start
    model = _model(2.0)
    dist.barrier()
    if dist.get_rank() == victim:
        kill = (os.getpid(), signal.SIGKILL)
        threading.Timer(took * fraction, os.kill, kill).start()
    checkpoint.save(folder, model, extra=2)
    if dist.get_rank() == victim:
        time.sleep(60.0)


def _reads(folder: str) -> tuple[int, list[float]]:
    model = _model(0.0)
    extra = checkpoint.load(folder, model)
    found = torch.cat([param.full_tensor().flatten() for param in model.parameters()])
    return extra, found.unique().tolist()


def _check_rejected(folder: str, text: str) -> None:
    assert text in said(CheckpointError, lambda: checkpoint.load(folder, _model(0.0)))


@pytest.mark.functional
def test_a_rank_killed_anywhere_in_a_save_leaves_a_whole_checkpoint(
    pools: RankPools, tmp_path: Path
) -> None:
    points = random.Random(0)
    outcomes, num_rejected = [], 0
    for number in range(MOST_POINTS):
        # On a busy machine a kill may come late again and again.
        if number >= POINTS and 1 in outcomes and num_rejected:
            break
        folder = tmp_path / str(number) / "saved"
        folder.parent.mkdir()
        pool = RankPool(2)
        with pytest.raises(RankFailure, match="the process died"):
            pool.run(_killed_in_a_save, str(folder), number % 2, points.uniform(0.0, 1.2))
        ((extra, values),) = pools(1).run(_reads, str(folder))
        assert values == [float(extra)], f"point {number}"
        outcomes.append(extra)
        left = {path.name for path in folder.parent.iterdir()}
        for incomplete in folder.parent.glob("saved.*.incomplete"):
            pools(1).run(_check_rejected, str(incomplete), "cut short")
            num_rejected += 1
        # The next job takes over the lock, and removes what is left.
        pools(1).run(_saves_often, str(folder), 3, 1)
        assert [path.name for path in folder.parent.iterdir()] == ["saved"], left
    # Some kills came while the new checkpoint was written.
    assert 1 in outcomes
    assert num_rejected


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@on_ranks(2)
def test_a_full_disk_is_said_on_every_rank_and_changes_nothing(
    tmp_path: Path, is_async: bool
) -> None:
    folder = str(tmp_path / "saved")

    def save() -> None:
        future = checkpoint.save(folder, _model(2.0), extra=2, async_save=is_async)
        if future is not None:
            future.result()

    model = _model(1.0)
    checkpoint.save(folder, model, extra=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        error = said(CheckpointError, save)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    first = checkpoint.load(folder, model)
    save()
    assert "failed, and nothing there has changed" in error
    assert "a file may not become that long" in error
    assert (first, checkpoint.load(folder, model)) == (1, 2)


@on_ranks(1)
def test_a_checkpoint_that_was_being_replaced_is_found(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    checkpoint.save(folder, _model(1.0), extra=1)
    Path(folder).rename(f"{folder}.{uuid.uuid4().hex}.previous")
    with pytest.warns(UserWarning, match="was interrupted"):
        assert checkpoint.load(folder, _model(0.0)) == 1
    checkpoint.save(folder, _model(2.0), extra=2)
    assert checkpoint.load(folder, _model(0.0)) == 2


def _destroys_its_group(folder: str, destroyers: list[int], moment: str) -> None:
    """End the process group of a save while it is written; see that it fails."""
    checkpoint.save(folder, _model(1.0), extra=1)
    model, is_destroyed = _model(2.0), threading.Event()
    place: Any = saving._Writer if moment == "write_data" else saving
    original = getattr(place, moment)

    def wait_and_go_on(*args: Any, **kwargs: Any) -> Any:
        assert is_destroyed.wait(20.0)
        return original(*args, **kwargs)

    setattr(place, moment, wait_and_go_on)
    future = checkpoint.save(folder, model, extra=2, async_save=True)
    assert future is not None
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
        ([0, 1], "write_data"),
        ([1], "write_data"),
        ([0], "write_data"),
        # Torch begins to save as a rank alone then, on both ranks.
        ([0, 1], "save_state_dict"),
    ],
    ids=["both", "second", "first", "both, before"],
)
def test_a_save_whose_process_group_ends_fails_says_so_and_leaves_what_was_there(
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
    """Saves that came to their end, and those that were rejected."""
    done, rejected = 0, 0
    for number in range(num_saves):
        value = first + 2 * number
        try:
            checkpoint.save(folder, _model(float(value)), extra=value)
            done += 1
        except (RuntimeError, CheckpointError) as error:
            assert "by another job is under way" in str(error), error
            rejected += 1
    return done, rejected


def test_two_jobs_that_save_to_one_path_and_one_that_reads_never_mix(
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
def test_damage_that_one_rank_reads_changes_nothing_on_any(tmp_path: Path, rank: int) -> None:
    folder, file = str(tmp_path / "saved"), tmp_path / "saved" / f"__{rank}_0.distcp"
    model = _model(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    checkpoint.save(folder, model, optimizer, extra=torch.get_rng_state())
    optimizer.step()

    def bits() -> list[torch.Tensor]:
        states = [state for held in optimizer.state.values() for state in held.values()]
        return [rows_of(tensor).clone() for tensor in [*model.parameters(), *states]]

    optimizer.param_groups[0]["lr"] = 0.7
    before = bits()
    flip(file, lambda length: length * 7 // 8)
    error = said(CheckpointError, lambda: checkpoint.load(folder, model, optimizer))
    assert file.name in error
    assert all(map(torch.equal, before, bits()))
    assert optimizer.param_groups[0]["lr"] == 0.7


@on_ranks(2)
def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    checkpoint.save(folder, _model(1.0))
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "__1_0.distcp").unlink()
    dist.barrier()
    _check_rejected(folder, "__1_0.distcp")
