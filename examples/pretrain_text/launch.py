"""Running Megatron as a child process: its whole output to a file, its progress to the terminal."""

import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from examples.pretrain_text.progress import progress
from examples.pretrain_text.training_log import TrainingLog

_NUM_LINES_SHOWN = 40
# Where the launcher starts to report that a rank failed: forty lines of its own, none of which says
# why. What the ranks said stands above.
_LAUNCHER_REPORT = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py.* failed \(exit")
# The launcher kills ranks that ignore its signal after 30 seconds. It needs that time, because
# the ranks are in sessions of their own, which no signal from here reaches.
_STOP_SECONDS = 40.0


class RunFailedError(RuntimeError):
    """A child process failed.

    Attributes:
        log_file: Its whole output.
        last_lines: The end of what the ranks printed.
    """

    def __init__(self, title: str, status: int, log_file: Path, last_lines: Sequence[str]) -> None:
        """Says which run failed and where to read on.

        Args:
            title: Which run it was.
            status: Its exit status.
            log_file: Its whole output.
            last_lines: The end of what the ranks printed.
        """
        super().__init__(f"The {title} failed with status {status}; its whole log is {log_file}.")
        self.log_file = log_file
        self.last_lines = tuple(last_lines)


def training_command(ranks: int, flags: Sequence[str]) -> list[str]:
    """Spells the command that runs pretraining on this machine.

    Args:
        ranks: Number of ranks.
        flags: The flags for `pretrain_gpt`.

    Returns:
        The command, as `torchrun` would be typed.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    job = ["--nproc-per-node", str(ranks), "-m", "megatron_fsdp_v2_mcore.pretrain_gpt"]
    return [*torchrun, *job, *flags]


def run(
    console: Console,
    title: str,
    command: Sequence[str],
    log_file: Path,
    iterations: range,
    ranks: int = 1,
) -> TrainingLog:
    """Runs one training to its end and shows its progress.

    Args:
        console: Where progress is shown.
        title: What the run is called.
        command: The command to run.
        log_file: Gets the command and everything it prints.
        iterations: The iterations the run is going to do.
        ranks: Number of ranks, which share the machine's cores.

    Returns:
        What the run printed, read.

    Raises:
        RunFailedError: If the command fails.
    """
    log = TrainingLog()
    last_lines: deque[str] = deque(maxlen=_NUM_LINES_SHOWN)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with (
        log_file.open("w", encoding="utf-8") as file,
        _child(command, ranks) as child,
        progress(console, title, iterations) as show,
    ):
        file.write(" ".join(command) + "\n")
        assert child.stdout is not None
        is_launchers = False
        for line in child.stdout:
            file.write(line)
            is_launchers = is_launchers or bool(_LAUNCHER_REPORT.search(line))
            if not is_launchers:
                last_lines.append(line.rstrip("\n"))
            iteration = log.read(line)
            if iteration is not None:
                show(iteration)
        status = child.wait()
    if status != 0:
        raise RunFailedError(title, status, log_file, last_lines)
    return log


@contextmanager
def _child(command: Sequence[str], ranks: int) -> Iterator[subprocess.Popen[str]]:
    """Starts a child in a session of its own, and leaves nothing of it behind."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            # The launcher passes the signal on to its ranks and ends after them.
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
