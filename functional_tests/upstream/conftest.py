"""Megatron-LM's configurations, and what is known of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from functional_tests.upstream.configurations import other_programs, read
from functional_tests.upstream.page import Page
from functional_tests.upstream.shrink import shrunk
from functional_tests.upstream.validation import rejections

PAGE = Path("docs") / "upstream_configurations.md"


MOST_CHARACTERS = 240


@pytest.fixture(scope="session")
def reasons() -> dict[str, str]:
    """Why configurations are rejected by the code as it is, by name."""
    configurations = shrunk(read())
    found = zip(configurations, rejections(configurations), strict=True)
    return {each.name: _as_cell(reason) for each, reason in found if reason}


def _as_cell(reason: str) -> str:
    """A sentence as a cell of a table, cut where it lists more than a reader needs."""
    words = " ".join(reason.replace("|", "/").split())
    return words if len(words) <= MOST_CHARACTERS else f"{words[:MOST_CHARACTERS].rstrip()} ..."


@pytest.fixture(scope="session")
def page(request: pytest.FixtureRequest) -> Page:
    """The committed page; with `--write-docs` it takes in what this session measures."""
    configurations = read()
    page = Page(configurations, shrunk(configurations), other_programs())
    path = Path(request.config.rootpath) / PAGE
    page.read(path)
    if request.config.getoption("--write-docs"):
        page.path = path
        page.rejections = request.getfixturevalue("reasons")
        page.write()
    return page
