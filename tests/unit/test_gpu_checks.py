"""The checks that need GPUs are rehearsed on a CPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import machine
from tests.processes import ROOT, ran

FILES = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))


def _rehearsed(*words: str | Path) -> str:
    """What pytest writes of checks on a CPU, none of which fails."""
    command = ("-m", "pytest", "-v", "--device", "cpu", "--ranks", "2", "--small")
    done = ran(sys.executable, *command, *words)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_a_check_on_a_cpu_describes_the_machine_and_one_of_a_gpu_is_skipped() -> None:
    name = "sharded_parameters_is_muon or sanitizer_reports_a_race"
    written = _rehearsed("tests/gpu/test_training.py", "tests/gpu/test_sanitizer.py", "-k", name)
    assert "1 passed, 1 skipped" in written
    assert "needs a GPU" in written
    assert f"torch: {torch.__version__.partition('+')[0]}" in written
    assert re.search(r"^commit: \w{40}", written, re.MULTILINE)


@pytest.mark.functional
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_check_is_rehearsed_on_a_cpu(file: Path) -> None:
    assert re.search(r"\d+ (passed|skipped)", _rehearsed(file))


@pytest.mark.parametrize(
    ("driver", "can_run"), [("580.65.06", True), ("470.1", False), ("", False)]
)
def test_an_old_driver_and_a_missing_package_are_said(
    monkeypatch: pytest.MonkeyPatch, driver: str, can_run: bool
) -> None:
    monkeypatch.setattr(machine, "_output", lambda *words: driver)
    monkeypatch.setattr(machine, "has_transformer_engine", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    said, can = machine.requirements()
    assert can is can_run
    assert any("driver 580 or newer" in sentence for sentence in said) is not can_run
    assert f"transformer-engine[pytorch]=={machine.TRANSFORMER_ENGINE}" in said[-1]


def test_the_page_says_what_every_file_of_checks_proves() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert [file.name for file in FILES if f"| `{file.name}` |" not in page] == []
