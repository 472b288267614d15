"""Trainings of the matrix, and what came out of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from functional_tests.table import Table
from functional_tests.trainings import Trainings, trainings_of
from tests.mcore.te_pools import blackwell_te, megatron_te
from tests.ranks import RankPools

__all__ = ["blackwell_te", "megatron_te"]

PAGE = Path("docs") / "functional_matrix.md"


@pytest.fixture(scope="session")
def trainings(megatron: RankPools, request: pytest.FixtureRequest) -> Trainings:
    """Runs by what they are asked to do; equal runs are made once."""
    return trainings_of(megatron, lambda: request.getfixturevalue("megatron_te"))


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Table:
    """The committed table; with `--write-docs` it takes in what this session measures."""
    page = Path(request.config.rootpath) / PAGE
    table = Table.read(page)
    if request.config.getoption("--write-docs"):
        table.page = page
    return table
