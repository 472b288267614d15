"""Pages of the docs that tests write."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence


def table(corner: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table: what stands above the names of rows, names of columns, and cells by row."""
    lines = [f"| {corner}".rstrip() + f" | {' | '.join(columns)} |"]
    lines.append("|" + "---|" * (len(columns) + 1))
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines)


def page(title: str, about: str, *parts: str) -> str:
    """A page: a title, what it shows, and parts with a blank line between."""
    return "\n\n".join([f"# {title}", textwrap.fill(about, 90), *parts]) + "\n"
