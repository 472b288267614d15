"""Trainings of the matrix, and what came out of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from functional_tests.table import Table
from functional_tests.trainings import Trainings, trainings_of
from tests.mcore.te_pools import blackwell_te, megatron_te
from tests.pages import print_at_the_end
from tests.ranks import RankPools

__all__ = ["blackwell_te", "megatron_te"]


@pytest.fixture(scope="session")
def trainings(megatron: RankPools, request: pytest.FixtureRequest) -> Trainings:
    """Runs by what they are asked to do; equal runs are made once."""
    return trainings_of(megatron, lambda: request.getfixturevalue("megatron_te"))


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """What this run measures; printed with `--tables`."""
    table = Table()
    yield table
    print_at_the_end(request.config, table.text())
