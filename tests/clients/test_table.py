"""Claims are unique, and pinned versions are installed."""

from __future__ import annotations

from importlib.metadata import version

from tests.clients.table import Claim, pinned


def test_claims_are_unique(claims: dict[str, Claim]) -> None:
    assert len(set(claims.values())) == len(claims)


def test_everything_that_is_pinned_is_installed() -> None:
    assert {name: version(name) for name in pinned()} == pinned()
