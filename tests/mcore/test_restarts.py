"""A job resumes: restarted by torchrun from its newest checkpoint, or started again manually."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_fsdp_v2_mcore.restarts import agree_on_prefix, store_of_this_start
from tests.cases import longer
from tests.mcore import flags as f
from tests.mcore.command_line import PRETRAIN, ROOT, environment_of, launcher, losses_in
from tests.mcore.flags import MODEL_FLAGS, ZERO3, fsdp, loading, saving, words
from tests.mcore.session import distance
from tests.mcore.trained import trained
from tests.ranks import RankPools

PATIENT = timedelta(seconds=20)


def _start(store: dist.Store, world_size: int, last: int | None = None) -> list[str]:
    """Return the prefix that each rank of one start, a thread, agrees on; `last` is delayed."""
    found = [""] * world_size

    def come(rank: int) -> None:
        if rank == last:
            time.sleep(0.3)
        found[rank] = agree_on_prefix(store, rank, world_size, PATIENT)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_start_agrees_on_a_unique_prefix() -> None:
    store = dist.HashStore()
    # A rank that arrives before rank 0 of its start finds the keys of the previous start.
    starts = [_start(store, 3, last) for last in (None, 0, 2, 0)]
    assert all(len(set(found)) == 1 and found[0] for found in starts)
    assert len({found[0] for found in starts}) == len(starts)


def test_incomplete_start_names_the_missing_ranks() -> None:
    store = dist.HashStore()
    _start(store, 3)
    with pytest.raises(
        RuntimeError, match=r"ranks 1, 2 did not answer at this start within 0\.2 s"
    ):
        agree_on_prefix(store, 0, 3, timedelta(seconds=0.2))
    with pytest.raises(
        RuntimeError, match=r"rank 3 did not reach the other ranks .* logs of rank 0"
    ):
        agree_on_prefix(dist.HashStore(), 3, 4, timedelta(seconds=0.2))


def test_there_is_no_separate_store_without_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert store_of_this_start(0, 2, PATIENT) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert store_of_this_start(0, 2, PATIENT) is None


def _worker(launcher: int, rank: int) -> int | None:
    """Return the process of a rank that torchrun started, if there is one."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "status").read_text()
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"PPid:\t{launcher}\n" in status and f"RANK={rank}".encode() in environment:
            return int(entry.name)
    return None


@pytest.mark.functional
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
def test_job_with_a_killed_rank_resumes_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """Rank 0 is killed, and rank 1 after the restart."""
    killed = [0, 1]
    log, folder = tmp_path / "log", str(tmp_path / "checkpoints")
    flags = words(MODEL_FLAGS, fsdp(), "--train-iters 60 --cpu-rehearsal")
    flags += [*saving(folder, 10), *loading(folder)]
    with log.open("w") as output:
        job = subprocess.Popen(
            [*launcher(2), "--max-restarts=2", "-m", PRETRAIN, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment_of(),
        )
    try:
        for count, rank in enumerate(killed):
            # Each rank is killed in another start, some iterations after a checkpoint.
            _wait_until(15 + 15 * count, count, log, job)
            worker = _worker(job.pid, rank)
            assert worker is not None
            os.kill(worker, signal.SIGKILL)
        assert job.wait(timeout=200) == 0, log.read_text()[-3000:]
    finally:
        job.kill()
    seen = losses_in(log.read_text())
    # Every iteration was trained.
    losses = dict(seen)
    assert list(losses) == sorted(losses) == list(range(1, 61))
    # Megatron prints a mean in the second line of every start.
    starts = _starts(seen)
    assert len(starts) == 1 + len(killed)
    means = {start + 1 for start in starts}
    for start in starts[1:]:
        iteration = seen[start][0]
        assert iteration > 1 and iteration % 10 == 1
        # Empty if the rank was killed before it trained past the checkpoint.
        earlier = dict(pair for line, pair in enumerate(seen[:start]) if line not in means)
        for line, (repeated, loss) in enumerate(seen[start:], start):
            if line not in means:
                assert loss == earlier.get(repeated, loss), repeated


def _starts(seen: list[tuple[int, float]]) -> list[int]:
    """Return the position of the first iteration of each start in a log."""
    numbers = [0, *(iteration for iteration, _ in seen)]
    return [i for i, (a, b) in enumerate(itertools.pairwise(numbers)) if b <= a or i == 0]


def _wait_until(iteration: int, restarts: int, log: Path, job: subprocess.Popen[bytes]) -> None:
    """Wait for an iteration of the start after this number of restarts."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        seen = losses_in(log.read_text())
        if len(_starts(seen)) == restarts + 1 and seen and seen[-1][0] >= iteration:
            return
        assert job.poll() is None, log.read_text()[-3000:]
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-3000:])


def _folder(path: Path) -> list[str]:
    return [*f.loading(path), *f.saving(path, 100)]


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        (ZERO3, ""),
        longer(ZERO3, f.MUON),
        longer(f.ZERO1, f.MUON),
        longer(ZERO3, f"{f.MUON} --muon-scalar-optimizer lion"),
        longer(f.NO_SHARD, "--optimizer lion"),
    ],
)
def test_one_command_starts_stops_and_resumes_like_an_uninterrupted_run(
    megatron: RankPools, tmp_path: Path, flags: str, strategy: str
) -> None:
    common = [fsdp(strategy), flags]
    uninterrupted = trained(megatron, 2, *common, "--train-iters 5", iterations=5)
    command = [*common, _folder(tmp_path), "--override-opt-param-scheduler"]
    first = trained(megatron, 2, *command, "--train-iters 3", iterations=3)
    rest = trained(megatron, 2, *command, "--train-iters 5", iterations=2)
    assert [*first.losses, *rest.losses] == uninterrupted.losses
    assert [*first.grad_norms, *rest.grad_norms] == uninterrupted.grad_norms


@pytest.mark.functional
@pytest.mark.parametrize("flag", ["--no-load-optim", "--finetune"])
def test_resume_without_optimizer_state_matches_megatrons_ddp(
    megatron: RankPools, tmp_path: Path, flag: str
) -> None:
    losses = []
    for name, flags in (("theirs", "--ckpt-format torch_dist"), ("ours", fsdp(f.ZERO1))):
        common = [flags, f.saving(tmp_path / name, 9)]
        trained(megatron, 2, *common, "--train-iters 2")
        go_on = [*common, "--train-iters 6", f.loading(tmp_path / name), flag]
        losses.append(trained(megatron, 2, *go_on).losses)
    assert len(losses[0]) == (6 if flag == "--finetune" else 4)
    assert distance(losses[1], losses[0]) < 1e-6
