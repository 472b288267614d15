"""Rank pools of the tests with libraries that need the newest torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPools, rank_pools


# A pool for each test: FSDP2 of torch 2.15 rejects annotated parameters on a mesh that equals an
# earlier one of the process.
@pytest.fixture
def clients() -> Iterator[RankPools]:
    """Yield rank pools by world size, forked from a process that has imported the libraries."""
    with rank_pools(("tests.clients.newest.preloaded",)) as pools:
        yield pools
