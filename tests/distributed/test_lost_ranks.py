"""A rank that is killed during a save is named by all others."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint import CheckpointError, saving
from tests.cases import longer
from tests.distributed.wrapping import error_message, wrap
from tests.ranks import RankFailure, RankPool


def _save_and_die(folder: Path, victim: int, moment: str, *, is_async: bool) -> None:
    """Kill a rank in a second save; write the errors of the other ranks to files."""
    model, rank = wrap(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))), dist.get_rank()
    checkpoint.save(folder / "saved", model)
    place: Any = saving.Writer if moment == "write_data" else saving
    original = getattr(place, moment)

    def die_or_go_on(*args: Any, **kwargs: Any) -> Any:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(place, moment, die_or_go_on)

    def save() -> None:
        future = checkpoint.save(folder / "saved", model, async_save=is_async)
        if future is not None:
            future.result()

    (folder / f"{rank}.txt").write_text(error_message(CheckpointError, save))
    if not is_async:
        # As a program whose save fails. Ranks that still wait for this one then get an error.
        os._exit(1)


def _errors_of_others(folder: Path, ranks: int, victim: int, *args: Any, **kwargs: Any) -> str:
    pool = RankPool(ranks)
    try:
        with pytest.raises(RankFailure):
            pool.run(_save_and_die, folder, victim, *args, **kwargs)
    finally:
        pool.close()
    others = [rank for rank in range(ranks) if rank != victim]
    return "\n".join((folder / f"{rank}.txt").read_text() for rank in others)


@pytest.mark.parametrize(
    ("moment", "is_async"),
    [("write_data", False), longer("write_data", True), longer("model_entries", False)],
    ids=["blocking", "async", "before writing"],
)
def test_all_other_ranks_name_the_rank_that_is_killed_in_a_save(
    tmp_path: Path, moment: str, is_async: bool
) -> None:
    """Four ranks: at least one of them does not communicate with the killed one."""
    errors = _errors_of_others(tmp_path, 4, 2, moment, is_async=is_async)
    start = f"saving to {tmp_path}/saved failed, and nothing there has changed: rank 2 ended, or d"
    assert errors.count(start) == 3


def test_ranks_lose_the_connection_to_a_killed_rank_that_has_the_store(tmp_path: Path) -> None:
    errors = _errors_of_others(tmp_path, 2, 0, "write_data", is_async=False)
    assert "nothing there has changed: lost the connection to rank 0: " in errors
