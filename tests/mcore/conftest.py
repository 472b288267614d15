"""Rank pools of their own: a rehearsal changes torch in its processes for good."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPools, rank_pools


@pytest.fixture(scope="session")
def megatron() -> Iterator[RankPools]:
    """Process groups for Megatron: `megatron(2).run(train, flags)`."""
    with rank_pools() as pools:
        yield pools
