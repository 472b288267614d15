"""Running what the matrix describes, and comparing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from functional_tests.matrix import Run
from functional_tests.probes import left_gathered
from tests import pages
from tests.mcore import session
from tests.mcore.session import Training, distance, train
from tests.mcore.trained import run_of_ranks
from tests.ranks import RankPools

# A sum of a few terms that cancel is zero in one order and not in another: so are gradients of
# biases of keys, which are zero but for rounding. There is one for each of 64 channels of a layer.
ZEROS_BY_CHANCE = 64


Trainings = Callable[[Run], Training]
"""Makes a run, if none that is equal was made: what all its ranks saw, taken together."""


def trainings_of(pools_for: Callable[[Sequence[str]], RankPools]) -> Trainings:
    """Trainings on the ranks of pools, which are found by flags."""

    def make(run: Run) -> Training:
        is_fp32 = {"--bf16", "--fp16"}.isdisjoint(run.flags)
        # Megatron checks for 16 bits there.
        overlaps = is_fp32 and "--overlap-moe-expert-parallel-comm" in run.flags
        return run_of_ranks(
            pools_for(run.flags),
            run.world_size,
            run.flags,
            by=train_in_fp32 if overlaps else train,
            once=True,
            freezes=run.freezes,
            exact_norms=run.exact_norms,
            probe=run.probe or left_gathered,
        )

    return make


class Difference(NamedTuple):
    """Largest relative differences of two trainings.

    Attributes:
        loss: Of the losses, evaluations included.
        norm: Of the gradient norms, and of the parameter norms where they are logged.
    """

    loss: float
    norm: float

    def within(self, bound: Difference) -> bool:
        """Whether neither is larger than that of another comparison."""
        return self.loss <= bound.loss and self.norm <= bound.norm

    def __str__(self) -> str:
        return f"losses differ by {self.loss:.1e}, norms by {self.norm:.1e}"


def difference(
    mine: Training, theirs: Training, iterations: int, zeros_by_chance: int = ZEROS_BY_CHANCE
) -> Difference:
    """Compare two trainings number by number; what is counted has to be equal.

    Args:
        mine: One training.
        theirs: The other one.
        iterations: How many both made, some of which may be skipped.
        zeros_by_chance: Gradients that may be zero in one of them alone.
    """
    assert iterations // 2 < len(mine.losses) == len(theirs.losses) <= iterations
    # In fp32 some of Megatron's optimizers report the constant scale, and others 1.
    ours, others = ([s / run.loss_scales[0] for s in run.loss_scales] for run in (mine, theirs))
    assert (ours, mine.skipped) == (others, theirs.skipped)
    # A step that overflows, where there is a loss scale, is skipped and reports no norm.
    assert len(mine.grad_norms) > iterations // 2, "too few steps were taken"
    for a, b in zip(mine.num_zeros, theirs.num_zeros, strict=True):
        assert abs(a - b) <= max(zeros_by_chance, 1e-3 * b), f"{a} zeros against {b}"
    loss, norm = (
        max(distance(getattr(mine, name), getattr(theirs, name)) for name in names)
        for names in (("losses", "evaluations"), ("grad_norms", "params_norms"))
    )
    return Difference(loss, norm)


_HEAD = ("row", "ranks", "strategy or precision", "loss", "norm", "loss, theirs", "norm, theirs")


@dataclass
class Table:
    """Largest relative differences that trainings of a run measured, printed with `--tables`.

    Attributes:
        rows: Cells of trainings: of losses and norms, and where it was asked those of Megatron's
            own distributed optimizer.
        resumes: Cells of resumed runs.
    """

    rows: list[tuple[str, ...]] = field(default_factory=list)
    resumes: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, cells: tuple[str, ...], *differences: Difference | None) -> None:
        """Take in how far two trainings are apart."""
        numbers = [f"{number:.0e}" for each in differences for number in each or ()]
        self.rows.append((*cells, *numbers, *[""] * (len(_HEAD) - len(cells) - len(numbers))))

    def text(self) -> str:
        """The tables as Markdown."""
        resumed = pages.table(("what changes", "loss"), self.resumes)
        parts = ("# Trainings beside others", pages.table(_HEAD, self.rows), "## Resumed", resumed)
        return "\n\n".join(parts) + "\n"


def train_in_fp32(flags: Sequence[str], *args: Any, **options: Any) -> Training:
    """Train in fp32, where Megatron's check wants 16 bits and nothing of what is run does.

    Args:
        flags: Without `--bf16`.
        args: Of `session.train`.
        options: Likewise.
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
