"""Some combinations once more as a user types them: torchrun and the iteration lines."""

from __future__ import annotations

import pytest

from functional_tests.matrix import ITERATIONS, ROWS, Row
from functional_tests.trainings import Trainings
from tests.mcore.command_line import PRETRAIN, PRINTED, printed_losses, torchrun


@pytest.mark.functional
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.types], ids=lambda row: row.name.replace(" ", "_")
)
def test_printed_losses_equal_ddp(trainings: Trainings, row: Row) -> None:
    flags = [*row.sharded(row.strategies[0]).flags, "--cpu-rehearsal"]
    run = torchrun(row.world_size, PRETRAIN, flags)
    assert run.code == 0, run.output[-3000:]
    assert list(run.losses) == list(range(1, ITERATIONS + 1))
    expected = printed_losses(trainings(row.reference).losses)
    for iteration, loss in expected.items():
        assert run.losses[iteration] == pytest.approx(loss, rel=row.tolerance + PRINTED), iteration
