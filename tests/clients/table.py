"""The table of results with other libraries, and the pinned versions of these libraries."""

from __future__ import annotations

import re
from pathlib import Path

from tests.pages import page, table

_ABOUT = (
    "A line for every test: its name with the model and the options, what is compared, and the "
    "largest relative difference (norm of the difference over norm; a tensor that is small by "
    "cancellation is measured against a third of the norm of all of them). It is at most 1e-06 in "
    "fp32, and zero where the same bits have to come out."
)
_HEAD = ("library", "version", "torch", "test", "compared", "largest difference")


def text(rows: list[tuple[str, ...]]) -> str:
    """Return the table as a page in Markdown."""
    return page("Other libraries", _ABOUT, table(_HEAD, sorted(rows)))


def pinned(folder: Path = Path(__file__).parent) -> dict[str, str]:
    """Return the pinned versions in a folder's `requirements.txt` by package name."""
    text = (folder / "requirements.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, flags=re.MULTILINE))
