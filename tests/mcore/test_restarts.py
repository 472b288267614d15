"""A job resumes: restarted by torchrun from its newest checkpoint, or started again manually."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_fsdp_v2.checkpoint.verifying import verify
from megatron_fsdp_v2_mcore.restarts import agree_on_prefix, store_of_this_start
from tests.mcore import flags as f
from tests.mcore.command_line import PRETRAIN, RUN, losses_in, torchrun
from tests.mcore.flags import MODEL_FLAGS, fsdp, loading, saving, words
from tests.mcore.session import distance
from tests.mcore.trained import trained
from tests.processes import ROOT
from tests.ranks import RankPools, free_port

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


# Checkpoints are written in the background; the tracker names the newest complete one.
KILLED = """
import os, pathlib, signal, sys, time
from megatron.training import training
from megatron_fsdp_v2.checkpoint import saving
from megatron_fsdp_v2_mcore.pretrain_gpt import gpt

rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
folder = pathlib.Path(sys.argv[sys.argv.index("--save") + 1])
tracker = folder / "latest_checkpointed_iteration.txt"
log, write, saves = training.training_log, saving.Writer.write_data, []

def log_or_die(losses, total, rate, iteration, *args, **kwargs):
    if (rank, start) == (0, 0) and iteration >= 15 and tracker.exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return log(losses, total, rate, iteration, *args, **kwargs)

def write_or_die(writer, *args):
    saves.append(writer)
    written = write(writer, *args)
    if (rank, start, len(saves)) == (1, 1, 2):
        while tracker.read_text().strip() != "20":
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return written

training.training_log, saving.Writer.write_data = log_or_die, write_or_die
gpt.train()
"""


@pytest.mark.functional
def test_job_with_a_killed_rank_resumes_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """Rank 0 is killed between two saves, and rank 1 of the restarted job during a save."""
    script, folder = tmp_path / "killed.py", tmp_path / "checkpoints"
    script.write_text(KILLED)
    flags = words(MODEL_FLAGS, fsdp(), "--train-iters 60 --cpu-rehearsal --async-save")
    flags += [*saving(folder, 10), *loading(folder)]
    run = torchrun(2, RUN, [str(script), *flags], max_restarts=2)
    assert run.code == 0, run.output[-3000:]
    assert all(verify(folder / f"iter_{iteration:07d}").is_good for iteration in range(10, 61, 10))
    assert not list(folder.glob("*.incomplete"))
    seen = losses_in(run.output)
    numbers = [iteration for iteration, _ in seen]
    pairs = enumerate(itertools.pairwise([0, *numbers]))
    starts = [line for line, (before, number) in pairs if number <= before or line == 0]
    assert [numbers[line] for line in starts] == [1, 11, 21]
    assert sorted(set(numbers)) == list(range(1, 61))
    # Repeated iterations have the same losses. Megatron does not reset its sums after the first
    # line of a start, so that the second line is the mean of both iterations.
    exact = {pair for line, pair in enumerate(seen) if line - 1 not in starts}
    losses = dict(exact)
    assert len(exact) == len(losses)
    seconds = [seen[line + 1] for line in starts if seen[line + 1][0] in losses]
    assert seconds
    for number, loss in seconds:
        assert distance([loss], [(losses[number - 1] + losses[number]) / 2]) < 1e-6


@pytest.mark.functional
def test_job_goes_on_at_another_world_size_without_a_lost_node(
    megatron: RankPools, tmp_path: Path
) -> None:
    """`--nnodes 1:2`: the agent and the rank of one node are killed."""
    undisturbed = trained(megatron, 2, fsdp(), "--train-iters 16").losses
    flags = words(MODEL_FLAGS, fsdp(), "--train-iters 16 --cpu-rehearsal")
    flags += [*saving(tmp_path / "checkpoints", 4), *loading(tmp_path / "checkpoints")]
    port = free_port()
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
    agent += ["--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    agent += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    logs = [tmp_path / f"node{node}.log" for node in range(2)]
    nodes: list[subprocess.Popen[bytes]] = []

    def printed() -> list[tuple[int, float]]:
        return [pair for log in logs for pair in losses_in(log.read_text())]

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < deadline, [log.read_text()[-3000:] for log in logs]
            time.sleep(0.2)

    def is_listening() -> bool:
        with contextlib.closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with contextlib.ExitStack() as stack:
        for log in logs:
            file = stack.enter_context(log.open("wb"))
            command = [*agent, "-m", PRETRAIN, *flags]
            node = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
            nodes.append(stack.enter_context(node))
            stack.callback(_kill_node, node)
            wait_for(is_listening)  # the first agent has the store that the second one joins
        wait_for(lambda: any(iteration == 6 for iteration, _ in printed()))
        _kill_node(nodes[1])
        before = dict(printed())
        num_printed = len(losses_in(logs[0].read_text()))
        wait_for(lambda: nodes[0].poll() is not None)
    assert nodes[0].returncode == 0, logs[0].read_text()[-3000:]
    (first, _), *_ = after = losses_in(logs[0].read_text())[num_printed:]
    assert [iteration for iteration, _ in after] == list(range(first, 17))
    assert first in (5, 9)
    for iteration, loss in (*before.items(), *after):
        # The second line of a start is the mean of both iterations.
        if iteration not in (2, first + 1):
            assert distance([loss], [undisturbed[iteration - 1]]) < 1e-6


def _kill_node(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent of torchrun and its workers, which have sessions of their own."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    with contextlib.suppress(FileNotFoundError):
        for pid in (*map(int, children.read_text().split()), agent.pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.functional
@pytest.mark.parametrize("flag", ["--no-load-optim", "--finetune"])
def test_resume_without_optimizer_state_matches_megatrons_ddp(
    megatron: RankPools, tmp_path: Path, flag: str
) -> None:
    """From a checkpoint of the same kind of run, and from one of Megatron's DDP."""
    kinds = {"theirs": "--ckpt-format torch_dist", "ours": " ".join(fsdp(f.ZERO1))}
    for name, kind in kinds.items():
        trained(megatron, 2, kind, f.saving(tmp_path / name, 9), "--train-iters 2")
    theirs, *ours = (
        trained(megatron, 2, kinds[kind], "--train-iters 6", f.loading(tmp_path / name), flag)
        for kind, name in (("theirs", "theirs"), ("ours", "ours"), ("ours", "theirs"))
    )
    assert len(theirs.losses) == (6 if flag == "--finetune" else 4)
    assert all(distance(run.losses, theirs.losses) < 1e-6 for run in ours)


@pytest.mark.functional
def test_pretrained_checkpoint_is_loaded_until_the_run_has_its_own_as_with_megatrons_ddp(
    megatron: RankPools, tmp_path: Path
) -> None:
    losses = []
    for name, kind in (("theirs", "--ckpt-format torch_dist"), ("ours", " ".join(fsdp(f.ZERO3)))):
        pretrained, own = tmp_path / f"{name}_pretrained", tmp_path / f"{name}_own"
        trained(megatron, 2, kind, f.saving(pretrained, 9), "--train-iters 2")
        flags = f"--override-opt_param-scheduler --pretrained-checkpoint {pretrained} --load {own}"
        losses += [
            trained(megatron, 2, kind, flags, f.saving(own, 2), f"--train-iters {num}").losses
            for num in (4, 6)
        ]
    started, resumed, our_start, our_resume = losses
    # The first start trains as many iterations as a new run; the second one continues it.
    assert len(started) == len(our_start) == 4
    assert len(resumed) == len(our_resume) == 2
    assert distance(our_start, started) < 1e-6
    assert distance(our_resume, resumed) < 1e-6
