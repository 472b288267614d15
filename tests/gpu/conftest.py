"""Options and the machine fixture of the checks that need GPUs.

pytest tests/gpu --device cuda            every GPU of this machine; `make test-gpu`
pytest tests/gpu --device cpu --small     a rehearsal on a CPU
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.gpu.machine import DETERMINISTIC_ENVIRONMENT, Machine, describe, requirements

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the machine."""
    parser.addoption("--device", choices=("cuda", "cpu"), help="what checks run on (cuda)")
    parser.addoption("--ranks", type=int, help="ranks at most (every GPU; 2 on a CPU)")
    parser.addoption("--small", action="store_true", help="do as little as shows that it runs")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Describe the machine and its missing requirements."""
    device = config.getoption("--device") or "cuda"
    lacks = requirements()[0] if device == "cuda" else []
    return [*(f"{name}: {value}" for name, value in describe(device).items()), *lacks]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the checks in this folder as `gpu`; `make test` deselects them."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


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
    return Machine(device, ranks or 2, pytestconfig.getoption("--small"))
