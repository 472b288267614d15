"""What a check is, and running one after the other: none can stop the next, or go on for ever."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes import ROOT
from tests.ranks import RankPool

LIMIT_S = 900.0
"""For one command or one function on all ranks."""
PATIENCE_S = 40.0
"""The launcher ends ranks that ignore its signal after 30 seconds, and nobody else reaches them."""


class Status(enum.Enum):
    """What came of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NEEDS_GPU = "needs a GPU"
    NEEDS_RANKS = "needs more ranks"
    NEEDS_LAYERS = "needs Transformer Engine"
    NEEDS_TOOL = "needs a tool"


@dataclass(frozen=True)
class Request:
    """What the user asked for, as a check sees it.

    Attributes:
        device: `cuda` or `cpu`.
        ranks: The most ranks a check may use.
        folder: Where the check may write; its own.
        is_small: Whether it does as little as still shows that it runs.
        has_te: Whether Transformer Engine, or on a CPU its rehearsal, can be used.
    """

    device: str
    ranks: int
    folder: Path
    is_small: bool = False
    has_te: bool = True

    @property
    def on_cuda(self) -> bool:
        """Whether checks run on GPUs."""
        return self.device == "cuda"


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
        status: What came of it.
        text: Why, in a line or a traceback.
        numbers: What was measured, by name.
        pictures: Files it drew, in its folder.
    """

    status: Status
    text: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()

    @classmethod
    def of(cls, holds: bool, text: str, **numbers: Any) -> Outcome:
        """Passed or failed, by whether a claim holds."""
        return cls(Status.PASSED if holds else Status.FAILED, text, numbers)


@dataclass(frozen=True)
class Check:
    """One claim, and how to find out.

    Attributes:
        name: Unique.
        proves: The claim, in a sentence.
        run: Finds out. An exception is a failure.
        least_ranks: Ranks that it needs.
        only_cuda: Whether a CPU shows nothing of it. Then `run` is a rehearsal there: that it goes
            through is not reported as passed.
        is_rehearsed: Whether it runs at all on a CPU.
    """

    name: str
    proves: str
    run: Callable[[Request], Outcome]
    least_ranks: int = 1
    only_cuda: bool = False
    is_rehearsed: bool = True


@dataclass(frozen=True)
class Result:
    """A check, and what came of it.

    Attributes:
        check: The check.
        outcome: What it found.
        seconds: How long it took.
    """

    check: Check
    outcome: Outcome
    seconds: float


def run_checks(checks: Sequence[Check], request: Request) -> Iterator[Result]:
    """Run checks in order; whatever one of them does, the next one runs.

    Args:
        checks: The checks.
        request: What was asked for; every check gets a folder of its own below its folder.
    """
    for check in checks:
        folder = request.folder / folder_name(check.name)
        start = time.monotonic()
        outcome = _outcome(check, dataclasses.replace(request, folder=folder))
        yield Result(check, outcome, time.monotonic() - start)


def folder_name(check: str) -> str:
    """Name of the folder that a check may write to."""
    return "".join(letter if letter.isalnum() else "_" for letter in check)


def _outcome(check: Check, request: Request) -> Outcome:
    if request.ranks < check.least_ranks:
        return Outcome(Status.NEEDS_RANKS, f"{check.least_ranks} ranks, and there are fewer")
    is_rehearsal = check.only_cuda and not request.on_cuda
    if is_rehearsal and not check.is_rehearsed:
        return Outcome(Status.NEEDS_GPU, "not rehearsed on a CPU")
    request.folder.mkdir(parents=True, exist_ok=True)
    try:
        outcome = check.run(request)
    except Exception:
        return Outcome(Status.FAILED, traceback.format_exc())
    if is_rehearsal and outcome.status is Status.PASSED:
        text = f"rehearsed on a CPU: {outcome.text}"
        return dataclasses.replace(outcome, status=Status.NEEDS_GPU, text=text)
    return outcome


def on_ranks(
    request: Request,
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    limit_s: float = LIMIT_S,
    **kwargs: Any,
) -> list[Any]:
    """Call a module-level function on ranks of its own; return what each returned.

    Raises:
        RankFailure: One raised, died, or took longer than the limit; all of them are ended.
    """
    pool = RankPool(ranks, device=request.device)
    try:
        return pool.run(function, *args, timeout_s=limit_s, **kwargs)
    finally:
        pool.close()


class CommandFailure(RuntimeError):
    """A command ended with an error, or not in time."""


@dataclass(frozen=True)
class Done:
    """A command that ended.

    Attributes:
        code: Its exit code.
        output: Everything it printed.
    """

    code: int
    output: str

    def checked(self) -> Done:
        """The same, if it succeeded.

        Raises:
            CommandFailure: It did not.
        """
        if self.code != 0:
            raise CommandFailure(f"exit code {self.code}; its last lines:\n{self.output[-3000:]}")
        return self


def command(
    words: Sequence[str],
    log: Path,
    *,
    limit_s: float = LIMIT_S,
    environment: dict[str, str | None] | None = None,
) -> Done:
    """Run a command in a session of its own, with its output in a file.

    Args:
        words: The command.
        log: The file.
        limit_s: Seconds until it is ended.
        environment: Variables to set, or with None to take away.

    Raises:
        CommandFailure: It took longer than the limit.
    """
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    for name, value in (environment or {}).items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        file.write(" ".join(words) + "\n")
        file.flush()
        child = subprocess.Popen(
            words,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=variables,
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise CommandFailure(
                f"not done after {limit_s:g} s; its last lines:\n{_end(child, log)}"
            ) from None
        finally:
            _end(child, log)
    return Done(code, log.read_text(encoding="utf-8", errors="replace"))


def _end(child: subprocess.Popen[bytes], log: Path) -> str:
    """End a command and everything of its session; return the end of its output."""
    for kind, patience in ((signal.SIGTERM, PATIENCE_S), (signal.SIGKILL, 5.0)):
        if child.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
    return log.read_text(encoding="utf-8", errors="replace")[-3000:]


def python(*words: str) -> list[str]:
    """A command of this Python."""
    return [sys.executable, *words]
