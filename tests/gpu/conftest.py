"""Options and the machine fixture of the checks that need GPUs.

pytest tests/gpu --device cuda            every GPU of this machine; `make test-gpu`
pytest tests/gpu --device cpu --small     a rehearsal on a CPU
pytest tests/gpu --minutes 15             what one must know first, on a rented machine
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from tests.gpu.machine import DETERMINISTIC_ENVIRONMENT, Machine, describe, requirements

HERE = Path(__file__).parent

ORDER = (
    r"test_training.*unsharded_loop\[one rank",
    r"test_training.*unsharded_loop\[one axis",
    r"test_host",
    r"test_pauses",
    r"test_sanitizer.*(two_steps\[\w+-2-no_shard\]|a_race)",
    r"test_features",
    r"test_bandwidth",
    r"test_overlap",
    r"test_speed.*\[1B",
    r"test_capture",
    r"test_megatron",
    r"test_quantized",
)
"""Checks in the order in which one must know their results; all others follow."""

_BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the machine."""
    parser.addoption("--device", choices=("cuda", "cpu"), help="what checks run on (cuda)")
    parser.addoption("--ranks", type=int, help="ranks at most (every GPU; 2 on a CPU)")
    parser.addoption("--minutes", type=float, help="start no check after this time (no limit)")
    parser.addoption("--small", action="store_true", help="do as little as shows that it runs")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Describe the machine and its missing requirements."""
    device = config.getoption("--device") or "cuda"
    lacks = requirements()[0] if device == "cuda" else []
    return [*(f"{name}: {value}" for name, value in describe(device).items()), *lacks]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the checks in this folder as `gpu`, which `make test` deselects, and order them."""
    here = [item for item in items if HERE in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.gpu)
    ordered = iter(sorted(here, key=_place))
    items[:] = [next(ordered) if HERE in item.path.parents else item for item in items]


def _place(item: pytest.Item) -> int:
    found = (place for place, pattern in enumerate(ORDER) if re.search(pattern, item.nodeid))
    return next(found, len(ORDER))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a check that would begin after `--minutes`."""
    if HERE in item.path.parents and time.monotonic() > _ends_at(item.config):
        pytest.skip(f"not started within --minutes {item.config.getoption('--minutes'):g}")


def _ends_at(config: pytest.Config) -> float:
    minutes = config.getoption("--minutes")
    return float("inf") if minutes is None else _BEGAN + 60.0 * minutes


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write a failure when it happens: the report is complete if the run is interrupted."""
    del call
    report = yield
    terminal = item.config.pluginmanager.get_plugin("terminalreporter")
    if report.failed and HERE in item.path.parents and terminal is not None:
        terminal.write_line("")
        terminal.write_line(report.longreprtext)
        terminal.flush()
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Show the measurements of a check next to its result."""
    if report.when != "call" or not report.passed or not report.user_properties:
        return None
    found = ", ".join(f"{name}: {value}" for name, value in report.user_properties)
    return "passed", ".", f"PASSED ({found})"


@pytest.fixture(scope="session")
def machine(pytestconfig: pytest.Config) -> Machine:
    """The machine; without a usable GPU, skip, or exit if `--device cuda` is given."""
    asked, ranks = pytestconfig.getoption("--device"), pytestconfig.getoption("--ranks")
    device = asked or "cuda"
    if device == "cuda":
        lacks, can_run = requirements()
        present = torch.cuda.device_count()
        if not (can_run and present):
            if asked:
                pytest.exit("; ".join(lacks) or "there is no GPU", returncode=2)
            pytest.skip("needs a GPU")
        ranks = ranks or present
        if ranks > present:
            pytest.exit(f"{ranks} ranks need as many GPUs, and there are {present}", returncode=2)
        for name, value in DETERMINISTIC_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    is_small = pytestconfig.getoption("--small")
    return Machine(device, ranks or 2, is_small, _ends_at(pytestconfig))
