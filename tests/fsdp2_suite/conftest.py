"""Collection of torch's tests from a checkout of PyTorch (`--pytorch`)."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path("test") / "distributed" / "_composable" / "fsdp"

LEFT_OUT = {"test_fully_shard_logging.py"}
"""Tests of FSDP2's log, in a separate process that imports FSDP2."""


@dataclass(frozen=True)
class Source:
    """A test of torch.

    Attributes:
        file: Path of the file.
        cls: Name of the class.
        name: Name of the method.
    """

    file: Path
    cls: str
    name: str

    def __str__(self) -> str:
        return f"{self.file.name}::{self.cls}::{self.name}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for the checkout and for the `fully_shard` under test."""
    parser.addoption("--pytorch", type=Path, required=True, help="a checkout of PyTorch")
    parser.addoption("--fully-shard", choices=("ours", "torch"), default="ours")


def sources(checkout: Path) -> list[Source]:
    """Return the tests of a checkout, without the files that are left out."""
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
    """Generate one test per test of torch."""
    if "source" in metafunc.fixturenames:
        found = sources(metafunc.config.getoption("--pytorch"))
        assert found, f"--pytorch has no {FOLDER}"
        metafunc.parametrize("source", found, ids=str)
