"""Measures the load of other programs and selects the repeats to measure again."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Rounds", "Sample", "busy_seconds", "cpus", "foreign_share"]

_STAT = Path("/proc/stat")
# user, nice, system, steal. Interrupts are excluded: process times of the ranks do not include the
# interrupts of their communication.
_FIELDS = (1, 2, 3, 8)


def cpus() -> set[int]:
    """Return the CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def busy_seconds(of: Collection[int], text: str | None = None) -> float | None:
    """Return the busy seconds of CPUs since the machine was started, for all programs.

    Args:
        of: Numbers of the CPUs.
        text: The kernel's statistics; the current statistics if None.

    Returns:
        Seconds; None if the kernel has no statistics.
    """
    if text is None:
        if not _STAT.exists():
            return None
        text = _STAT.read_text()
    names = {f"cpu{number}" for number in of}
    lines = (line.split() for line in text.splitlines())
    ticks = sum(
        int(words[n]) for words in lines if words[:1] and words[0] in names for n in _FIELDS
    )
    return ticks / os.sysconf("SC_CLK_TCK")


def foreign_share(busy: float, own: float, seconds: float, num_cpus: int) -> float:
    """Return the fraction of the machine that other programs used.

    Args:
        busy: Busy seconds of the CPUs.
        own: Busy seconds of all ranks.
        seconds: Elapsed time.
        num_cpus: Number of CPUs.

    Returns:
        0 if nothing else runs on the machine, 1 if other programs use all of it.
    """
    return max(0.0, busy - own) / (seconds * num_cpus)


@dataclass(frozen=True)
class Sample:
    """One repeat.

    Attributes:
        seconds: Seconds per step.
        optimizer: The optimizer's part of `seconds`.
        foreign: Fraction of the machine that other programs used during the repeat.
    """

    seconds: float
    optimizer: float = 0.0
    foreign: float = 0.0


@dataclass
class Rounds:
    """The order of measurements: contenders in turns, with disturbed repeats measured again.

    Iterate over it, and `note` each result before the next iteration. In a round, every contender
    that still needs a repeat runs one, in an order that changes from round to round. The order is
    identical across ranks if the noted results are.

    Attributes:
        names: The contenders.
        wanted: Undisturbed repeats of each.
        most: Maximum repeats of each, disturbed repeats included.
        threshold: Fraction used by other programs above which a repeat counts as disturbed.
        seed: Seed of the orders.
    """

    names: Iterable[str]
    wanted: int
    most: int
    threshold: float
    seed: int = 0
    samples: dict[str, list[Sample]] = field(init=False)

    def __post_init__(self) -> None:
        self.samples = {name: [] for name in self.names}

    def __iter__(self) -> Iterator[str]:
        order = random.Random(self.seed)
        while names := [name for name in self.samples if self._needs_more(name)]:
            order.shuffle(names)
            yield from names

    def _needs_more(self, name: str) -> bool:
        return len(self.quiet(name)) < self.wanted and len(self.samples[name]) < self.most

    def note(self, name: str, sample: Sample) -> None:
        """Store a result."""
        self.samples[name].append(sample)

    def quiet(self, name: str) -> list[Sample]:
        """Return the undisturbed repeats."""
        return [sample for sample in self.samples[name] if sample.foreign <= self.threshold]

    def is_disturbed(self, name: str) -> bool:
        """Return whether there are too few undisturbed repeats."""
        return len(self.quiet(name)) < self.wanted

    def counted(self, name: str) -> list[Sample]:
        """Return the undisturbed repeats or, if these are too few, the least disturbed repeats."""
        ranked = sorted(self.samples[name], key=lambda sample: sample.foreign)
        return ranked[: self.wanted] if self.is_disturbed(name) else self.quiet(name)

    def median(self, name: str) -> float:
        """Return the median seconds of a step."""
        return statistics.median(sample.seconds for sample in self.counted(name))

    def optimizer(self, name: str) -> float:
        """Return the median seconds of the optimizer in a step."""
        return statistics.median(sample.optimizer for sample in self.counted(name))
