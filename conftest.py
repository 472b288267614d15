"""Fixtures of both suites: rank pools, and whether generated documentation is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPools, rank_pools


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that has generated documentation written."""
    parser.addoption(
        "--write-docs", action="store_true", help="write the tables that tests generate to docs/"
    )


@pytest.fixture(scope="session")
def pools() -> Iterator[RankPools]:
    """Process groups by world size: `pools(2).run(function, ...)`."""
    with rank_pools() as pools:
        yield pools


@pytest.fixture(scope="session")
def megatron() -> Iterator[RankPools]:
    """Process groups for Megatron, apart: a rehearsal changes torch in its processes for good."""
    with rank_pools() as pools:
        yield pools
