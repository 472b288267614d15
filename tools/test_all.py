"""Run every suite once, with the time left; an interrupted run is continued.

    python -m tools.test_all --minutes 30 --suite 'tests: python -m pytest -m "not gpu"'

A test that has passed on this commit is not run again. The results of all runs are lines of
`out/test_all/results.jsonl`; their durations are the estimates of later runs. This module is also
the plugin of pytest that writes them.

Exit codes: 0 if everything has passed, 1 if a test failed, 2 if the time was over before the end.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import pytest

__all__ = ["current_commit", "estimate", "main"]

SAY_EVERY_S = 30.0
STARTED, PASSED, FAILED = "started", "passed", "failed"
INTERRUPTED = 2
"""Exit code of pytest after Ctrl-C."""


# -- results ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the file.

    Attributes:
        commit: What was tested.
        run: The call of this program.
        suite: Name of the suite.
        test: Name of the test.
        outcome: `started`, `passed` (also if the test skipped itself) or `failed`.
        seconds: Its duration.
    """

    commit: str
    run: str
    suite: str
    test: str
    outcome: str
    seconds: float = 0.0


class Results:
    """Results of all runs.

    Args:
        file: Where they are kept.
        commit: What is tested now.
        run: The call of this program.
    """

    def __init__(self, file: Path, commit: str, run: str) -> None:
        self.file, self.commit, self.run = file, commit, run
        self._every: list[Result] = []
        self._num_read = 0

    def add(self, suite: str, test: str, outcome: str, seconds: float = 0.0) -> None:
        """Append a result to the file."""
        result = Result(self.commit, self.run, suite, test, outcome, round(seconds, 3))
        with self.file.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def every(self) -> list[Result]:
        """Return what is in the file, in its order."""
        if self.file.exists():
            with self.file.open() as file:
                file.seek(self._num_read)
                # A line that was being written when the machine stopped is not complete.
                while (line := file.readline()).endswith("\n"):
                    self._num_read = file.tell()
                    self._every.append(Result(**json.loads(line)))
        return self._every

    def outcomes(self, suite: str) -> dict[str, str]:
        """Return the last outcomes of a suite's tests on this commit, by name."""
        mine = (r for r in self.every() if (r.commit, r.suite) == (self.commit, suite))
        return {r.test: r.outcome for r in mine}

    def is_done(self, suite: str) -> set[str]:
        """Return the tests of a suite that passed on this commit, or ended in this run."""
        mine = (r for r in self.every() if (r.commit, r.suite) == (self.commit, suite))
        return {
            r.test for r in mine if r.outcome == PASSED or (r.outcome, r.run) == (FAILED, self.run)
        }

    def durations(self, suite: str) -> dict[str, float]:
        """Return the last durations of a suite's tests on any commit."""
        ended = (r for r in self.every() if r.suite == suite and r.outcome != STARTED)
        return {r.test: r.seconds for r in ended}


def estimate(tests: Iterable[str], known: Mapping[str, float]) -> float:
    """Estimate the duration of tests.

    Args:
        tests: Their names.
        known: Durations of these or other tests. A test without one takes the mean of its file, or
            of all.
    """
    of_file: dict[str, list[float]] = defaultdict(list)
    for test, seconds in known.items():
        of_file[_file_of(test)].append(seconds)
    means = {file: statistics.fmean(seconds) for file, seconds in of_file.items()}
    usual = statistics.fmean(known.values()) if known else 1.0
    return sum(known.get(test, means.get(_file_of(test), usual)) for test in tests)


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


# -- plugin ----------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that the program sets."""
    group = parser.getgroup("test all")
    group.addoption("--all-results", type=Path, help="file of results")
    group.addoption("--all-names", type=Path, help="file for the names of the tests")
    for name in ("commit", "run", "suite"):
        group.addoption(f"--all-{name}", default="", help=f"{name} in the results")
    group.addoption("--all-until", type=float, default=0.0, help="start no test after this time")
    group.addoption("--all-later", type=float, default=0.0, help="seconds of the suites after it")


def pytest_configure(config: pytest.Config) -> None:
    """Record the results."""
    if config.getoption("--all-results") is not None:
        config.pluginmanager.register(_Recorder(config))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the names of the tests."""
    names: Path | None = session.config.getoption("--all-names")
    if names is not None and not session.testsfailed:
        names.write_text("".join(f"{item.nodeid}\n" for item in session.items))


class _Recorder:
    """Skips tests that are done, writes results, and prints the time left."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.getoption
        self._results = Results(
            option("--all-results"), option("--all-commit"), option("--all-run")
        )
        self._config, self._suite = config, option("--all-suite")
        self._until, self._later = option("--all-until"), option("--all-later")
        self._left: dict[str, None] = {}
        self._known = self._results.durations(self._suite)
        self._said = time.monotonic()
        self._num_done = self._num_failed = 0
        self._expected = self._took = self._seconds = 0.0
        self._outcome = PASSED

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        done = self._results.is_done(self._suite)
        self._num_done = sum(item.nodeid in done for item in items)
        items[:] = [item for item in items if item.nodeid not in done]
        self._left = dict.fromkeys(item.nodeid for item in items)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._seconds, self._outcome = 0.0, PASSED
        self._results.add(self._suite, nodeid, STARTED)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.failed:
            self._outcome = FAILED

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._results.add(self._suite, nodeid, self._outcome, self._seconds)
        self._num_done, self._num_failed = (
            self._num_done + 1,
            self._num_failed + (self._outcome == FAILED),
        )
        self._left.pop(nodeid, None)
        if nodeid in self._known:
            self._expected, self._took = (
                self._expected + self._known[nodeid],
                self._took + self._seconds,
            )
        self._known[nodeid] = self._seconds
        now = time.monotonic()
        if now - self._said >= SAY_EVERY_S:
            self._said = now
            self._say()
        if self._until and time.time() >= self._until and self._left:
            self._session.shouldstop = "the time is over"

    def _say(self) -> None:
        # Estimates are of another run, maybe on another machine.
        pace = self._took / self._expected if self._expected else 1.0
        left = pace * (estimate(self._left, self._known) + self._later)
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        assert terminal is not None
        terminal.write_line(
            f"\n{self._suite}: {self._num_done} of {self._num_done + len(self._left)} done, "
            f"{self._num_failed} failed in this run; about {_clock(left)} left for all suites"
        )


