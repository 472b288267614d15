"""What both suites share: rank pools, shares of longer tests, generated documentation."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.ranks import RankPools, rank_pools
from tests.shares import commit_of, is_chosen

# On a busy machine any example may take long.
settings.register_profile("any time", deadline=None)
settings.load_profile("any time")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that has generated documentation written."""
    parser.addoption(
        "--write-docs", action="store_true", help="write the tables that tests generate to docs/"
    )
    parser.addoption(
        "--one-in", type=int, default=1, help="run one in so many of the tests marked functional"
    )
    parser.addoption(
        "--chosen-by", default=None, help="what chooses them, any text (default: the commit)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check the options, and find out what chooses."""
    if config.getoption("--one-in") < 1:
        raise pytest.UsageError(f"--one-in must be at least 1, got {config.getoption('--one-in')}")
    if config.getoption("--chosen-by") is None:
        config.option.chosen_by = commit_of(config.rootpath)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say which share runs, so that it can be repeated."""
    one_in = config.getoption("--one-in")
    if one_in == 1:
        return None
    return f"longer tests: one in {one_in}, chosen by {config.getoption('--chosen-by')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not part of the share."""
    one_in, chosen_by = config.getoption("--one-in"), config.getoption("--chosen-by")
    left_out = [
        item
        for item in items
        if item.get_closest_marker("functional") and not is_chosen(item.nodeid, one_in, chosen_by)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish() -> None:
    """Have no collection of garbage look at all that was imported, here and in forked processes."""
    gc.freeze()


@pytest.fixture(scope="session")
def pools() -> Iterator[RankPools]:
    """Process groups by world size: `pools(2).run(function, ...)`."""
    with rank_pools() as pools:
        yield pools


@pytest.fixture(scope="session")
def megatron() -> Iterator[RankPools]:
    """Process groups for Megatron, apart: a rehearsal changes torch in its processes for good."""
    with rank_pools(["tests.mcore.preloaded_local"]) as pools:
        yield pools
