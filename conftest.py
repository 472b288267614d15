"""Shared fixtures of both suites: rank pools, samples of longer tests, options, temporary files."""

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

# On a busy machine, any example may take long.
settings.register_profile("any time", deadline=None)
settings.load_profile("any time")


SLOW_SHARE = 30
"""A sample has tests marked `slow` this much more often than those marked `functional`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for tables and for samples of the longer tests."""
    parser.addoption(
        "--write-docs", action="store_true", help="write the tables that tests generate to docs/"
    )
    parser.addoption(
        "--tables", action="store_true", help="print the tables of measured values at the end"
    )
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        help="run one of every N tests that are marked functional, and more of those marked slow",
    )
    parser.addoption(
        "--quick-one-in", type=int, default=1, help="run one of every N of the other tests"
    )
    parser.addoption(
        "--chosen-by", default=None, help="text that selects these tests (default: the commit)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check the options, set the default selection, and remove temporary files at the end."""
    _collect_litter(config)
    for option in ("--one-in", "--quick-one-in"):
        if config.getoption(option) < 1:
            raise pytest.UsageError(f"{option} must be at least 1, got {config.getoption(option)}")
    if config.getoption("--chosen-by") is None:
        config.option.chosen_by = commit_of(config.rootpath)


def _collect_litter(config: pytest.Config) -> None:
    """Redirect temporary files to one folder, which is removed at the end."""
    # Create the folder of multiprocessing first, outside: its removal at exit fails if it is gone.
    util.get_temp_dir()
    patch = pytest.MonkeyPatch()
    # Folder in which pytest keeps the `tmp_path` folders of recent runs.
    patch.setenv("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.add_cleanup(patch.undo)
    patch.setenv("TMPDIR", folder)
    patch.setattr(tempfile, "tempdir", folder)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Print the selection of the sample, so that it can be repeated."""
    one_in, quick_one_in = config.getoption("--one-in"), config.getoption("--quick-one-in")
    if one_in == quick_one_in == 1:
        return None
    quick = f", other tests: one of {quick_one_in}" if quick_one_in > 1 else ""
    return f"longer tests: one of {one_in}{quick}, selected by {config.getoption('--chosen-by')}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the tables of measured values."""
    for text in config.stash.get(MEASURED, []):
        terminalreporter.write_line(f"\n{text}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are not part of the sample."""
    longer, quick = config.getoption("--one-in"), config.getoption("--quick-one-in")
    chosen_by = config.getoption("--chosen-by")

    def one_in(item: pytest.Item) -> int:
        if item.get_closest_marker("functional"):
            return longer
        return max(1, longer // SLOW_SHARE) if item.get_closest_marker("slow") else quick

    left_out = [item for item in items if not is_chosen(item.nodeid, one_in(item), chosen_by)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, here and in forked processes."""
    gc.freeze()


@pytest.fixture(scope="session")
def pools() -> Iterator[RankPools]:
    """Process groups by world size: `pools(2).run(function, ...)`."""
    with rank_pools() as pools:
        yield pools


@pytest.fixture(scope="session")
def megatron() -> Iterator[RankPools]:
    """Separate process groups for Megatron, since a rehearsal changes torch in its processes."""
    with rank_pools(["tests.mcore.preloaded_local"]) as pools:
        yield pools
