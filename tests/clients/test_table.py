"""Pinned versions are installed."""

from __future__ import annotations

from importlib.metadata import version

from tests.clients.table import pinned


def test_everything_that_is_pinned_is_installed() -> None:
    assert {name: version(name) for name in pinned()} == pinned()
