"""Runs repeats on all ranks of a process group in turns and records the load of other programs."""

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
"""A function that runs one step and returns the seconds of its optimizer."""


@dataclass(frozen=True)
class Patience:
    """Limits of a measurement.

    Attributes:
        rounds: Undisturbed repeats of each engine.
        most: Maximum repeats of each engine, disturbed repeats included.
        seconds: Minimum time of a repeat, which determines its number of steps.
        foreign: Fraction used by other programs above which a repeat counts as disturbed.
        minutes: Time per setting after which disturbed repeats are not run again.
        steps: Maximum steps of a repeat.
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
    """Measures functions in turns. Collective: create and use it identically on all ranks.

    Args:
        device: Type of the device.
        context_of: Takes a function's name and returns the context in which the function runs.
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
        # Elapsed minutes on rank 0 at the last repeat; all ranks use the same value.
        self._minutes = 0.0

    def measure(
        self,
        runs: Mapping[str, Run],
        patience: Patience,
        before: Callable[[str, Rounds], None] = _nothing,
    ) -> Rounds:
        """Measure all functions in turns.

        Args:
            runs: Functions by name.
            patience: Limits of the measurement.
            before: Called before a repeat, with the results so far.
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
        """Return the number of steps of a repeat, computed from one trial step."""
        took = self.repeat(name, run, 1).seconds
        return max(1, min(patience.steps, math.ceil(patience.seconds / took)))

    def repeat(self, name: str, run: Run, num_steps: int) -> Sample:
        """Time steps on all ranks together; every rank returns the time of the slowest rank."""
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
        """Synchronize the device: on a GPU a step returns before its work is complete."""
        if self._device == "cuda":
            torch.cuda.synchronize()
