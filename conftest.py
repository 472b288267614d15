"""What both suites share: rank pools, shares of longer tests, documentation, a folder to litter."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing import util

import pytest
from hypothesis import settings

from tests.pages import MEASURED
from tests.ranks import RankPools, rank_pools
from tests.shares import commit_of, is_chosen

# On a busy machine any example may take long.
settings.register_profile("any time", deadline=None)
settings.load_profile("any time")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of tables and of shares of the longer tests."""
    parser.addoption(
        "--write-docs", action="store_true", help="write the tables that tests generate to docs/"
    )
    parser.addoption(
        "--tables", action="store_true", help="print the tables of what tests measured, at the end"
    )
    parser.addoption(
        "--one-in", type=int, default=1, help="run one in so many of the tests marked functional"
    )
    parser.addoption(
        "--chosen-by", default=None, help="what chooses them, any text (default: the commit)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check the options, find out what chooses, and have temporary files go with the session."""
    _collect_litter(config)
    if config.getoption("--one-in") < 1:
        raise pytest.UsageError(f"--one-in must be at least 1, got {config.getoption('--one-in')}")
    if config.getoption("--chosen-by") is None:
        config.option.chosen_by = commit_of(config.rootpath)


def _collect_litter(config: pytest.Config) -> None:
    """Have what libraries and ended processes leave behind in one folder, and remove that."""
    # Made where it stays until this process removes it, which fails where it is gone by then.
    util.get_temp_dir()
    patch = pytest.MonkeyPatch()
    # Where pytest keeps what `tmp_path` gave to the last tests.
    patch.setenv("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.add_cleanup(patch.undo)
    patch.setenv("TMPDIR", folder)
    patch.setattr(tempfile, "tempdir", folder)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say which share runs, so that it can be repeated."""
    one_in = config.getoption("--one-in")
    if one_in == 1:
        return None
    return f"longer tests: one in {one_in}, chosen by {config.getoption('--chosen-by')}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the tables of what tests measured."""
    for text in config.stash.get(MEASURED, []):
        terminalreporter.write_line(f"\n{text}")


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
