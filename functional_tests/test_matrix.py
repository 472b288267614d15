"""Every combination trains like Megatron's own DDP, and resumes at other parallel sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from functional_tests.matrix import RESUMED_TO, SAVED, STRATEGIES, Resume, Row, Run
from functional_tests.quantized import (
    QUANTIZED,
    QUANTIZED_EVALUATED,
    QUANTIZED_RESUMES,
    QUANTIZED_SAME,
)
from functional_tests.rows import EVALUATED, RESUMES, ROWS, SAME
from functional_tests.trainings import Difference, Table, Trainings, difference
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.export import export
from tests.cases import quick_if, slow_if
from tests.mcore.checkpoint_values import digests, merged_digests
from tests.mcore.flags import loading, saving
from tests.mcore.session import distance
from tests.mcore.trained import assert_equal, first_difference


def _cases(rows: Sequence[Row], case_if: Callable[..., Any] = quick_if) -> list[Any]:
    """Return every row with each of its strategies, smallest world size first."""
    return [
        case_if(
            number < row.quick, row, strategy, id=_id(f"{row.world_size}-{row.name}-{strategy}")
        )
        for row in sorted(rows, key=lambda row: row.world_size)
        for number, strategy in enumerate(row.strategies)
    ]


def _id(name: str) -> str:
    return "_".join(name.split())


def _compare(trainings: Trainings, table: Table, row: Row, strategy: str) -> None:
    reference = trainings(row.reference(strategy))
    mine = trainings(row.sharded(strategy))
    found = difference(mine, reference, row.iterations)
    bound = Difference(*row.bounds)
    where = first_difference(mine, reference, bound.loss, bound.norm)
    assert found.within(bound), f"{strategy}: {found}; {where}"
    assert any(mine.skipped) or "--fp16" not in row.flags.split(), "no step overflowed"
    finds = row.finds if row.probe else []
    assert mine.extras == [finds] * row.world_size
    table.add((row.name, str(row.world_size), strategy), found)


@pytest.mark.parametrize(("row", "strategy"), _cases((*ROWS, *QUANTIZED)))
def test_sharded_training_matches_megatrons_ddp(
    trainings: Trainings, table: Table, row: Row, strategy: str
) -> None:
    _compare(trainings, table, row, strategy)


@pytest.mark.parametrize(("row", "strategy"), _cases((*SAME, *QUANTIZED_SAME), slow_if))
def test_flags_do_not_change_the_training(
    trainings: Trainings, table: Table, row: Row, strategy: str
) -> None:
    _compare(trainings, table, row, strategy)


@pytest.mark.parametrize(
    "resume", [slow_if(r.quick, r, id=_id(r.name)) for r in (*RESUMES, *QUANTIZED_RESUMES)]
)
def test_run_resumes_from_the_checkpoint_of_another_run(
    trainings: Trainings,
    table: Table,
    folder_of: Callable[[Run], Path],
    tmp_path: Path,
    resume: Resume,
) -> None:
    saves = replace(resume.run(resume.saves), probe=digests if resume.values else None)
    folder, loads = folder_of(saves), resume.run(resume.loads)
    uninterrupted = trainings(saves.adding(*saving(folder, SAVED)))
    if resume.is_exported:
        folder = export(folder, tmp_path, SAVED).path.parent
    resumed = trainings(loads.adding(*loading(folder, SAVED)))
    assert (len(uninterrupted.losses), len(resumed.losses)) == (RESUMED_TO, RESUMED_TO - SAVED)
    loss = distance(resumed.losses, uninterrupted.losses[SAVED:])
    assert loss <= resume.tolerance, f"{resumed} against {uninterrupted.losses[SAVED:]}"
    if resume.tolerance == 0:
        assert_equal(resumed, uninterrupted, after=SAVED)
        assert resumed.loss_scales == uninterrupted.loss_scales[SAVED:]
    if resume.values:
        # The run loads the checkpoint of the last iteration and does not train.
        loaded = trainings(replace(loads.adding(*loading(folder)), probe=digests))
        assert merged_digests(loaded.extras) == merged_digests(uninterrupted.extras)
    table.resumes.append((resume.name, f"{loss:.0e}"))


@pytest.mark.parametrize(("row", "strategy"), _cases((*EVALUATED, *QUANTIZED_EVALUATED), slow_if))
def test_evaluation_without_training_equals_that_of_the_training(
    trainings: Trainings, folder_of: Callable[[Run], Path], row: Row, strategy: str
) -> None:
    run = row.sharded(strategy).adding("--eval-iters", "2")
    folder = folder_of(run)
    trained = trainings(run.adding(*saving(folder, row.iterations)))
    assert len(trained.evaluations) == 2
    alone = trainings(run.adding(*loading(folder), "--skip-train"))
    assert (alone.evaluations, alone.losses) == (trained.evaluations, [])


def test_every_strategy_is_trained_at_every_world_size() -> None:
    for world_size in (2, 4, 8):
        found = {s for row in ROWS if row.world_size == world_size for s in row.strategies}
        assert found == set(STRATEGIES)
