"""Runs Megatron as a child process, with its output in a file and its progress on the terminal."""

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
# Start of the launcher's report of a failed rank, which follows the output of the ranks: forty
# lines without the cause.
_LAUNCHER_REPORT = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py.* failed \(exit")
# The launcher kills ranks that ignore its signal after 30 seconds. This timeout must be longer,
# since signals of this process do not reach the ranks, which are in separate sessions.
_STOP_SECONDS = 40.0


class RunFailedError(RuntimeError):
    """A child process failed.

    Attributes:
        log_file: File with its full output.
        last_lines: Last lines printed by the ranks.
    """

    def __init__(self, title: str, status: int, log_file: Path, last_lines: Sequence[str]) -> None:
        """Creates the error message.

        Args:
            title: Name of the run.
            status: Its exit status.
            log_file: File with its full output.
            last_lines: Last lines printed by the ranks.
        """
        super().__init__(f"The {title} failed with status {status}; its whole log is {log_file}.")
        self.log_file = log_file
        self.last_lines = tuple(last_lines)


def training_command(ranks: int, flags: Sequence[str]) -> list[str]:
    """Builds the command that runs pretraining on this machine.

    Args:
        ranks: Number of ranks.
        flags: The flags for `pretrain_gpt`.

    Returns:
        The command, equivalent to `torchrun`.
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
        console: Output for progress.
        title: Name of the run.
        command: The command to run.
        log_file: Receives the command and its output.
        iterations: The iterations of the run.
        ranks: Number of ranks, which share the machine's cores.

    Returns:
        The parsed output of the run.

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
    """Starts a child in a separate session and terminates all of its processes at the end."""
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
