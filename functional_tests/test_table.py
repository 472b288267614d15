"""The committed page shows the whole matrix, and nothing else."""

from __future__ import annotations

from functional_tests.matrix import RESUMES, ROWS, STRATEGIES, cases
from functional_tests.table import Table, described


def test_the_table_has_a_line_for_every_case(table: Table) -> None:
    expected = {(case.row.name, case.strategy): described(case) for case in cases()}
    shown = {
        key: cells[: len(expected[key])] for key, cells in table.lines.items() if key in expected
    }
    assert shown == expected, "run pytest functional_tests --write-docs"
    assert table.lines.keys() == expected.keys()


def test_the_table_has_a_line_for_every_resumed_run(table: Table) -> None:
    assert table.resumes.keys() == {resume.name for resume in RESUMES}


def test_names_are_unique() -> None:
    for named in (ROWS, RESUMES):
        names = [item.name for item in named]
        assert len(names) == len(set(names))


def test_every_strategy_is_trained_at_every_world_size() -> None:
    for world_size in (2, 4, 8):
        found = {case.strategy for case in cases() if case.row.world_size == world_size}
        assert found == set(STRATEGIES)
