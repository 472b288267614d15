"""What trainings of a run measured, printed with `--tables`."""

from __future__ import annotations

from dataclasses import dataclass, field

from functional_tests.trainings import Difference
from tests import pages

_HEAD = ("row", "ranks", "strategy or precision", "loss", "norm")
_RESUME_HEAD = ("what changes", "loss")


@dataclass
class Table:
    """Largest relative differences that were measured.

    Attributes:
        rows: Cells of trainings: names, then differences of losses and of norms.
        resumes: Cells of resumed runs.
    """

    rows: list[tuple[str, ...]] = field(default_factory=list)
    resumes: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, cells: tuple[str, ...], difference: Difference) -> None:
        """Add the difference of two trainings."""
        self.rows.append((*cells, f"{difference.loss:.0e}", f"{difference.norm:.0e}"))

    def text(self) -> str:
        """The tables as Markdown."""
        resumed = pages.table(_RESUME_HEAD, self.resumes)
        parts = ("# Trainings beside others", pages.table(_HEAD, self.rows), "## Resumed", resumed)
        return "\n\n".join(parts) + "\n"
