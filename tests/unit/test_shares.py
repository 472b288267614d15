"""Shares of the longer tests: each test has its turn, and a commit always chooses the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.shares import commit_of, is_chosen

NAMES = [f"tests/test_it.py::test_it[{number}]" for number in range(400)]

pytest_plugins = ["pytester"]


def test_a_share_is_about_as_large_as_asked_for_and_always_the_same() -> None:
    chosen = [name for name in NAMES if is_chosen(name, 8, "commit")]
    assert 25 <= len(chosen) <= 75
    assert chosen == [name for name in NAMES if is_chosen(name, 8, "commit")]
    assert all(is_chosen(name, 1, "commit") for name in NAMES)


def test_every_test_has_its_turn() -> None:
    left = set(NAMES)
    for number in range(100):
        left -= {name for name in left if is_chosen(name, 8, f"commit {number}")}
    assert not left


def test_a_folder_without_history_has_no_commit(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """A suite of one quick test and fifty longer ones, with this project's options."""
    root = Path(__file__).parents[2]
    pytester.makeini("[pytest]\nmarkers =\n    functional: longer\n")
    pytester.makeconftest(
        f"import sys\nsys.path.insert(0, {str(root)!r})\n"
        + (root / "conftest.py").read_text().replace("from __future__ import annotations\n", "")
    )
    pytester.makepyfile(
        """
        import pytest

        def test_quick():
            pass

        @pytest.mark.functional
        @pytest.mark.parametrize("number", range(50))
        def test_longer(number):
            pass
        """
    )
    return pytester


def test_quick_tests_run_whatever_the_share(suite: pytest.Pytester) -> None:
    result = suite.runpytest("--one-in", "5", "--chosen-by", "a")
    outcomes = result.parseoutcomes()
    assert 1 + 3 <= outcomes["passed"] <= 1 + 20
    assert outcomes["passed"] + outcomes["deselected"] == 51
    result.stdout.fnmatch_lines(["longer tests: one in 5, chosen by a"])
    assert suite.runpytest().parseoutcomes() == {"passed": 51}


def test_a_share_of_less_than_one_is_an_error(suite: pytest.Pytester) -> None:
    result = suite.runpytest("--one-in", "0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--one-in must be at least 1, got 0*"])


def test_what_tests_leave_in_temporary_folders_goes_with_the_session(
    pytester: pytest.Pytester, suite: pytest.Pytester
) -> None:
    pytester.makepyfile(
        """
        import subprocess, sys, tempfile

        def test_it(tmp_path):
            names = [tempfile.mkdtemp()]
            code = "import tempfile; print(tempfile.mkdtemp())"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            names.append(done.stdout.strip())
            with open("left.txt", "w") as left:
                left.write("\\n".join([*names, str(tmp_path)]))
        """
    )
    suite.runpytest().assert_outcomes(passed=1)
    *gone, kept = (pytester.path / "left.txt").read_text().splitlines()
    assert [Path(name).exists() for name in gone] == [False, False]
    assert Path(kept).exists()


def test_the_sample_for_another_torch_names_files_that_are_there() -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run(
        ["make", "-n", "sample"], cwd=root, capture_output=True, text=True, check=True
    )
    named = [word for word in run.stdout.split() if word.startswith("tests/")]
    assert len(named) > 10
    assert [name for name in named if not (root / name).exists()] == []
