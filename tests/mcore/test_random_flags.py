"""Random combinations of Megatron's flags train as DDP does, or are rejected by name."""

from __future__ import annotations

import pytest

from tests.mcore.random_flags import combination, outcome
from tests.ranks import RankPools

SEEDS = range(12)


@pytest.mark.functional
@pytest.mark.parametrize("seed", SEEDS)
def test_a_combination_trains_as_ddp_or_is_rejected_by_name(megatron: RankPools, seed: int) -> None:
    outcome(megatron, combination(seed))
