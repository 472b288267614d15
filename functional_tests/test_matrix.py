"""Every combination trains as Megatron's own DDP does."""

from __future__ import annotations

from typing import Any

import pytest

from functional_tests.matrix import Case, cases
from functional_tests.table import Table
from functional_tests.trainings import Difference, Trainings, first_difference
from tests.mcore.trained import longer

# Where weights are rounded, chance decides which of them cross a boundary: "as close as Megatron's
# distributed optimizer" leaves room for that.
AS_CLOSE = 1.5


def _parameter(case: Case) -> Any:
    name = f"{case.row.world_size}-{case.row.name}-{case.strategy}".replace(" ", "_")
    return pytest.param(case, id=name) if case.is_quick else longer(case, id=name)


@pytest.mark.parametrize("case", [_parameter(case) for case in cases()])
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
