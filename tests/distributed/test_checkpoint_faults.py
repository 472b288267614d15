"""A save that is cut short leaves the checkpoint before it, and says what it left."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint import CheckpointError
from tests.distributed.wrapping import mesh_of, said, wrap
from tests.ranks import RankFailure, RankPool, RankPools

POINTS = 10


def _model(value: float) -> Any:
    layers = [nn.Linear(256, 256, bias=False) for _ in range(4)]
    model = wrap(nn.Sequential(*layers), units=layers, mesh=mesh_of(dist.get_world_size()))
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


def _refused(folder: str) -> str:
    return said(CheckpointError, lambda: checkpoint.load(folder, _model(0.0)))


def test_a_rank_killed_anywhere_in_a_save_leaves_a_whole_checkpoint(
    pools: RankPools, tmp_path: Path
) -> None:
    points = random.Random(0)
    outcomes, num_refused = [], 0
    for number in range(POINTS):
        folder = tmp_path / str(number) / "saved"
        folder.parent.mkdir()
        pool = RankPool(2)
        with pytest.raises(RankFailure, match="the process died"):
            pool.run(_killed_in_a_save, str(folder), number % 2, points.uniform(0.0, 1.2))
        ((extra, values),) = pools(1).run(_reads, str(folder))
        assert values == [float(extra)], f"point {number}"
        outcomes.append(extra)
        incomplete = folder.with_name("saved.incomplete")
        if incomplete.exists():
            (error,) = pools(1).run(_refused, str(incomplete))
            assert "cut short" in error
            num_refused += 1
    # Some kills came while the new checkpoint was written.
    assert 1 in outcomes
    assert num_refused


def _limited(folder: str, is_async: bool) -> list[str]:
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
    extra = str(checkpoint.load(folder, model))
    save()
    return [error, extra, str(checkpoint.load(folder, model))]


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_a_full_disk_is_said_on_every_rank_and_changes_nothing(
    pools: RankPools, tmp_path: Path, is_async: bool
) -> None:
    for error, extra, later in pools(2).run(_limited, str(tmp_path / "saved"), is_async):
        assert "failed, and nothing there has changed" in error
        assert extra == "1"
        assert later == "2"


def _interrupted_while_renaming(folder: str) -> list[str]:
    checkpoint.save(folder, _model(1.0), extra=1)
    Path(folder).rename(f"{folder}.previous")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extra = checkpoint.load(folder, _model(0.0))
    checkpoint.save(folder, _model(2.0), extra=2)
    return [str(extra), str(caught[-1].message), str(checkpoint.load(folder, _model(0.0)))]


def test_a_checkpoint_that_was_being_replaced_is_found(pools: RankPools, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    (found,) = pools(1).run(_interrupted_while_renaming, folder)
    assert found[0] == "1"
    assert "was interrupted" in found[1]
    assert found[2] == "2"


def _loses_a_file(folder: str) -> str:
    checkpoint.save(folder, _model(1.0))
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "__1_0.distcp").unlink()
    dist.barrier()
    return said(CheckpointError, lambda: checkpoint.load(folder, _model(0.0)))


def test_a_missing_file_is_named(pools: RankPools, tmp_path: Path) -> None:
    for error in pools(2).run(_loses_a_file, str(tmp_path / "saved")):
        assert "__1_0.distcp" in error
