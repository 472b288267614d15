"""What trainings of a run measured, printed with `--tables`."""

from __future__ import annotations

from dataclasses import dataclass, field

from functional_tests.trainings import Difference
from tests import pages

_HEAD = ("row", "ranks", "strategy or precision", "loss", "norm", "loss, theirs", "norm, theirs")
_RESUME_HEAD = ("what changes", "loss")


@dataclass
class Table:
    """Largest relative differences that were measured.

    Attributes:
        rows: Cells of trainings: of losses and norms, and where it was asked those of Megatron's
            own distributed optimizer.
        resumes: Cells of resumed runs.
    """

    rows: list[tuple[str, ...]] = field(default_factory=list)
    resumes: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, cells: tuple[str, ...], *differences: Difference | None) -> None:
        """Take in how far two trainings are apart."""
        numbers = [
            text
            for each in differences
            for text in ((f"{each.loss:.0e}", f"{each.norm:.0e}") if each else ("", ""))
        ]
        self.rows.append((*cells, *numbers))

    def text(self) -> str:
        """The tables as Markdown."""
        resumed = pages.table(_RESUME_HEAD, self.resumes)
        parts = ("# Trainings beside others", pages.table(_HEAD, self.rows), "## Resumed", resumed)
        return "\n\n".join(parts) + "\n"
