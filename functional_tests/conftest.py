"""Fixtures of the matrix: trainings, their measurements and checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from functional_tests.matrix import Run
from functional_tests.trainings import Table, Trainings, trainings_of
from tests.mcore.te_pools import blackwell_te, megatron_te, pools_for
from tests.pages import print_at_the_end

__all__ = ["blackwell_te", "megatron_te"]


@pytest.fixture
def trainings(request: pytest.FixtureRequest) -> Trainings:
    """Runs trainings; equal runs train once."""
    return trainings_of(lambda flags: pools_for(request, flags))


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Measurements of this test run; printed with `--tables`."""
    table = Table()
    yield table
    print_at_the_end(request.config, table.text())


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Path]:
    """Returns the folder that a run saves to; equal runs save once."""

    @functools.cache
    def folder(run: Run) -> Path:
        return tmp_path_factory.mktemp("saved")

    return folder
