"""A step of every engine, side by side: all in one process group, in turns, on the same batches."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import limit, report
from benchmarks.cases import Setting
from benchmarks.engines import BASELINE, ENGINES, PLAIN, Plain, Training, build
from benchmarks.model import batches
from benchmarks.noise import Rounds, Sample, busy_seconds, cpus, foreign_share

__all__ = ["TOLERANCE", "Patience", "loss_difference", "measure", "work"]

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Of losses, relative: engines add up in different orders, and autocast rounds less often."""
WARM_UP = 3
"""Steps before anything is timed, whose losses are compared. The pool is there after two."""
_MOST_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long is measured.

    Attributes:
        rounds: Undisturbed repeats of each engine.
        most: Repeats with the disturbed ones.
        seconds: Least time of a repeat, which is as many steps as that takes.
        foreign: Part of the machine used by others from which a repeat counts as disturbed.
        minutes: Of a setting, after which disturbed repeats are not made again.
    """

    rounds: int = 5
    most: int = 10
    seconds: float = 0.2
    foreign: float = 0.08
    minutes: float = 1.0


def measure(
    setting: Setting, engines: list[str], mesh: DeviceMesh, patience: Patience
) -> dict[str, Any]:
    """Train with all engines in turns.

    Args:
        setting: What is trained.
        engines: Names of engines; the plain loop is always among them.
        mesh: Of all ranks.
        patience: How long is measured.

    Returns:
        What was found, alike on all ranks: by engine, and of the limit's pieces.
    """
    contest = _Contest(setting, mesh)
    names = [PLAIN, *(name for name in engines if name != PLAIN)]
    for name in names:
        contest.enter(name)
    gc.collect()
    # With this many models alive, a collection of garbage would take longer than a step.
    gc.freeze()
    try:
        return contest.run(patience)
    finally:
        gc.unfreeze()
        contest.runs.clear()
        contest.trainings.clear()
        gc.collect()


def work(
    mesh: DeviceMesh,
    args: argparse.Namespace,
    path: str,
    contests: list[tuple[Setting, list[str]]],
) -> None:
    """Measure engines in settings on every rank; rank 0 shows each and adds a line to a file."""
    # Said by an engine's hooks on the first layer, whose inputs need no gradients.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    most = max(args.most, args.rounds)
    patience = Patience(args.rounds, most, args.seconds, args.foreign, args.minutes)
    for setting, engines in contests:
        found = measure(setting, engines, mesh, patience)
        if dist.get_rank() == 0:
            report.show([report.steps(found)])
            with Path(path).open("a") as file:
                file.write(json.dumps(found) + "\n")


def loss_difference(losses: torch.Tensor, plain: torch.Tensor) -> float:
    """The largest relative difference of losses on any rank; infinite where one is not a number."""
    worst = torch.nan_to_num(((losses - plain).abs() / plain.abs()).amax(), nan=torch.inf)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


class _Contest:
    """All engines of one setting."""

    def __init__(self, setting: Setting, mesh: DeviceMesh) -> None:
        self.setting = setting
        self.mesh = mesh
        self.device = mesh.device_type
        self.trainings: dict[str, Training] = {}
        self.losses: dict[str, torch.Tensor] = {}
        self.failed: dict[str, str] = {}
        self.runs: dict[str, Callable[[], float]] = {}
        self._start = time.perf_counter()
        self._minutes = 0.0
        """Since then, by the clock of rank 0, as of the last repeat."""

    def enter(self, name: str) -> None:
        """Build an engine's model and make its first steps; what fails is noted and left out."""
        rank = dist.get_rank()
        try:
            training = build(name, self.setting, self.mesh)
            with ENGINES[name].context(self.device):
                losses = [
                    training.step(batches(self.setting, rank, number, self.device))
                    for number in range(WARM_UP)
                ]
        except Exception as error:
            if name == PLAIN:
                raise
            self.failed[name] = f"{type(error).__name__}: {error}"
            return
        self.trainings[name] = training
        self.losses[name] = torch.stack(losses).double()
        inputs = batches(self.setting, rank, WARM_UP, self.device)
        self.runs[name] = lambda: _step(training, inputs)

    def run(self, patience: Patience) -> dict[str, Any]:
        """Measure everybody in turns."""
        plain = self.trainings[PLAIN]
        assert isinstance(plain, Plain)
        inputs = batches(self.setting, dist.get_rank(), WARM_UP, self.device)
        parts = limit.pieces(plain, self.setting, inputs)
        for name, part in parts.items():
            self.runs[name] = lambda part=part: _nothing(part())
        num_steps = {name: self._steps_of(name, patience.seconds) for name in self.runs}
        rounds = Rounds(self.runs, patience.rounds, patience.most, patience.foreign)
        for name in rounds:
            rounds.note(name, self._repeat(name, num_steps[name]))
            if self._minutes > patience.minutes:
                rounds.most = rounds.wanted
        gathers = limit.gathers_per_micro_batch(plain.model)
        return self._found(rounds, list(parts), gathers)

    @contextlib.contextmanager
    def _context_of(self, name: str) -> Iterator[None]:
        with ENGINES[name].context(self.device) if name in ENGINES else contextlib.nullcontext():
            yield

    def _steps_of(self, name: str, seconds: float) -> int:
        """Steps of a repeat, found by trying one."""
        took = self._repeat(name, 1).seconds
        return max(1, min(_MOST_STEPS, math.ceil(seconds / took)))

    def _repeat(self, name: str, num_steps: int) -> Sample:
        """Time some steps on all ranks together: of the slowest one, alike on all."""
        run, optimizer = self.runs[name], 0.0
        allowed = cpus()
        with self._context_of(name):
            dist.barrier()
            self._settle()
            busy, own, start = busy_seconds(allowed), time.process_time(), time.perf_counter()
            for _ in range(num_steps):
                optimizer += run()
            self._settle()
            took, own = time.perf_counter() - start, time.process_time() - own
            busy = None if busy is None else (busy_seconds(allowed) or 0.0) - busy
        every = torch.zeros(dist.get_world_size(), 5, dtype=torch.float64, device=self.device)
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
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _found(self, rounds: Rounds, parts: list[str], gathers: float) -> dict[str, Any]:
        took = {name: rounds.median(name) for name in rounds.samples}
        base = took.get(BASELINE)
        found: dict[str, Any] = {}
        for name, losses in self.losses.items():
            least = limit.limit_seconds(
                took, ENGINES[name].strategy, self.setting.micro_batches, gathers
            )
            difference = loss_difference(losses, self.losses[PLAIN])
            found[name] = {
                "step_s": took[name],
                "optimizer_s": rounds.optimizer(name),
                "over_baseline": took[name] / base if base else None,
                "limit_s": least,
                "over_limit": took[name] / least,
                "loss_difference": difference if math.isfinite(difference) else None,
                "losses_agree": difference <= TOLERANCE[self.setting.dtype],
                "disturbed": rounds.is_disturbed(name),
                "samples": [dataclasses.asdict(sample) for sample in rounds.samples[name]],
            }
        return {
            "name": self.setting.name,
            "setting": dataclasses.asdict(self.setting),
            "engines": found,
            "failed": self.failed,
            "pieces_s": {name: took[name] for name in parts},
            "pieces_disturbed": [name for name in parts if rounds.is_disturbed(name)],
        }


def _step(training: Training, inputs: list[torch.Tensor]) -> float:
    training.step(inputs)
    return training.optimizer_seconds


def _nothing(result: Any) -> float:
    del result
    return 0.0
