"""`make test-all`: every suite once, continued after an interruption."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, ran
from tools.test_all import current_commit, main

RESULTS = "out/test_all/results.jsonl"
SUITE = """
import os
import pathlib

def ran(name):
    with open("ran", "a") as file:
        file.write(name + " ")

def test_first():
    ran("first")

def test_ends_the_process():
    ran("ends")
    if not pathlib.Path("mended").exists():
        os._exit(3)

def test_fails():
    ran("fails")
    assert pathlib.Path("mended").exists()

def test_last():
    ran("last")
"""


@pytest.fixture
def suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments for a suite and a program, in a repository that is the working folder."""
    (tmp_path / "test_some.py").write_text(SUITE)
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    python = f"{sys.executable} -B"
    suite = f"some: {python} -m pytest -p no:cacheprovider test_some.py"
    program = f"program: {python} -c \"print('ran', file=open('ran', 'a'), end=' ')\""
    return ["--suite", suite, "--program", program]


def _ran() -> list[str]:
    names = Path("ran").read_text().split()
    Path("ran").unlink()
    return names


def test_failures_are_listed_and_only_they_run_again_on_the_same_commit(
    suites: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(suites) == 1
    assert _ran() == ["first", "ends", "fails", "last", "ran"]
    said = capsys.readouterr().out
    assert "failed: some: test_some.py::test_ends_the_process" in said
    assert "failed: some: test_some.py::test_fails" in said
    assert "3 passed, 2 failed, 0 left" in said
    Path("mended").touch()
    assert main(suites) == 0
    assert _ran() == ["ends", "fails"]
    assert "5 passed, 0 failed, 0 left" in capsys.readouterr().out
    commit = current_commit()
    Path("test_some.py").write_text("")
    assert current_commit() not in (commit, "")


@pytest.mark.slow
def test_a_run_stops_when_its_time_is_over_and_the_next_one_continues(suites: list[str]) -> None:
    Path("mended").touch()
    assert main([*suites, "--minutes", "1e-9"]) == 2
    assert not Path("ran").exists()
    # As main calls pytest; the time is over when the first test ends.
    options = {"results": RESULTS, "commit": current_commit(), "suite": "some", "until": 1}
    words = [f"--all-{name}={value}" for name, value in options.items()]
    command = suites[1].removeprefix("some: ").split()
    done = ran(*command, "-p", "tools.test_all", *words, cwd=Path.cwd())
    assert done.returncode == 2, done.stdout
    assert _ran() == ["first"]
    assert main(suites) == 0
    assert _ran() == ["ends", "fails", "last", "ran"]
