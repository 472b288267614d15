"""Times a step of every engine: all in one process group, in turns, on the same batches."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import limit, report
from benchmarks.cases import Setting
from benchmarks.engines import BASELINE, ENGINES, PLAIN, Plain, Training, build
from benchmarks.model import batches
from benchmarks.noise import Rounds
from benchmarks.repeats import Patience, Repeats

__all__ = ["TOLERANCE", "loss_difference", "measure", "work"]

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Relative tolerance of losses: engines sum in different orders; autocast rounds less often."""
WARM_UP = 3
"""Untimed first steps, whose losses are compared. The traced pool is planned after two steps."""


def measure(
    setting: Setting, engines: list[str], mesh: DeviceMesh, patience: Patience
) -> dict[str, Any]:
    """Train with all engines in turns.

    Args:
        setting: The setting.
        engines: Names of engines; always includes the plain loop.
        mesh: Mesh of all ranks.
        patience: Limits of the measurement.

    Returns:
        Results by engine and by component of the limit, identical across ranks.
    """
    contest = _Contest(setting, mesh)
    names = [PLAIN, *(name for name in engines if name != PLAIN)]
    for name in names:
        contest.enter(name)
    gc.collect()
    # With this many live models, a garbage collection would take longer than a step.
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
    """Measure settings on every rank; rank 0 prints each result and appends it to a file."""
    # An engine's hooks raise this warning on the first layer, whose inputs need no gradients.
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
    """Return the largest relative difference of losses on any rank; infinite if a loss is NaN."""
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
        self._repeats = Repeats(self.device, self._context_of)

    def enter(self, name: str) -> None:
        """Build an engine's model and run its first steps; record and skip failures."""
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
        """Measure all engines in turns."""
        plain = self.trainings[PLAIN]
        assert isinstance(plain, Plain)
        inputs = batches(self.setting, dist.get_rank(), WARM_UP, self.device)
        parts = limit.pieces(plain, self.setting, inputs)
        for name, part in parts.items():
            self.runs[name] = lambda part=part: _nothing(part())
        rounds = self._repeats.measure(self.runs, patience)
        gathers = limit.gathers_per_micro_batch(plain.model)
        return self._found(rounds, list(parts), gathers)

    def _context_of(self, name: str) -> contextlib.AbstractContextManager[None]:
        return ENGINES[name].context(self.device) if name in ENGINES else contextlib.nullcontext()

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
