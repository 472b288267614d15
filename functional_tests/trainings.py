"""Runs the trainings of the matrix, and compares them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from functional_tests.matrix import Run
from functional_tests.probes import gathered_units
from tests import pages
from tests.mcore import session
from tests.mcore.session import Training, distance, train
from tests.mcore.trained import run_of_ranks
from tests.ranks import RankPools

# Gradients of key biases are zero up to rounding; the order of a sum determines which of them are
# exactly zero. A layer has 64 of them.
ZEROS_BY_CHANCE = 64


Trainings = Callable[[Run], Training]
"""Trains a run, once for equal runs; returns the merged measurements of its ranks."""


def trainings_of(pools_for: Callable[[Sequence[str]], RankPools]) -> Trainings:
    """Return a function that trains on the ranks of pools, which are selected by flags."""

    def make(run: Run) -> Training:
        is_fp32 = {"--bf16", "--fp16"}.isdisjoint(run.flags)
        # Megatron requires 16 bits for this flag.
        overlaps = is_fp32 and "--overlap-moe-expert-parallel-comm" in run.flags
        return run_of_ranks(
            pools_for(run.flags),
            run.world_size,
            run.flags,
            by=train_in_fp32 if overlaps else train,
            once=True,
            freezes=run.freezes,
            exact_norms=run.exact_norms,
            probe=run.probe or gathered_units,
        )

    return make


class Difference(NamedTuple):
    """Largest relative differences of two trainings.

    Attributes:
        loss: Difference of losses, including evaluations.
        norm: Difference of norms of gradients and, if logged, of parameters.
    """

    loss: float
    norm: float

    def within(self, bound: Difference) -> bool:
        """Return whether neither difference exceeds a bound."""
        return self.loss <= bound.loss and self.norm <= bound.norm

    def __str__(self) -> str:
        return f"losses differ by {self.loss:.1e}, norms by {self.norm:.1e}"


def difference(
    mine: Training, theirs: Training, iterations: int, zeros_by_chance: int = ZEROS_BY_CHANCE
) -> Difference:
    """Compare two trainings. Counted values must be equal.

    Args:
        mine: One training.
        theirs: The other one.
        iterations: Number of iterations of both, some of which may be skipped.
        zeros_by_chance: Number of gradients that may be zero in only one of them.
    """
    numbers = len(mine.losses), len(theirs.losses)
    assert iterations // 2 < numbers[0] == numbers[1] <= iterations, f"{numbers} losses"
    # In fp32 some of Megatron's optimizers report the constant scale, and others 1.
    ours, others = ([s / run.loss_scales[0] for s in run.loss_scales] for run in (mine, theirs))
    scales = (ours, mine.skipped), (others, theirs.skipped)
    assert scales[0] == scales[1], f"loss scales and skipped steps are {scales[0]}, not {scales[1]}"
    rates = mine.learning_rates, theirs.learning_rates
    assert rates[0] == rates[1], f"learning rates are {rates[0]}, not {rates[1]}"
    # With a loss scale, a step that overflows is skipped and reports no norm.
    assert len(mine.grad_norms) > iterations // 2, "too few steps were taken"
    for a, b in zip(mine.num_zeros, theirs.num_zeros, strict=True):
        assert abs(a - b) <= max(zeros_by_chance, 1e-3 * b), f"{a} zeros against {b}"
    loss, norm = (
        max(distance(getattr(mine, name), getattr(theirs, name)) for name in names)
        for names in (("losses", "evaluations"), ("grad_norms", "params_norms"))
    )
    return Difference(loss, norm)


_HEAD = ("row", "ranks", "strategy or precision", "loss", "norm")


@dataclass
class Table:
    """Largest relative differences of all trainings of a test run, printed with `--tables`.

    Attributes:
        rows: Cells of trainings: names, then differences of losses and of norms.
        resumes: Cells of resumed runs.
    """

    rows: list[tuple[str, ...]] = field(default_factory=list)
    resumes: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, cells: tuple[str, ...], found: Difference) -> None:
        """Add a row with the difference of two trainings."""
        self.rows.append((*cells, *(f"{number:.0e}" for number in found)))

    def text(self) -> str:
        """The tables as Markdown."""
        resumed = pages.table(("what changes", "loss"), self.resumes)
        parts = ("# Trainings beside others", pages.table(_HEAD, self.rows), "## Resumed", resumed)
        return "\n\n".join(parts) + "\n"


def train_in_fp32(flags: Sequence[str], *args: Any, **options: Any) -> Training:
    """Train in fp32 although a check of Megatron requires 16 bits.

    Args:
        flags: Without `--bf16`.
        args: Arguments of `session.train`.
        options: Options of `session.train`.
    """
    session.enter_rehearsal()
    from megatron.core.transformer.transformer_config import TransformerConfig

    check = TransformerConfig.__post_init__

    def check_as_bf16(config: Any) -> None:
        config.bf16 = True
        check(config)
        config.bf16 = False

    with mock.patch.object(TransformerConfig, "__post_init__", check_as_bf16):
        return session.train(flags, *args, **options)
