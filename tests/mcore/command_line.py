"""Runs the adapter's commands, with torchrun in a subprocess, and parses their output."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.processes import ROOT
from tests.ranks import forked_from

PRETRAIN = "megatron_fsdp_v2_mcore.pretrain_gpt"
RUN = "megatron_fsdp_v2_mcore.run"
# Losses are printed with seven digits.
PRINTED = 5e-7
_LOSS = re.compile(r"iteration\s+(\d+)/.*?lm loss: ([0-9.E+-]+)")


@dataclass(frozen=True)
class Run:
    """A finished command.

    Attributes:
        code: Exit code.
        output: Standard output and error together.
    """

    code: int
    output: str

    @property
    def losses(self) -> dict[int, float]:
        """Printed loss by iteration."""
        return dict(losses_in(self.output))

    @property
    def lines_before_training(self) -> list[str]:
        """Lines before the first iteration line, without those of torchrun."""
        lines = []
        for line in self.output.splitlines():
            if _LOSS.search(line):
                break
            if line.strip() and "OMP_NUM_THREADS" not in line and set(line) != {"*"}:
                lines.append(line)
        return lines


def losses_in(text: str) -> list[tuple[int, float]]:
    """Return iterations and their printed losses, in the order of a log."""
    return [(int(number), float(loss)) for number, loss in _LOSS.findall(text)]


def printed_losses(losses: Sequence[float]) -> dict[int, float]:
    """Return the losses that Megatron prints for a run, by iteration, with `--log-interval 1`.

    Megatron does not reset its sums after the first line, so that the second one is a mean.
    """
    printed = dict(enumerate(losses, start=1))
    if len(losses) > 1:
        printed[2] = (losses[0] + losses[1]) / 2
    return printed


def run_module(module: str, arguments: Sequence[str], **environment: str) -> Run:
    """Run `python -m module` in one process, without torchrun."""
    return _run([sys.executable, "-m", module, *arguments], environment)


def run_code(code: str, *arguments: str) -> Run:
    """Run a short program in a new process, which has imported only torch."""
    return call_in_process(_run_code, code, arguments)


def _run_code(code: str, arguments: Sequence[str]) -> Run:
    return _run_to_exit(lambda: exec(code, {"__name__": "__main__"}), ["-c", *arguments])


def run_each(module: str, command_lines: Sequence[Sequence[str]]) -> list[Run]:
    """Run `python -m module` with several command lines in one process.

    Importing Megatron takes seconds. All command lines except the last must be rejected before a
    process group exists.
    """
    return call_in_process(_run_each, module, command_lines)


def _run_each(module: str, command_lines: Sequence[Sequence[str]]) -> list[Run]:
    def program() -> None:
        runpy.run_module(module, run_name="__main__")

    return [_run_to_exit(program, [module, *line]) for line in command_lines]


def _run_to_exit(program: Callable[[], object], argv: list[str]) -> Run:
    """Run a program in this process until it ends."""
    written, sys.argv = io.StringIO(), argv
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        try:
            program()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
            return Run(code, written.getvalue())
        except Exception:
            traceback.print_exc()
            return Run(1, written.getvalue())
    return Run(0, written.getvalue())


def torchrun(
    num_ranks: int, module: str, flags: Sequence[str], *, max_restarts: int = 0, **environment: str
) -> Run:
    """Run `torchrun -m module` on this machine."""
    restarts = f"--max-restarts={max_restarts}"
    return _run([*launcher(num_ranks), restarts, "-m", module, *flags], environment)


def launcher(num_ranks: int) -> list[str]:
    """Return the words that start a module on a number of ranks."""
    module = ["-m", "torch.distributed.run"]
    return [sys.executable, *module, "--standalone", f"--nproc-per-node={num_ranks}"]


def environment_of(**variables: str) -> dict[str, str]:
    """Return the environment of a command that imports the packages of this repository."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}


def _run(command: list[str], environment: dict[str, str]) -> Run:
    done = subprocess.run(
        command,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        cwd=ROOT,
        env=environment_of(**environment),
    )
    return Run(done.returncode, done.stdout)


def call_in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a module-level function in a new process."""
    context: Any = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(function, args, theirs))
    # The fork server of the rank pools has imported the modules that take seconds to import.
    with forked_from(()):
        process.start()
    assert mine.poll(240), "no answer in time"
    answer = mine.recv()
    process.join()
    return answer


def _answer(function: Callable[..., Any], args: Sequence[Any], answers: Connection) -> None:
    answers.send(function(*args))
