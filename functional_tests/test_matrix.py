"""Every combination trains as Megatron's own DDP does, and goes on at other parallel sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from functional_tests.matrix import (
    ITERATIONS,
    RESUMES,
    ROWS,
    SAVED,
    STRATEGIES,
    Case,
    Resume,
    Row,
    cases,
)
from functional_tests.table import Table
from functional_tests.trainings import Difference, Trainings, first_difference, largest
from tests.cases import quick_if
from tests.mcore.command_line import PRETRAIN, PRINTED, printed_losses, torchrun

# Where weights are rounded, chance decides which of them cross a boundary: "as close as Megatron's
# distributed optimizer" leaves room for that.
AS_CLOSE = 1.5


def _parameter(value: Any, name: str, *, is_quick: bool) -> Any:
    return quick_if(is_quick, value, id=name.replace(" ", "_"))


def _name(case: Case) -> str:
    return f"{case.row.world_size}-{case.row.name}-{case.strategy}"


@pytest.mark.parametrize(
    "case", [_parameter(case, _name(case), is_quick=case.is_quick) for case in cases()]
)
def test_it_trains_like_megatrons_ddp(trainings: Trainings, table: Table, case: Case) -> None:
    row = case.row
    reference = trainings(row.reference)
    mine = trainings(row.sharded(case.strategy))
    difference, theirs = Difference.between(mine, reference), None
    bound = Difference(row.tolerance, row.tolerance)
    if row.is_low_precision:
        theirs = Difference.largest_of(
            [Difference.between(trainings(run), reference) for run in row.yardsticks]
        )
        bound = Difference.largest_of([bound, theirs.times(AS_CLOSE)])
    where = first_difference(mine, reference, bound)
    assert difference.within(bound), f"{case.strategy}: {difference}; {where}"
    table.add(case, difference, theirs)


@pytest.mark.parametrize(
    "resume", [_parameter(each, each.name, is_quick=each.quick) for each in RESUMES]
)
def test_losses_are_those_of_the_run_that_went_on(
    trainings: Trainings, table: Table, tmp_path: Path, resume: Resume
) -> None:
    uninterrupted = trainings(resume.saving(str(tmp_path))).losses
    assert len(uninterrupted) == ITERATIONS
    resumed = trainings(resume.loading(str(tmp_path))).losses
    assert len(resumed) == ITERATIONS - SAVED
    difference = largest(resumed, uninterrupted[SAVED:])
    assert difference <= resume.tolerance, f"{resumed} against {uninterrupted[SAVED:]}"
    table.add_resumed(resume, difference)


@pytest.mark.functional
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.types], ids=lambda row: row.name.replace(" ", "_")
)
def test_losses_that_a_user_sees_printed_equal_ddp(trainings: Trainings, row: Row) -> None:
    flags = [*row.sharded(row.strategies[0]).flags, "--cpu-rehearsal"]
    run = torchrun(row.world_size, PRETRAIN, flags)
    assert run.code == 0, run.output[-3000:]
    assert list(run.losses) == list(range(1, ITERATIONS + 1))
    expected = printed_losses(trainings(row.reference).losses)
    for iteration, loss in expected.items():
        assert run.losses[iteration] == pytest.approx(loss, rel=row.tolerance + PRINTED), iteration


def test_names_are_unique() -> None:
    for named in (ROWS, RESUMES):
        names = [item.name for item in named]
        assert len(names) == len(set(names))


def test_every_strategy_is_trained_at_every_world_size() -> None:
    for world_size in (2, 4, 8):
        found = {case.strategy for case in cases() if case.row.world_size == world_size}
        assert found == set(STRATEGIES)
