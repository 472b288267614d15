"""Parses the output of Megatron's training loop."""

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_NUMBER = r"([0-9.]+(?:E[+-]?\d+)?|nan|inf)"
_ITERATION = re.compile(r" iteration +(\d+)/ *(\d+) \|")
_ELAPSED = re.compile(rf" elapsed time per iteration \(ms\): {_NUMBER} \|")
_LOSS = re.compile(rf" lm loss: {_NUMBER} \|")
_EVALUATION = re.compile(
    rf" validation loss at iteration (\d+) on (validation|test) set \| lm loss value: {_NUMBER}"
)

# The first iterations initialize caches and threads and are excluded from timings.
_NUM_WARM_UP_ITERS = 3
# Tolerance for a mean of numbers that are printed with seven digits.
_PRINTED_PRECISION = 1e-6


@dataclass(frozen=True)
class Iteration:
    """One iteration as Megatron printed it.

    Attributes:
        number: Counted from 1.
        total: Iterations of the whole run.
        loss: The printed loss, as a string: losses are compared as printed.
        elapsed_ms: Duration of the iteration in milliseconds.
    """

    number: int
    total: int
    loss: str
    elapsed_ms: float


@dataclass
class TrainingLog:
    """Parsed output of one run so far.

    Attributes:
        iterations: Iterations by number.
        evaluations: Loss as printed, by the name of the set ("validation" or "test").
    """

    iterations: dict[int, Iteration] = field(default_factory=dict)
    evaluations: dict[str, str] = field(default_factory=dict)

    def read(self, line: str) -> Iteration | None:
        """Parses one line of output.

        Args:
            line: The line.

        Returns:
            The iteration that the line reports, or None.
        """
        if evaluation := _EVALUATION.search(line):
            self.evaluations[evaluation[2]] = evaluation[3]
        iteration = parse_iteration(line)
        if iteration is not None:
            self.iterations[iteration.number] = iteration
        return iteration

    @property
    def losses(self) -> dict[int, str]:
        """The losses as printed, by iteration number."""
        return {number: iteration.loss for number, iteration in self.iterations.items()}

    def tokens_per_second(self, tokens_per_iteration: int) -> float:
        """Computes the throughput of the run.

        Args:
            tokens_per_iteration: Tokens of one iteration, over all ranks.

        Returns:
            Tokens per second of the median iteration.
        """
        elapsed = [iteration.elapsed_ms for iteration in self.iterations.values()]
        return (
            tokens_per_iteration * 1000 / statistics.median(elapsed[_NUM_WARM_UP_ITERS:] or elapsed)
        )


def parse_iteration(line: str) -> Iteration | None:
    """Parses the line that Megatron prints for an iteration.

    Args:
        line: A line of output.

    Returns:
        The iteration, or None if the line does not report an iteration.
    """
    iteration, loss, elapsed = (p.search(line) for p in (_ITERATION, _LOSS, _ELAPSED))
    if iteration is None or loss is None or elapsed is None:
        return None
    return Iteration(int(iteration[1]), int(iteration[2]), loss[1], float(elapsed[1]))


def parse_log(lines: Iterable[str]) -> TrainingLog:
    """Parses a whole log.

    Args:
        lines: Its lines.

    Returns:
        The parsed log.
    """
    log = TrainingLog()
    for line in lines:
        log.read(line)
    return log


@dataclass(frozen=True)
class ResumeProof:
    """Comparison of a resumed run with the uninterrupted run.

    Attributes:
        expected: Iterations expected of the resumed run.
        missing: Iterations that one of the two runs did not print.
        different: Iterations whose printed losses differ, with both losses: uninterrupted, resumed.
    """

    expected: range
    missing: tuple[int, ...]
    different: Mapping[int, tuple[str, str]]

    @property
    def holds(self) -> bool:
        """Whether every expected loss was printed by both runs and is equal."""
        return len(self.expected) > 0 and not self.missing and not self.different


def compare_resumed(
    uninterrupted: Mapping[int, str], resumed: Mapping[int, str], expected: range
) -> ResumeProof:
    """Compares the losses of a resumed run with the losses of the uninterrupted run.

    Args:
        uninterrupted: Printed losses by iteration number.
        resumed: Printed losses of the resumed run.
        expected: Iterations expected of the resumed run.

    Returns:
        The comparison.
    """
    missing = tuple(n for n in expected if n not in uninterrupted or n not in resumed)
    different = {
        n: (uninterrupted[n], resumed[n])
        for n in expected
        if n not in missing and not _agree(uninterrupted, resumed, n)
    }
    return ResumeProof(expected, missing, different)


def averaged_iteration(losses: Iterable[int]) -> int | None:
    """Finds the printed loss of a run that is a mean over iterations.

    Megatron prints the first iteration of a run without clearing its sums. The second line shows
    the mean of the first two iterations; every later line shows its own iteration.

    Args:
        losses: The printed iterations of a run, in order.

    Returns:
        The second iteration, or None if there are fewer.
    """
    return next(itertools.islice(losses, 1, None), None)


def _agree(uninterrupted: Mapping[int, str], resumed: Mapping[int, str], number: int) -> bool:
    """Whether both runs printed the same loss, taking the mean of two iterations into account."""
    if uninterrupted[number] == resumed[number]:
        return True
    if number != averaged_iteration(resumed) or number - 1 not in uninterrupted:
        return False
    mean = (float(uninterrupted[number - 1]) + float(uninterrupted[number])) / 2
    return math.isclose(float(resumed[number]), mean, rel_tol=_PRINTED_PRECISION)
