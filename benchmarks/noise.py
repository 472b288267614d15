"""What other programs do to a measurement: how much it was, and what is measured again for it."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Rounds", "Sample", "busy_seconds", "cpus", "foreign_share"]

_STAT = Path("/proc/stat")
# user, nice, system, steal. What interrupts take is left out: those of the ranks' own
# communication are not in their times.
_FIELDS = (1, 2, 3, 8)


def cpus() -> set[int]:
    """CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def busy_seconds(of: Collection[int], text: str | None = None) -> float | None:
    """Seconds for which CPUs have worked since the machine was started, whoever used them.

    Args:
        of: Numbers of the CPUs.
        text: What the kernel says; default: what it says now.

    Returns:
        None where the kernel does not say.
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
    """Part of the machine that other programs used.

    Args:
        busy: Seconds for which CPUs worked.
        own: Seconds for which they worked for the ranks, over all of them.
        seconds: How long it took.
        num_cpus: Number of CPUs.

    Returns:
        0 for a machine on which nothing else runs, 1 for one of which nothing was left.
    """
    return max(0.0, busy - own) / (seconds * num_cpus)


@dataclass(frozen=True)
class Sample:
    """One repeat.

    Attributes:
        seconds: Of a step.
        optimizer: Of that, the optimizer's part.
        foreign: Part of the machine that other programs used meanwhile.
    """

    seconds: float
    optimizer: float = 0.0
    foreign: float = 0.0


@dataclass
class Rounds:
    """Who is measured next: all take turns, and those that were disturbed once more.

    Iterate over it, and `note` each result before the next is asked for. In a round, everybody who
    still needs a repeat has one, in an order that changes from round to round. It is the same on
    all ranks where what is noted is.

    Attributes:
        names: Whose turns these are.
        wanted: Undisturbed repeats of each.
        most: Repeats of each, disturbed ones included, after which there are no more.
        threshold: Foreign share from which a repeat counts as disturbed.
        seed: Of the orders.
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
        """Keep a result."""
        self.samples[name].append(sample)

    def quiet(self, name: str) -> list[Sample]:
        """Repeats that were not disturbed."""
        return [sample for sample in self.samples[name] if sample.foreign <= self.threshold]

    def is_disturbed(self, name: str) -> bool:
        """Whether there were too few quiet repeats."""
        return len(self.quiet(name)) < self.wanted

    def counted(self, name: str) -> list[Sample]:
        """Repeats that count: quiet ones, or, where those are too few, the least disturbed."""
        ranked = sorted(self.samples[name], key=lambda sample: sample.foreign)
        return ranked[: self.wanted] if self.is_disturbed(name) else self.quiet(name)

    def median(self, name: str) -> float:
        """Seconds of a step."""
        return statistics.median(sample.seconds for sample in self.counted(name))

    def optimizer(self, name: str) -> float:
        """Seconds of the optimizer in a step."""
        return statistics.median(sample.optimizer for sample in self.counted(name))
