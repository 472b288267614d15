"""Random combinations of Megatron's flags train as DDP does, or are rejected by name."""

from __future__ import annotations

import pytest

from tests.mcore.flags import PP2, TP2
from tests.mcore.random_flags import combination, outcome
from tests.ranks import RankPools

SEEDS = (*range(10), 12, 33, 34)


def test_the_sample_has_every_kind() -> None:
    sample = [combination(seed) for seed in SEEDS]
    kinds = {"train", "evaluate", "resume", "override", "from file"}
    changed = {"strategy", "world_size", "parallel"}
    assert set().union(*(case.kinds for case in sample)) == kinds | changed
    for flag, parallel in (("--mtp-detach-heads", PP2), ("--softmax-type", TP2)):
        assert any(flag in case.flags and case.first.parallel == parallel for case in sample)


@pytest.mark.functional
@pytest.mark.parametrize("seed", SEEDS)
def test_a_combination_trains_as_ddp_or_is_rejected_by_name(megatron: RankPools, seed: int) -> None:
    outcome(megatron, combination(seed))
