"""Which of torch's tests there are: `--pytorch` is a checkout of PyTorch."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path("test") / "distributed" / "_composable" / "fsdp"

LEFT_OUT = {"test_fully_shard_logging.py"}
"""What FSDP2 logs, in a process of its own that imports FSDP2."""


@dataclass(frozen=True)
class Source:
    """A test of torch's.

    Attributes:
        file: Where it is.
        cls: Its class.
        name: Of the method.
    """

    file: Path
    cls: str
    name: str

    def __str__(self) -> str:
        return f"{self.file.name}::{self.cls}::{self.name}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """A checkout to take tests from, and whose `fully_shard` they run with."""
    parser.addoption("--pytorch", type=Path, required=True, help="a checkout of PyTorch")
    parser.addoption("--fully-shard", choices=("ours", "torch"), default="ours")


def sources(checkout: Path) -> list[Source]:
    """The tests of a checkout, without those that are left out as a whole."""
    found = []
    for file in sorted((checkout / FOLDER).glob("test_fully_shard_*.py")):
        if file.name in LEFT_OUT:
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names = [f.name for f in node.body if isinstance(f, ast.FunctionDef)]
                found += [Source(file, node.name, n) for n in names if n.startswith("test_")]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each of torch's."""
    if "source" in metafunc.fixturenames:
        found = sources(metafunc.config.getoption("--pytorch"))
        assert found, f"--pytorch has no {FOLDER}"
        metafunc.parametrize("source", found, ids=str)
