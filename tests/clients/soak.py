"""A long training of replica groups whose ranks are killed at random times.

python -m tests.clients.soak --steps 3000
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.replica_groups import (
    RANKS,
    Case,
    Group,
    Result,
    all_train,
    compare,
    errors_in,
    launched,
    lines_of,
)

CASE = Case(groups=3)
AT_MOST = 1e-12
"""Relative difference from the reference."""
KILL_EVERY_S = 60.0
PATIENCE_S = 180.0
"""Time without a new step after which the training hangs."""
LONG = 1000
"""Number of steps after which a process shows whether it grows."""
GROWTH = 3 * 2**20
"""Bytes by which the memory of such a process may grow: 6 KiB per step or less. The first transfer
of the state to a group that comes back takes 1.7 MiB, which stay allocated for the next one."""
MIB = 2**20


@dataclass(frozen=True)
class Survivor:
    """A process that lived through many steps after it lost a peer, which came back.

    Attributes:
        name: Its group, rank and start.
        num_steps: Number of these steps, aborted ones included.
        resident: Resident bytes, the smallest of the second and of the last quarter of its steps.
        files: Open file descriptors, likewise.
    """

    name: str
    num_steps: int
    resident: tuple[int, int]
    files: tuple[int, int]

    def check(self) -> None:
        """Check that neither has grown.

        Raises:
            AssertionError: One has.
        """
        assert self.resident[1] <= self.resident[0] + GROWTH, f"memory grows: {self}"
        # A transfer to or from a peer may be under way.
        assert self.files[1] <= self.files[0] + 4, f"open files grow: {self}"

    def __str__(self) -> str:
        first, last = (nbytes / MIB for nbytes in self.resident)
        return (
            f"{self.name}: {self.num_steps} steps, {first:.1f} to {last:.1f} MiB, "
            f"{self.files[0]} to {self.files[1]} open files"
        )


@dataclass(frozen=True)
class Soaked:
    """What happened.

    Attributes:
        lines: The lines of all logs.
        num_kills: Number of ranks that were killed.
        num_ended: Number of times that a group ended although none of its ranks was killed.
        seconds: Time until the last step.
    """

    lines: Sequence[Mapping[str, Any]]
    num_kills: int
    num_ended: int
    seconds: float

    def compared(self) -> Result:
        """Compare the steps with the reference, and groups with each other."""
        return compare(CASE, self.lines)

    def survivors(self) -> list[Survivor]:
        """Return the processes whose memory shows whether they grow."""
        logs: dict[str, list[Mapping[str, Any]]] = {}
        for line in self.lines:
            name = f"group {line['group']}, rank {line['rank']}, start {line['start']}"
            logs.setdefault(name, []).append(line)
        warm = ((name, _warm(log)) for name, log in logs.items())
        return [_survivor(name, log) for name, log in warm if len(log) >= LONG]


def _warm(log: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The steps after the number of groups has changed twice, for which torchft allocates 4 MiB."""
    changes = [n for n in range(1, len(log)) if log[n]["groups"] != log[n - 1]["groups"]]
    return log[changes[1] :] if len(changes) > 1 else []


def _survivor(name: str, log: Sequence[Mapping[str, Any]]) -> Survivor:
    quarter = len(log) // 4
    early, late = log[quarter : 2 * quarter], log[-quarter:]

    def smallest(what: str) -> tuple[int, int]:
        return min(line[what] for line in early), min(line[what] for line in late)

    return Survivor(name, len(log), smallest("resident"), smallest("files"))


def soak(
    folder: Path,
    *,
    steps: int,
    kills: int,
    kill_every_s: float = KILL_EVERY_S,
    seed: int = 0,
    say: Callable[[str], object] = lambda text: None,
) -> Soaked:
    """Train with replica groups, and kill a random rank at random times.

    Group 0 is the first victim. After a third of the steps its ranks are not killed again: they
    show whether memory grows.

    Args:
        folder: Folder of the logs.
        steps: Number of steps, at least.
        kills: Number of kills, at least.
        kill_every_s: Mean time between two kills; times are a Poisson process.
        seed: Seed of ranks and times.
        say: Is called with what happens.

    Raises:
        AssertionError: The training hangs.
    """
    draw, num_kills, num_ended = random.Random(seed), 0, 0
    began = progress_at = time.monotonic()
    kill_at, newest, killed = began + draw.expovariate(1 / kill_every_s), -1, set[int]()
    with launched(CASE, folder, lambda group: {}) as groups:
        while newest + 1 < steps or num_kills < kills or not all_train(groups):
            time.sleep(0.1)
            now = time.monotonic()
            reached = max(line["step"] for group in groups for line in _last(group))
            if reached > newest:
                newest, progress_at = reached, now
            assert now - progress_at < PATIENCE_S, f"hangs at {newest}\n{errors_in(folder)}"
            for group in groups:
                group.start_in_time()
                if group.has_died():
                    if group.number not in killed:
                        num_ended += 1
                        say(f"step {newest}: group {group.number} ended by itself")
                    killed.discard(group.number)
                    group.end(draw.choice([0.0, 2.0]))
            if now < kill_at or (newest + 1 >= steps and num_kills >= kills):
                continue
            first = 1 if 3 * newest >= steps else 0
            victim = draw.choice(groups[first:] if num_kills else groups[:1])
            others = (group for group in groups if group is not victim)
            # Nobody has the state if the last group is killed that is up to date.
            if victim.processes and any(_last(group)[0]["is_committed"] for group in others):
                rank = draw.randrange(RANKS)
                victim.processes[rank].kill()
                killed.add(victim.number)
                num_kills += 1
                kill_at = now + draw.expovariate(1 / kill_every_s)
                say(f"step {newest}: kill {num_kills}, rank {rank} of group {victim.number}")
        seconds = time.monotonic() - began
    return Soaked([*lines_of(folder)], num_kills, num_ended, seconds)


def _last(group: Group) -> list[dict[str, Any]]:
    """The last step of a group; before its first one, a line that says so."""
    return group.last_lines(1) or [{"step": -1, "is_committed": False}]


@contextlib.contextmanager
def _errors_to(path: Path) -> Iterator[None]:
    """Write what this process prints as errors, such as the lighthouse's log, to a file."""
    before = os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


def main() -> None:
    """Run it, print what was measured, and check it."""
    parser = argparse.ArgumentParser(prog="tests.clients.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    def say(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder, kills = Path(name), max(2, options.steps // 200)
        with _errors_to(folder / "lighthouse"):
            soaked = soak(folder, steps=options.steps, kills=kills, seed=options.seed, say=say)
    result, survivors = soaked.compared(), soaked.survivors()
    say(
        f"{result.num_steps} steps in {soaked.seconds / 60:.0f} minutes, {soaked.num_kills} kills, "
        f"{result.num_aborted} aborted steps; {result.num_compared} losses and norms, largest "
        f"difference {result.error:.0e}"
    )
    for survivor in survivors:
        say(str(survivor))
    assert survivors or options.steps < 3 * LONG, "no process lived long enough"
    assert result.error <= AT_MOST
    assert soaked.num_ended == 0
    for survivor in survivors:
        survivor.check()


if __name__ == "__main__":
    main()
