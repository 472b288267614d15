"""`--async-save`: training continues during a save; the tracker names complete checkpoints only."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from megatron_fsdp_v2.checkpoint import CheckpointError, saving
from megatron_fsdp_v2.checkpoint.verifying import verify
from tests.cases import longer
from tests.mcore import flags as f
from tests.mcore.session import (
    enter_rehearsal,
    failed_saves_reported_to,
    merge_ranks,
    rank,
    train,
)
from tests.mcore.trained import on_megatron, run_of_ranks, trained
from tests.ranks import RankFailure, RankPool, RankPools

TRACKER = "latest_checkpointed_iteration.txt"


def _flags(folder: Path, iterations: int, *more: f.Flags) -> list[str]:
    saves = f.words(f.saving(folder, 2), f"--async-save --train-iters {iterations}")
    return f.words(f.MODEL_FLAGS, f.fsdp(f.ZERO3, saves, *more))


def _tracked(folder: Path) -> int | None:
    tracker = folder / TRACKER
    return int(tracker.read_text()) if tracker.exists() else None


def _trained(flags: list[str], folder: Path, held_until: int) -> tuple[Any, list[Any]]:
    """Train, and write no checkpoint before an iteration.

    Returns:
        The training, and the iteration that a restart would have loaded, before each iteration.
    """
    training, seen, may_write = enter_rehearsal()["training"], [], threading.Event()
    from megatron_fsdp_v2_mcore.checkpoint import async_saving

    finalize = training.maybe_finalize_async_save

    def finalize_and_note(blocking: bool = False, **kwargs: Any) -> None:
        if len(seen) == held_until:
            may_write.set()
            # The pending saves and the calls that wait for them complete before this call.
            for threads in (saving._BACKGROUND, async_saving._EXECUTOR):
                threads.submit(int).result()
        finalize(blocking, **kwargs)
        seen.append(_tracked(folder))

    saving._BACKGROUND.submit(may_write.wait)
    with mock.patch.object(training, "maybe_finalize_async_save", finalize_and_note):
        try:
            return train(flags), seen
        finally:
            may_write.set()


@pytest.mark.functional
def test_tracker_names_an_iteration_after_its_background_save_completes(
    megatron: RankPools, tmp_path: Path
) -> None:
    flags = _flags(tmp_path, 7, "--swiglu --bf16 --hidden-dropout 0.1")
    found = megatron(2).run(_trained, flags, tmp_path, 5)
    trainings = merge_ranks([training for training, *_ in found])
    assert len(trainings.losses) == 7
    for _, tracked in found:
        # Two saves are pending for five iterations; then both are complete. The run waits at its
        # end for the third save and for that of the last iteration.
        assert tracked[:5] == [None] * 5
        assert tracked[5] == 4
        assert tracked[-1] == 7
    for iteration in (2, 4, 6, 7):
        assert verify(tmp_path / f"iter_{iteration:07d}").is_good
    assert not list(tmp_path.glob("*.incomplete"))

    flags = [flag for flag in flags if flag != "--async-save"]
    resumed = run_of_ranks(megatron, 2, [*flags, *f.loading(tmp_path, 4)])
    assert resumed.losses == trainings.losses[4:]


@pytest.mark.slow
def test_an_iteration_that_is_saved_twice_is_complete(megatron: RankPools, tmp_path: Path) -> None:
    """At an interval, and since the batch size changes: two saves of one path, both pending."""
    flags = _flags(tmp_path, 4, ["--step-batch-size-schedule", "0:8 512:16"])
    del flags[(at := flags.index("--global-batch-size")) : at + 2]
    run = run_of_ranks(megatron, 2, flags)
    assert len(run.losses) == 4
    assert _tracked(tmp_path) == 4
    assert all(verify(tmp_path / f"iter_{n:07d}").is_good for n in (2, 4))


# A manifest, or Megatron's metadata.json, of the earlier checkpoint would describe the new files.
@pytest.mark.slow
@pytest.mark.parametrize("first", ["--async-save", "torch_dist"])
def test_a_blocking_save_replaces_a_checkpoint_of_another_kind(
    megatron: RankPools, tmp_path: Path, first: str
) -> None:
    saves = f.saving(tmp_path, 2)
    if first == "torch_dist":
        trained(megatron, 2, saves, "--train-iters 4 --ckpt-format torch_dist")
    else:
        trained(megatron, 2, f.fsdp(f.ZERO3, saves, f"--train-iters 4 {first}"))
    resumed = f.words(f.loading(tmp_path, 2), "--train-iters 4")
    whole = trained(megatron, 1, f.fsdp("optim", saves, resumed))
    last = f.words(f.loading(tmp_path, 4), "--train-iters 5 --override-opt_param-scheduler")
    assert len(whole.losses) == 2
    assert len(trained(megatron, 2, f.fsdp("optim_grads", last)).losses) == 1


def _train_with_failures(
    folder: Path, fails: Callable[[int], bool], is_async: bool, iterations: int, *more: str
) -> Any:
    """Train, where the last rank cannot write some of the checkpoints, counted from 1."""
    writer_class: Any = saving.Writer if is_async else FileSystemWriter
    write, saves = writer_class.write_data, []
    words = _flags(folder, iterations, *more)

    def write_or_fail(writer: Any, *args: Any) -> Any:
        saves.append(writer)
        if fails(len(saves)) and rank() == 1:
            raise OSError("no space left on device")
        return write(writer, *args)

    with mock.patch.object(writer_class, "write_data", write_or_fail):
        return train([word for word in words if is_async or word != "--async-save"])


MODES = pytest.mark.parametrize(
    "is_async", [pytest.param(True, id="async"), longer(False, id="blocking")]
)


@MODES
@on_megatron(2)
def test_a_failed_save_is_reported_on_all_ranks_and_training_goes_on(
    tmp_path: Path, is_async: bool
) -> None:
    said = io.StringIO()
    with failed_saves_reported_to(said):
        run = _train_with_failures(tmp_path, lambda number: number == 2, is_async, 8)
    assert len(run.losses) == 8
    assert f"rank {rank()}: saving to {tmp_path}/iter_0000004 failed" in said.getvalue()
    assert "on rank 1, OSError: no space left on device" in said.getvalue()
    assert "training continues without this checkpoint" in said.getvalue()
    assert _tracked(tmp_path) == 8
    for iteration in (2, 6, 8):
        assert verify(tmp_path / f"iter_000000{iteration}").is_good
    assert not (tmp_path / "iter_0000004" / ".metadata").exists()


@pytest.mark.parametrize("place", ["iter_0000004", TRACKER])
@on_megatron(2)
def test_a_folder_or_file_that_one_rank_cannot_make_fails_a_save_on_all(
    tmp_path: Path, place: str
) -> None:
    """The first rank finds a file in place of the folder, or a folder in place of the tracker."""
    said, path = io.StringIO(), tmp_path / place

    def put_in_the_way(number: int) -> bool:
        if rank() == 0 and place == TRACKER:
            if number == 2:
                path.unlink()
                path.mkdir()
            elif path.is_dir():
                path.rmdir()
        return False

    if rank() == 0 and place != TRACKER:
        path.write_text("in the way")
    with failed_saves_reported_to(said):
        run = _train_with_failures(tmp_path, put_in_the_way, False, 6)
    assert len(run.losses) == 6
    assert f"saving to {tmp_path}/iter_0000004 failed" in said.getvalue()
    assert "on rank 0, " in said.getvalue()
    assert _tracked(tmp_path) == 6


@MODES
@on_megatron(2)
def test_a_training_whose_last_save_fails_ends_with_its_error(
    tmp_path: Path, is_async: bool
) -> None:
    with pytest.raises(CheckpointError, match="iter_0000004 failed"):
        _train_with_failures(tmp_path, lambda number: number == 2, is_async, 4)
    # The training ends before its last iteration, so that no other save follows.
    with pytest.raises(CheckpointError, match="iter_0000003 failed"):
        _train_with_failures(
            tmp_path / "early", lambda number: number > 1, is_async, 8, "--exit-interval 3"
        )


@MODES
@on_megatron(2)
def test_failed_save_on_one_rank_raises_its_error_on_all_ranks(
    tmp_path: Path, is_async: bool
) -> None:
    """The last rank cannot write the second checkpoint, and a failed save ends the training."""
    with pytest.raises(CheckpointError) as raised:
        _train_with_failures(
            tmp_path, lambda number: number == 2, is_async, 9, "--fsdp-exit-on-failed-save"
        )
    message = str(raised.value)
    assert message.startswith(f"saving to {tmp_path}/iter_0000004 failed")
    assert message.endswith("on rank 1, OSError: no space left on device")
    # The first rank holds the lock, and releases it before its own error.
    assert rank() > 0 or not list(tmp_path.glob(".*.save-lock"))
    assert _tracked(tmp_path) == 2
    assert verify(tmp_path / "iter_0000002").is_good


@on_megatron(2)
def test_a_rank_that_ends_in_a_save_is_named_with_the_save(tmp_path: Path) -> None:
    """The other rank's collective fails; here both raise gloo's error instead of waiting for it."""
    closed = "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"
    flags = [flag for flag in _flags(tmp_path, 2) if flag != "--async-save"]
    with (
        mock.patch("torch.distributed.checkpoint.save", side_effect=RuntimeError(closed)),
        pytest.raises(CheckpointError) as raised,
    ):
        train(flags)
    message = str(raised.value)
    assert message.startswith(f"saving to {tmp_path}/iter_0000002 failed")
    assert f"rank {rank()} lost the connection to another rank" in message
    assert closed in message


def _train_and_die(folder: Path) -> None:
    """Rank 1 is killed in the second save, which is a blocking one."""
    write, saves = FileSystemWriter.write_data, []

    def write_or_die(writer: Any, *args: Any) -> Any:
        saves.append(writer)
        if len(saves) == 2 and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(writer, *args)

    with mock.patch.object(FileSystemWriter, "write_data", write_or_die):
        train([flag for flag in _flags(folder, 9) if flag != "--async-save"])


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_save_is_named(tmp_path: Path) -> None:
    pool = RankPool(2, ["tests.mcore.preloaded_local"])
    try:
        with pytest.raises(RankFailure) as raised:
            pool.run(_train_and_die, tmp_path)
    finally:
        pool.close()
    message = str(raised.value)
    assert f"CheckpointError: saving to {tmp_path}/iter_0000004 failed, and " in message
    assert ": rank 1 ended, or destroyed its process group, before the save was" in message
    assert _tracked(tmp_path) == 2


SIGNALED = "--exit-signal-handler"


@pytest.mark.parametrize(
    "words", [pytest.param("--exit-interval 3", id="interval"), longer(SIGNALED, id="signal")]
)
@on_megatron(2)
def test_exiting_run_waits_for_pending_saves(tmp_path: Path, words: str) -> None:
    training, calls = enter_rehearsal()["training"], []
    finalize, handler = training.maybe_finalize_async_save, signal.getsignal(signal.SIGTERM)

    def finalize_or_signal(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if words == SIGNALED and len(calls) == 3 and rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        finalize(*args, **kwargs)

    try:
        with (
            mock.patch.object(training, "maybe_finalize_async_save", finalize_or_signal),
            pytest.raises(SystemExit) as leaving,
        ):
            train(_flags(tmp_path, 9, words))
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert (leaving.value.code, _tracked(tmp_path)) == (0, 3)
    assert verify(tmp_path / "iter_0000003").is_good


@pytest.mark.functional
def test_checkpoints_between_retain_intervals_are_removed(
    megatron: RankPools, tmp_path: Path
) -> None:
    more = "--save-retain-interval 4 --dist-ckpt-workers 2 --use-persistent-ckpt-worker"
    run_of_ranks(megatron, 2, _flags(tmp_path, 9, more))
    kept = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert kept == ["iter_0000004", "iter_0000008", "iter_0000009"]


@on_megatron(2)
def test_queue_runs_other_requests_in_order_and_raises_their_errors() -> None:
    """Requests other than checkpoints; the last request fails."""
    enter_rehearsal()
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    from megatron_fsdp_v2_mcore.checkpoint.async_saving import SavesQueue

    done: list[Any] = []
    may_run = threading.Event()

    def write(*words: Any) -> None:
        may_run.wait()
        done.append(words)

    def fail() -> None:
        raise OSError("no space left on device")

    queue = SavesQueue()
    staged = AsyncRequest(write, ("a", "b", "c"), [lambda: done.append(1)], preload_fn=lambda: "B")
    queue.schedule_async_request(staged)
    queue.schedule_async_request(AsyncRequest(write, ("d",), [lambda: done.append(2)]))
    done.append(queue.maybe_finalize_async_calls())
    may_run.set()
    done.append(queue.maybe_finalize_async_calls(blocking=True))
    queue.schedule_async_request(AsyncRequest(fail, (), [lambda: done.append(3)]))
    with pytest.raises(OSError, match="no space left on device"):
        queue.close()
    assert done[0] == []
    assert done.index(("a", "B", "c")) < done.index(("d",)) < done.index([0, 1])
    assert done.index(1) < done.index(2)
    assert 3 not in done
