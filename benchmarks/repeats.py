"""Repeats on all ranks of a process group, in turns, with what others did meanwhile."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.noise import Rounds, Sample, busy_seconds, cpus, foreign_share

__all__ = ["Patience", "Repeats", "Run"]

Run = Callable[[], float]
"""One step; returns seconds of the optimizer in it."""


@dataclass(frozen=True)
class Patience:
    """How long is measured.

    Attributes:
        rounds: Undisturbed repeats of each engine.
        most: Repeats with the disturbed ones.
        seconds: Least time of a repeat, which is as many steps as that takes.
        foreign: Part of the machine used by others from which a repeat counts as disturbed.
        minutes: Of a setting, after which disturbed repeats are not made again.
        steps: Of a repeat at most.
    """

    rounds: int = 5
    most: int = 10
    seconds: float = 0.2
    foreign: float = 0.08
    minutes: float = 1.0
    steps: int = 20


def _nothing(name: str, rounds: Rounds) -> None:
    del name, rounds


class Repeats:
    """Measures some things side by side. To be made and used on all ranks alike.

    Args:
        device: Type of the device.
        context_of: What to run one of them in, by name.
    """

    def __init__(
        self,
        device: str = "cpu",
        context_of: Callable[[str], contextlib.AbstractContextManager[Any]] = (
            lambda name: contextlib.nullcontext()
        ),
    ) -> None:
        self._device = device
        self._context_of = context_of
        self._start = time.perf_counter()
        # Since then, by the clock of rank 0, as of the last repeat.
        self._minutes = 0.0

    def measure(
        self,
        runs: Mapping[str, Run],
        patience: Patience,
        before: Callable[[str, Rounds], None] = _nothing,
    ) -> Rounds:
        """Measure everybody in turns.

        Args:
            runs: What they do, by name.
            patience: How long.
            before: Called before a repeat, with what was found so far.
        """
        num_steps = {name: self._steps_of(name, run, patience) for name, run in runs.items()}
        rounds = Rounds(runs, patience.rounds, patience.most, patience.foreign)
        for name in rounds:
            before(name, rounds)
            rounds.note(name, self.repeat(name, runs[name], num_steps[name]))
            if self._minutes > patience.minutes:
                rounds.most = rounds.wanted
        return rounds

    def _steps_of(self, name: str, run: Run, patience: Patience) -> int:
        """Steps of a repeat, found by trying one."""
        took = self.repeat(name, run, 1).seconds
        return max(1, min(patience.steps, math.ceil(patience.seconds / took)))

    def repeat(self, name: str, run: Run, num_steps: int) -> Sample:
        """Time some steps on all ranks together: of the slowest one, alike on all."""
        optimizer, allowed = 0.0, cpus()
        with self._context_of(name):
            dist.barrier()
            self._settle()
            busy, own, start = busy_seconds(allowed), time.process_time(), time.perf_counter()
            for _ in range(num_steps):
                optimizer += run()
            self._settle()
            took, own = time.perf_counter() - start, time.process_time() - own
            busy = None if busy is None else (busy_seconds(allowed) or 0.0) - busy
        every = torch.zeros(dist.get_world_size(), 5, dtype=torch.float64, device=self._device)
        minutes = (time.perf_counter() - self._start) / 60
        mine = [took, optimizer, own, own if busy is None else busy, minutes]
        every[dist.get_rank()] = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(every)
        seconds, optimizer_seconds = (every[:, column].max().item() for column in (0, 1))
        owned = every[:, 2].sum().item()
        used = owned if busy is None else every[0, 3].item()
        self._minutes = every[0, 4].item()
        foreign = foreign_share(used, owned, seconds, len(allowed))
        return Sample(seconds / num_steps, optimizer_seconds / num_steps, foreign)

    def _settle(self) -> None:
        """Wait for what is queued: a step on a GPU has returned long before it is done."""
        if self._device == "cuda":
            torch.cuda.synchronize()
