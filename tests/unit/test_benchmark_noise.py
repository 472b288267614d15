"""Repeats take turns, what others disturb is made again, and a limit is the sum of its parts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from benchmarks.cases import CHOSEN, every_setting
from benchmarks.limit import limit_seconds
from benchmarks.noise import Rounds, Sample, busy_seconds, cpus, foreign_share

STAT = """cpu  11 22 33 44 55 66 77 88 9 10
cpu0 100 10 20 5000 7 8 9 30 4 3
cpu1 200 0 0 6000 0 0 0 0 0 0
cpu10 900 0 0 0 0 0 0 0 0 0
intr 5 6
"""
BURNS = "import time\nwhile time.process_time() < 0.4: pass"


def _measured(rounds: Rounds, sample_of: Callable[[str], Sample]) -> list[str]:
    """Who was measured, in order."""
    order = []
    for name in rounds:
        order.append(name)
        rounds.note(name, sample_of(name))
    return order


def test_engines_take_turns_in_an_order_that_changes() -> None:
    names = ["a", "b", "c", "d"]
    order = _measured(Rounds(names, wanted=6, most=9, threshold=0.1), lambda name: Sample(1.0))
    rounds = [order[start : start + 4] for start in range(0, len(order), 4)]
    assert len(rounds) == 6
    assert all(sorted(each) == names for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1


def test_a_disturbed_repeat_is_made_again_and_does_not_count() -> None:
    rounds = Rounds(["a", "b"], wanted=3, most=9, threshold=0.1)
    disturbed = iter([Sample(50.0, 5.0, 0.7), Sample(60.0, 6.0, 0.2)])
    quiet = Sample(2.0, 1.0, 0.05)
    order = _measured(rounds, lambda name: next(disturbed, quiet) if name == "a" else quiet)
    assert (order.count("a"), order.count("b")) == (5, 3)
    assert (rounds.median("a"), rounds.optimizer("a")) == (2.0, 1.0)
    assert not rounds.is_disturbed("a")


def test_where_nothing_is_quiet_the_least_disturbed_repeats_count_and_it_is_said() -> None:
    rounds = Rounds(["a"], wanted=2, most=4, threshold=0.1)
    shares = iter([0.9, 0.2, 0.8, 0.3])
    order = _measured(rounds, lambda name: Sample(10 * (share := next(shares)), 0.0, share))
    assert order == ["a"] * 4
    assert rounds.is_disturbed("a")
    assert rounds.median("a") == pytest.approx(2.5)


def test_busy_seconds_are_those_of_the_processes_cpus() -> None:
    assert busy_seconds({0, 1}, STAT) == 360 / os.sysconf("SC_CLK_TCK")
    assert foreign_share(busy=3.0, own=1.0, seconds=2.0, num_cpus=2) == 0.5
    assert foreign_share(busy=1.0, own=1.01, seconds=2.0, num_cpus=2) == 0.0


@pytest.mark.skipif(busy_seconds({0}) is None, reason="needs /proc/stat")
def test_another_programs_load_is_foreign() -> None:
    allowed = cpus()
    before, own, start = busy_seconds(allowed), time.process_time(), time.perf_counter()
    subprocess.run([sys.executable, "-c", BURNS], check=True)
    seconds, own = time.perf_counter() - start, time.process_time() - own
    after = busy_seconds(allowed)
    assert before is not None and after is not None
    # Whatever else runs can only add to it; the kernel counts in ticks.
    least = (0.4 - 0.1) / (seconds * len(allowed))
    assert foreign_share(after - before, own, seconds, len(allowed)) >= least


TOOK = {
    "compute": 100.0,
    "all-gather": 10.0,
    "reduce-scatter": 7.0,
    "all-to-all and sum": 5.0,
    "all-reduce": 20.0,
    "AdamW, whole": 4.0,
    "AdamW, share": 2.0,
}


@pytest.mark.parametrize(
    ("strategy", "micro_batches", "expected"),
    [
        ("no_shard", 4, 100 + 20 + 4),
        ("optim", 4, 100 + 5 + 10 + 2),
        ("optim_grads", 4, 100 + 4 * 5 + 10 + 2),
        ("optim_grads_params", 1, 100 + 5 + 1.5 * 10 + 2),
        ("optim_grads_params", 4, 100 + 4 * 5 + 4 * 1.5 * 10 + 2),
    ],
)
def test_a_limit_has_what_the_strategy_needs_and_nothing_else(
    strategy: str, micro_batches: int, expected: float
) -> None:
    assert limit_seconds(TOOK, strategy, micro_batches, gathers=1.5) == expected


def test_a_limit_has_the_faster_way_to_gather() -> None:
    for broadcasts, gather in ((8.0, 8.0), (12.0, 10.0)):
        took = TOOK | {"broadcasts": broadcasts}
        assert limit_seconds(took, "optim", 1, gathers=1.5) == 100 + 5 + gather + 2


def test_the_chosen_settings_change_each_axis_of_the_product() -> None:
    assert set(CHOSEN) < set(every_setting())
    assert len(every_setting()) == 96
    for axis in ("case", "dtype", "micro_batches", "recomputes", "ranks", "optimizer"):
        values = {getattr(setting, axis) for setting in every_setting()}
        assert {getattr(setting, axis) for setting in CHOSEN} == values
