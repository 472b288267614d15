"""Samples of the longer tests with `--one-in`, and the sample for the newest torch."""

from __future__ import annotations

import pytest

from tests.processes import ROOT, ran

pytest_plugins = ["pytester"]


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """A suite of one quick test, fifty longer and three slow ones, with this project's options."""
    pytester.makeini("[pytest]\nmarkers =\n    functional: longer\n    slow: seconds\n")
    pytester.makeconftest(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        + (ROOT / "conftest.py").read_text().replace("from __future__ import annotations\n", "")
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

        @pytest.mark.slow
        @pytest.mark.parametrize("number", range(3))
        def test_slow(number):
            pass
        """
    )
    return pytester


def test_quick_tests_run_in_every_sample_and_slow_ones_in_most(suite: pytest.Pytester) -> None:
    result = suite.runpytest("--one-in", "5", "--chosen-by", "a")
    outcomes = result.parseoutcomes()
    assert 4 + 3 <= outcomes["passed"] <= 4 + 20
    assert outcomes["passed"] + outcomes["deselected"] == 54
    result.stdout.fnmatch_lines(["longer tests: one of 5, selected by a"])
    assert suite.runpytest().parseoutcomes() == {"passed": 54}
    assert "passed" not in suite.runpytest("--one-in", "100000", "-m", "slow").parseoutcomes()


def test_a_sample_can_leave_out_quick_tests_too(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_many="import pytest\n@pytest.mark.parametrize('n', range(50))\ndef test_quick(n): pass"
    )
    result = suite.runpytest("--quick-one-in", "5", "--chosen-by", "a")
    outcomes = result.parseoutcomes()
    assert 53 + 3 <= outcomes["passed"] <= 53 + 20
    result.stdout.fnmatch_lines(["longer tests: one of 1, other tests: one of 5, selected by a"])


def test_sample_for_another_torch_names_existing_files() -> None:
    done = ran("make", "-n", "sample")
    assert done.returncode == 0, done.stderr
    named = [word.split("::")[0] for word in done.stdout.split() if word.startswith("tests/")]
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
