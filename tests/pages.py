"""Parts of pages that tests generate: compared, or written with `--write-docs`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from tests.processes import ROOT


def table(header: str, rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown: a header of two lines, and rows of cells."""
    return "\n".join([header, *(f"| {' | '.join(cells)} |" for cells in rows)]) + "\n"


def check_part(request: pytest.FixtureRequest, page: str, part: str, text: str) -> None:
    """Compare what stands between a page's comments `<part>: begin` and `<part>: end` with a text.

    With `--write-docs` the text is written there instead.
    """
    path, begin, end = ROOT / page, f"<!-- {part}: begin -->\n", f"<!-- {part}: end -->\n"
    before, rest = path.read_text().split(begin)
    found, after = rest.split(end)
    if request.config.getoption("--write-docs"):
        path.write_text(before + begin + text + end + after)
    else:
        assert found == text, f"run pytest {request.path.relative_to(ROOT)} --write-docs"
