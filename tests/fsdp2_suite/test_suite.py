"""PyTorch's tests of FSDP2 pass with this package's `fully_shard`, except listed differences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.common_utils import set_rng_seed

from tests.fsdp2_suite.case import Failure
from tests.fsdp2_suite.conftest import Source
from tests.fsdp2_suite.differences import expected, reason_of
from tests.fsdp2_suite.loader import OURS, load, substituted
from tests.ranks import RankFailure, RankPools

TIMEOUT_S = 240.0

MOST_PROCESSES = 8
"""Limit of ranks. Torch's tests whose ranks are threads have up to 128 of them."""

THREADS = "threads"


OUT_OF_STEP = re.compile(
    r"OutOfStepError: case (?P<case>\d+): (?P<words>.*)\n(?P<error>[\s\S]*?)(?=^rank \d+: |\Z)",
    re.M,
)
CUT_OFF = re.compile(r"Connection closed by peer|pair closure|[Tt]imed out|nothing failed here")
"""Errors of a rank that waited for another rank."""


def _run(file: Path, whose: str, cls: str, name: str, skipped: int) -> tuple[int, list[Failure]]:
    """Run a test of torch on this rank, without its first `skipped` cases."""
    module = load(file, whose)
    with substituted(whose):
        set_rng_seed()
        return getattr(module, cls)(name).run_here(dist.get_rank(), skipped)


def _world_size(source: Source, whose: str) -> int:
    module = load(source.file, whose)
    with substituted(whose):
        return int(getattr(module, source.cls)(source.name).world_size)


def _failures(pools: RankPools, source: Source, whose: str, world_size: int) -> list[Failure]:
    """Return the failures of all cases on all ranks.

    If a case ended on some ranks only, the waiting ranks are terminated, and new ranks run the next
    case.
    """
    found: list[Failure] = []
    skipped = 0
    while True:
        arguments = (source.file, whose, source.cls, source.name, skipped)
        try:
            results = pools(world_size).run(_run, *arguments, timeout_s=TIMEOUT_S)
        except RankFailure as failure:
            seen = list(OUT_OF_STEP.finditer(str(failure)))
            if not seen:
                raise
            causes = [own for own in seen if not CUT_OFF.search(own["error"])]
            found += [Failure(own["words"], own["error"]) for own in causes or seen]
            if int(seen[0]["case"]) <= skipped:
                return found
            skipped = int(seen[0]["case"])
            continue
        return found + [failure for _, failed in results for failure in failed]


def test_torch_test_passes_or_fails_as_listed(
    pools: RankPools, source: Source, pytestconfig: pytest.Config
) -> None:
    whose = pytestconfig.getoption("--fully-shard")
    world_size = _world_size(source, whose)
    known = expected().get(str(source), frozenset())
    if world_size > MOST_PROCESSES:
        assert known == {THREADS}
        pytest.skip(f"{world_size} ranks, which are processes here")
    failures = _failures(pools, source, whose, world_size)
    if whose != OURS:
        assert not failures, failures[0].error
        return
    met: dict[str | None, Failure] = {}
    for failure in failures:
        met.setdefault(reason_of(failure.error), failure)
    for reason, failure in met.items():
        print(f"{reason}: {failure.case}\n{failure.error}")  # noqa: T201
    new = "\n".join(f"{r}: {met[r].case}\n{met[r].error}" for r in met.keys() - known)
    assert not new, f"met are {set(met)}, of which differences.txt has {set(known)}\n{new}"
    gone = sorted(known - met.keys())
    assert not gone, f"not met any more: {gone}; take it out of differences.txt"
