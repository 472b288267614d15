"""A run goes on from a checkpoint with other parallel sizes as if it had not stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from functional_tests.matrix import ITERATIONS, RESUMES, SAVED, Resume
from functional_tests.table import Table
from functional_tests.trainings import Trainings, largest
from tests.mcore.trained import longer


def _parameter(resume: Resume) -> Any:
    name = resume.name.replace(" ", "_")
    return pytest.param(resume, id=name) if resume.quick else longer(resume, id=name)


@pytest.mark.parametrize("resume", [_parameter(resume) for resume in RESUMES])
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
