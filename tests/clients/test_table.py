"""The committed page shows every test with another library, and nothing else."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.clients.table import Claim, Table, are_all, pinned


def test_the_table_has_a_line_for_every_test(
    request: pytest.FixtureRequest, table: Table, claims: dict[str, Claim]
) -> None:
    if request.config.getoption("--write-docs"):
        pytest.skip("the table is being written")
    assert set(claims.values()) <= table.lines.keys(), "run pytest tests/clients --write-docs"
    if are_all(claims):
        assert table.lines.keys() == set(claims.values()), "run pytest tests/clients --write-docs"


def test_claims_are_unique(claims: dict[str, Claim]) -> None:
    assert len(set(claims.values())) == len(claims)


def test_the_table_names_the_versions_that_are_installed_and_pinned(table: Table) -> None:
    shown = {(cells[0], cells[1]) for cells in table.lines.values()}
    assert shown == {(client, version(client)) for client, _ in shown}
    assert shown <= pinned().items()


def test_everything_that_is_pinned_is_installed() -> None:
    assert {name: version(name) for name in pinned()} == pinned()
