"""Known results of Megatron-LM's configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from functional_tests.upstream.configurations import read
from functional_tests.upstream.sides import shrunk
from functional_tests.upstream.validation import rejections

REJECTIONS = Path(__file__).with_name("rejections.txt")
MOST_CHARACTERS = 240


@pytest.fixture(scope="session")
def reasons() -> dict[str, str]:
    """Reasons why configurations are rejected, by name."""
    configurations = shrunk(read())
    found = zip(configurations, rejections(configurations), strict=True)
    return {each.name: _as_cell(reason) for each, reason in found if reason}


def _as_cell(reason: str) -> str:
    """Format a sentence as a cell of a table, with a limited length."""
    words = " ".join(reason.replace("|", "/").split())
    return words if len(words) <= MOST_CHARACTERS else f"{words[:MOST_CHARACTERS].rstrip()} ..."


def known_rejections() -> dict[str, str]:
    """Return the recorded reasons why configurations are rejected, by name."""
    lines = REJECTIONS.read_text().splitlines()
    pairs = (line.split("\t") for line in lines if not line.startswith("#"))
    return {name: reason for name, reason in pairs}


def known_own_precision() -> set[str]:
    """Return the names of configurations that are compared in their own precision."""
    lines = REJECTIONS.with_name("own_precision.txt").read_text().splitlines()
    return {line for line in lines if not line.startswith("#")}
