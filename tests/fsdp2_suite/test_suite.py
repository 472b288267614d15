"""PyTorch's tests of FSDP2 pass with ours, but for the differences that are listed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.common_utils import set_rng_seed

from tests.fsdp2_suite.case import Failure
from tests.fsdp2_suite.conftest import Source
from tests.fsdp2_suite.differences import expected, reason_of
from tests.fsdp2_suite.loader import OURS, load, substituted
from tests.ranks import RankPools

TIMEOUT_S = 120.0

MOST_PROCESSES = 8
"""Torch's tests with threads for ranks have up to 128 of them."""


def _run(file: Path, whose: str, cls: str, name: str) -> tuple[int, list[Failure]]:
    """Run a test of torch's on this rank."""
    module = load(file, whose)
    with substituted(whose):
        set_rng_seed()
        return getattr(module, cls)(name).run_here(dist.get_rank())


def _world_size(source: Source, whose: str) -> int:
    module = load(source.file, whose)
    with substituted(whose):
        return int(getattr(module, source.cls)(source.name).world_size)


def test_it_passes(pools: RankPools, source: Source, pytestconfig: pytest.Config) -> None:
    whose = pytestconfig.getoption("--fully-shard")
    world_size = _world_size(source, whose)
    if world_size > MOST_PROCESSES:
        pytest.skip(f"{world_size} ranks, which are processes here")
    pool = pools(world_size)
    results = pool.run(_run, source.file, whose, source.cls, source.name, timeout_s=TIMEOUT_S)
    failures = [failure for _, failed in results for failure in failed]
    if whose != OURS:
        assert not failures, failures[0].error
        return
    known = expected().get(str(source), frozenset())
    met = set()
    for failure in failures:
        reason = reason_of(failure.error)
        assert reason in known, f"{failure.case}\n{failure.error}"
        met.add(reason)
    assert met == known, f"not met any more: {sorted(known - met)}; take it out of differences.txt"
