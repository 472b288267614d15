"""The table of the functional matrix: what a run measured, printed with `--tables`."""

from __future__ import annotations

from dataclasses import dataclass, field

from functional_tests.matrix import RESUMES, ROWS, Case, Resume, Row, Setup, cases, sizes
from functional_tests.trainings import Difference
from tests import pages

_ABOUT = (
    "Ten iterations of a tiny model under Megatron's own training loop, on CPUs: this package "
    "beside Megatron's own DDP of the same parallel sizes. Shown is the largest relative "
    "difference of the losses (evaluations included) and of the norms (of the gradients before "
    "clipping; where a row logs them, of the parameters too). In fp32 both are asserted to be "
    "below 1e-06. Where weights are bf16 or fp16, rounding decides, and the last two columns show "
    "how far Megatron's own distributed optimizer is from its DDP (the larger of two ways to cut "
    "its buckets); asserted is 1.5 times that."
)
_HEAD = ("row", "ranks", "sizes", "strategy", "loss", "norm", "loss, theirs", "norm, theirs")
_RESUME_ABOUT = (
    "A run saves after a few iterations and goes on; another one loads that checkpoint with other "
    "parallel sizes. Shown is the largest relative difference of its losses from those of the run "
    "that went on."
)
_RESUME_HEAD = ("what changes", "saved by", "loaded by", "loss")


@dataclass
class Table:
    """What was measured of cases and resumed runs.

    Attributes:
        lines: Cells of measured cases by row name and strategy.
        resumes: Cells of resumed runs by name.
    """

    lines: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    resumes: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, case: Case, mine: Difference, theirs: Difference | None) -> None:
        """Take in a measured case.

        Args:
            case: Which one.
            mine: This package's difference from DDP.
            theirs: That of Megatron's distributed optimizer, where it was asked.
        """
        numbers = [f"{mine.loss:.0e}", f"{mine.norm:.0e}"]
        numbers += [f"{theirs.loss:.0e}", f"{theirs.norm:.0e}"] if theirs else ["", ""]
        self.lines[case.row.name, case.strategy] = (*described(case), *numbers)

    def add_resumed(self, resume: Resume, loss: float) -> None:
        """Take in how far the losses of a resumed run are from those of the run that went on."""
        setups = (_in_words(resume.saves), _in_words(resume.loads))
        self.resumes[resume.name] = (resume.name, *setups, f"{loss:.0e}")

    def text(self) -> str:
        """The tables as Markdown."""
        known = [self.lines.get((case.row.name, case.strategy)) for case in cases()]
        lines = ["# Functional matrix", "", *pages.wrapped(_ABOUT, 90), ""]
        lines.append(pages.table(_HEAD, [cells for cells in known if cells]))
        lines += ["", "## Flags of the rows", ""]
        head = ("row", "both sides", "this package", "frozen")
        lines.append(pages.table(head, map(_flags, ROWS)))
        lines += ["", "## Resumed at other parallel sizes", ""]
        lines += [*pages.wrapped(_RESUME_ABOUT, 90), ""]
        resumed = [self.resumes.get(resume.name) for resume in RESUMES]
        lines.append(pages.table(_RESUME_HEAD, [cells for cells in resumed if cells]))
        return "\n".join(lines) + "\n"


def described(case: Case) -> tuple[str, ...]:
    """The cells of a case that no measurement changes."""
    return (case.row.name, str(case.row.world_size), sizes(case.row), case.strategy)


def _in_words(setup: Setup) -> str:
    flags = f", `{setup.flags}`" if setup.flags else ""
    return f"{setup.world_size} ranks, {setup.strategy}{flags}"


def _flags(row: Row) -> tuple[str, ...]:
    texts = (row.flags, row.ours, " ".join(row.freezes))
    return (row.name, *(f"`{text}`" if text else "" for text in texts))
