"""`--inprocess-restart`: Megatron's loop goes on in the processes that are left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mcore import flags as f
from tests.processes import ROOT, ran
from tests.ranks import free_port
from tests.unit.commands import called

PROGRAM = [sys.executable, "-m", "megatron_fsdp_v2_mcore.pretrain_gpt", "--cpu-rehearsal"]
RESTARTS = (
    "--inprocess-restart --inprocess-active-world-size 2 --inprocess-granularity rank "
    "--inprocess-heartbeat-interval 2 --inprocess-heartbeat-timeout 30 "
    "--inprocess-monitor-process-interval 0.5 --inprocess-monitor-thread-interval 0.5"
)
SECONDS = 240


def _flags(folder: Path, strategy: str = f.ZERO3) -> list[str]:
    saving = [*f.saving(folder, 2), *f.loading(folder)]
    return [*f.MODEL_FLAGS, *f.fsdp(strategy, saving, "--train-iters 12 --swiglu")]


def _environment(port: int, rank: int, world_size: int) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    return os.environ | {
        **{"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "error"},
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)},
    }


def _losses(*logs: Path) -> dict[int, str]:
    """The loss of each iteration as it is printed; of repeated ones, the last."""
    text = "".join(log.read_text() for log in logs)
    return dict(
        (int(iteration), loss)
        for iteration, loss in re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", text)
    )


@contextlib.contextmanager
def _started(
    folder: Path, flags: list[str], world_size: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a program of several ranks without a launcher, which would end the other ranks."""
    folder.mkdir()
    port = free_port()
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(world_size):
            log = stack.enter_context((folder / f"{rank}.log").open("wb"))
            environment = _environment(port, rank, world_size)
            process = subprocess.Popen(
                [*PROGRAM, *flags], env=environment, cwd=folder, stdout=log, stderr=log
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield processes


def _wait_for(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        logs = "\n".join(log.read_text()[-3000:] for log in folder.glob("*.log"))
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)


@pytest.mark.functional
def test_a_spare_rank_takes_the_place_of_one_that_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The losses are those of a training that nobody disturbed."""
    logs, reports = tmp_path / "restarted", tmp_path / "reports"
    watches = ["--fsdp-hang-reports", str(reports)]
    with _started(logs, [*_flags(tmp_path / "kept"), *RESTARTS.split(), *watches], 3) as processes:
        _wait_for(lambda: 5 in _losses(logs / "1.log"), logs)
        os.kill(processes[1].pid, signal.SIGKILL)
        _wait_for(lambda: 12 in _losses(logs / "2.log"), logs)
        _wait_for(lambda: all(processes[rank].poll() == 0 for rank in (0, 2)), logs)
    # The rank that joined and the one that stayed have issued the same collectives.
    assert called(capsys, "hang", reports)[1].startswith("No rank differs")
    undisturbed = tmp_path / "undisturbed"
    with _started(undisturbed, _flags(tmp_path / "other"), 2) as processes:
        _wait_for(lambda: all(process.poll() == 0 for process in processes), undisturbed)
    expected = _losses(undisturbed / "1.log")
    assert list(expected) == list(range(1, 13))
    before, after = _losses(logs / "1.log"), _losses(logs / "2.log")
    assert {**before, **after}.keys() == expected.keys()
    assert all(loss == expected[iteration] for iteration, loss in before.items())
    # Megatron prints the mean of the first two iterations of a resumed run as the second one's.
    del after[min(after) + 1]
    assert all(loss == expected[iteration] for iteration, loss in after.items())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--inprocess-restart needs --save and --load of one folder"),
        (["--save", "new", "--load", "old"], "They are new and old"),
        (["--save", "one", "--load", "one", "--finetune"], "cannot be combined with --finetune"),
    ],
)
def test_a_restart_that_would_lose_progress_is_rejected(
    tmp_path: Path, more: list[str], message: str
) -> None:
    flags = [*f.MODEL_FLAGS, *f.fsdp(f.ZERO3, "--train-iters 2", RESTARTS), *more]
    done = ran(*PROGRAM, *flags, cwd=tmp_path, env=_environment(free_port(), 0, 1))
    assert done.returncode == 2
    assert message in done.stderr
