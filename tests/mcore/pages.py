"""Pages of the documentation that tests generate: their tables, and whether they are up to date."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of a table."""
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def cells_of(line: str) -> tuple[str, ...]:
    """Cells of a line of a table."""
    return tuple(cell.strip() for cell in line.strip("|").split(" | "))


def wrapped(text: str, width: int = 100) -> list[str]:
    """Lines of a paragraph."""
    return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def check_page(config: pytest.Config, page: Path, text: str, suite: str) -> None:
    """Check that a page is what the tests generate; with `--write-docs` it is written first."""
    path = config.rootpath / page
    if config.getoption("--write-docs"):
        path.write_text(text)
    assert path.read_text() == text, f"{page} is out of date; run pytest {suite} --write-docs"