# -- program ---------------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None) -> int:
    """Run the suites; returns the exit code."""
    parser = argparse.ArgumentParser(prog="test_all", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, help="start no test after this time")
    parser.add_argument("--out", type=Path, default=Path("out/test_all"))
    parser.add_argument(
        "--suite", action="append", default=[], metavar="NAME: COMMAND", help="a call of pytest"
    )
    parser.add_argument(
        "--program", action="append", default=[], metavar="NAME: COMMAND", help="one test"
    )
    given = parser.parse_args(words)
    suites, programs = (
        {
            name: shlex.split(command)
            for name, _, command in (text.partition(": ") for text in texts)
        }
        for texts in (given.suite, given.program)
    )
    given.out.mkdir(parents=True, exist_ok=True)
    commit, began = current_commit(), time.time()
    results = Results(given.out / "results.jsonl", commit, str(began))
    until = began + 60.0 * given.minutes if given.minutes else 0.0
    tests = {name: _collected(name, command, given.out, commit) for name, command in suites.items()}
    # Each program is one test, of its own name.
    tests |= {name: [name] for name in programs}
    left = {name: _estimate_left(results, name, names) for name, names in tests.items()}
    _print(f"{sum(map(len, tests.values()))} tests, about {_clock(sum(left.values()))} left")
    for name in tests:
        left.pop(name)
        if name in suites:
            _run_suite(results, name, suites[name], tests[name], until, sum(left.values()))
        elif not _is_over(until) and name not in results.is_done(name):
            _run_program(results, name, programs[name])
    return _report(results, tests)


def _run_suite(
    results: Results,
    name: str,
    command: Sequence[str],
    tests: Sequence[str],
    until: float,
    later: float,
) -> None:
    """Run what is left of a suite; started again after a test that ends the process."""
    while set(tests) - results.is_done(name) and not _is_over(until):
        before = len(results.every())
        options = {
            "results": results.file,
            "commit": results.commit,
            "run": results.run,
            "suite": name,
            "until": until,
            "later": later,
        }
        words = [f"--all-{option}={value}" for option, value in options.items()]
        code = subprocess.run([*command, "-q", *_PLUGIN, *words], check=False).returncode
        if code == INTERRUPTED and not _is_over(until):
            raise KeyboardInterrupt
        now = results.every()
        if len(now) == before:
            # An error of pytest itself, which the next call would repeat.
            results.add(name, f"pytest ended with {code} and ran nothing", FAILED)
            return
        if now[-1].outcome == STARTED:
            _print(f"{now[-1].test} ended the process, with {code}")
            results.add(name, now[-1].test, FAILED)


def _run_program(results: Results, name: str, command: Sequence[str]) -> None:
    _print(f"{name}: {shlex.join(command)}")
    began = time.monotonic()
    code = subprocess.run(command, check=False).returncode
    results.add(name, name, FAILED if code else PASSED, time.monotonic() - began)


_PLUGIN = ("-p", "tools.test_all")


def _collected(name: str, command: Sequence[str], out: Path, commit: str) -> list[str]:
    """Return the names of a suite's tests, which are kept for the next run of the commit."""
    names = out / f"{name}.{commit}.tests"
    if not names.exists():
        for old in out.glob(f"{name}.*.tests"):
            old.unlink()
        words = [*command, "--collect-only", "-qq", *_PLUGIN, f"--all-names={names}"]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if not names.exists():
            raise SystemExit(f"{shlex.join(words)} failed:\n{done.stdout}{done.stderr}")
    return names.read_text().splitlines()


def _estimate_left(results: Results, name: str, tests: Sequence[str]) -> float:
    done = results.is_done(name)
    return estimate([test for test in tests if test not in done], results.durations(name))


def _report(results: Results, tests: Mapping[str, Sequence[str]]) -> int:
    num_left, failed, num_passed = 0, [], 0
    for suite, names in tests.items():
        outcomes = results.outcomes(suite)
        num_left += sum(outcomes.get(name, STARTED) == STARTED for name in names)
        num_passed += sum(outcomes.get(name) == PASSED for name in names)
        failed += [f"{suite}: {name}" for name, outcome in outcomes.items() if outcome == FAILED]
    _print("\n".join(["", *(f"failed: {name}" for name in failed)]))
    _print(f"{num_passed} passed, {len(failed)} failed, {num_left} left, on {results.commit}")
    return 1 if failed else 2 if num_left else 0


def current_commit() -> str:
    """Return the commit of the working tree, and a checksum of what was changed since."""
    commit = _git("rev-parse", "--short=12", "HEAD").strip()
    changes = _git("diff", "HEAD")
    return f"{commit}-{zlib.crc32(changes.encode()):08x}" if changes else commit


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def _is_over(until: float) -> bool:
    return bool(until) and time.time() >= until


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
