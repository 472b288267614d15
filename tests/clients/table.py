"""What tests with other libraries claim and measure, printed with `--tables`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path

import pytest

from tests.pages import page, table

_ABOUT = (
    "A line for every test: what it claims, of which model and with which options, what is "
    "compared, and the largest relative difference (norm of the difference over norm; a tensor "
    "that is small by cancellation is measured against a third of the norm of all of them). "
    "It is at most 1e-06 in fp32, and zero where the same bits have to come out."
)
_HEAD = ("library", "version", "claim", "of", "compared", "largest difference")


@dataclass(frozen=True)
class Claim:
    """What one test says: the name of its function in words, and its parameters, which have to be
    words themselves.
    """

    text: str
    of: str

    @classmethod
    def made_by(cls, item: pytest.Item) -> Claim:
        """The claim of a test."""
        words = item.originalname.removeprefix("test_").replace("_", " ")  # type: ignore[attr-defined]
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        return cls(words, ", ".join(map(str, parameters)))


@dataclass
class Table:
    """What a run measured.

    Attributes:
        lines: Cells by claim.
    """

    lines: dict[Claim, tuple[str, ...]] = field(default_factory=dict)

    def add(self, client: str, claim: Claim, compared: str, difference: float) -> None:
        """Take in what a test found.

        Args:
            client: Name of the library, as it is installed.
            claim: The test's.
            compared: What was compared with what, in words.
            difference: The largest relative difference.
        """
        number = "0" if difference == 0 else f"{difference:.0e}"
        cells = (client, version(client), claim.text, claim.of, compared, number)
        self.lines[claim] = cells

    def text(self) -> str:
        """The table as Markdown."""
        lines = sorted(self.lines.values(), key=itemgetter(0, 2, 3))
        return page("Other libraries", _ABOUT, table(_HEAD, lines))


def pinned() -> dict[str, str]:
    """Versions by name, as the requirements of these tests say them."""
    text = (Path(__file__).parent / "requirements.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, flags=re.MULTILINE))
