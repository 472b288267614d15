"""Every combination trains as Megatron's own DDP does."""

from __future__ import annotations

import pytest

from functional_tests.matrix import Case, cases
from functional_tests.table import Table
from functional_tests.trainings import Difference, Trainings, first_difference

# Where weights are rounded, which of them crosses a boundary is chance: as close as Megatron's own
# distributed optimizer means within twice its distance.
AS_CLOSE = 2.0


def _parameters() -> list:
    return [
        pytest.param(
            case,
            id=f"{case.row.world_size}-{case.row.name}-{case.strategy}".replace(" ", "_"),
            marks=() if case.is_quick else pytest.mark.functional,
        )
        for case in cases()
    ]


@pytest.mark.parametrize("case", _parameters())
def test_it_trains_like_megatrons_ddp(trainings: Trainings, table: Table, case: Case) -> None:
    row = case.row
    reference = trainings(row.reference)
    mine = trainings(row.sharded(case.strategy))
    difference, theirs = Difference.between(mine, reference), None
    bound = Difference(row.tolerance, row.tolerance)
    if row.is_low_precision:
        theirs = Difference.between(trainings(row.yardstick), reference)
        bound = Difference(
            max(row.tolerance, AS_CLOSE * theirs.loss), max(row.tolerance, AS_CLOSE * theirs.norm)
        )
    table.add(case, difference, theirs)
    where = first_difference(mine, reference, bound)
    assert difference.within(bound), f"{case.strategy}: {difference}; {where}"
