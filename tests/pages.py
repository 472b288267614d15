"""Tables of test results, printed with `--tables` or stored in a page of docs/."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

import pytest

from tests.processes import ROOT
from tools.page_parts import with_part

MEASURED = pytest.StashKey[list[str]]()
"""Texts to print at the end of the tests."""


def print_at_the_end(config: pytest.Config, text: str) -> None:
    """Print a text at the end of the tests, if `--tables` is given."""
    if config.getoption("--tables"):
        config.stash.setdefault(MEASURED, []).append(text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: Sequence[str] = ()) -> str:
    """Return a table in Markdown; `--:` aligns a column to the right."""
    lines = [head, align or ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def section(page: str, title: str) -> str:
    """Return the text of a page below a heading, up to the next one of the same level."""
    return (ROOT / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows_of(text: str) -> list[tuple[str, ...]]:
    """Return the cells of all lines of tables in a text."""
    return [cells_of(line) for line in text.splitlines() if line.startswith("| ")]


def cells_of(line: str) -> tuple[str, ...]:
    """Return the cells of a line of a table."""
    return tuple(cell.strip() for cell in line.strip("|").split(" | "))


def wrapped(text: str, width: int = 100) -> list[str]:
    """Return the lines of a paragraph."""
    return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def page(title: str, about: str, *parts: str) -> str:
    """Return a page: title, introduction, and parts separated by blank lines."""
    return "\n\n".join([f"# {title}", "\n".join(wrapped(about, 90)), *parts]) + "\n"


def check_page(request: pytest.FixtureRequest, page: str, text: str) -> None:
    """Compare a page with a text; with `--write-docs` the text is written to the page first."""
    if request.config.getoption("--write-docs"):
        (ROOT / page).write_text(text)
    suite = request.path.relative_to(ROOT)
    assert (ROOT / page).read_text() == text, f"run pytest {suite} --write-docs"


def check_part(request: pytest.FixtureRequest, page: str, part: str, text: str) -> None:
    """Like `check_page`, for the part of a page between `<part>: begin` and `<part>: end`."""
    check_page(request, page, with_part((ROOT / page).read_text(), part, f"{text}\n"))
