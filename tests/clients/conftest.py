"""Tests with other libraries: no network, processes that have imported them, a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.clients.table import Claim, Table
from tests.pages import print_at_the_end
from tests.ranks import RankPools, rank_pools

# Before any of the libraries is imported, here or in a rank: they look when they are.
os.environ.update(
    ACCELERATE_USE_CPU="true",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_VERBOSITY="error",
)

_PRELOADED = ("tests.clients.preloaded",)
_CLAIMS = pytest.StashKey[dict[str, Claim]]()
type Record = Callable[..., None]
type Measure = Callable[..., None]


def forget_accelerators() -> None:
    """Drop what an `Accelerator` of another test keeps for the whole process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note which lines the table has to have, before tests are chosen; a share is of all tests."""
    here = os.path.dirname(__file__)
    mine = [item for item in items if str(item.path).startswith(here)]
    recording = [item for item in mine if "record" in getattr(item, "fixturenames", ())]
    config.stash[_CLAIMS] = {item.nodeid: Claim.made_by(item) for item in recording}
    for item in recording:
        item.add_marker(pytest.mark.functional)


@pytest.fixture(scope="session")
def claims(request: pytest.FixtureRequest) -> dict[str, Claim]:
    """Claims of the tests that were collected, by test."""
    return request.config.stash[_CLAIMS]


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """What this run measures; printed with `--tables`."""
    table = Table()
    yield table
    print_at_the_end(request.config, table.text())


@pytest.fixture
def record(request: pytest.FixtureRequest, table: Table) -> Record:
    """Note what a test compared: `record("peft", "losses and adapters", difference, at_most)`.

    It asserts that the difference is at most what is allowed, and is what the table is made of.
    """

    def note(client: str, compared: str, difference: float, at_most: float = 1e-6) -> None:
        assert difference <= at_most, f"{compared}: {difference} is more than {at_most}"
        table.add(client, Claim.made_by(request.node), compared, difference)

    return note


@pytest.fixture(scope="session")
def clients() -> Iterator[RankPools]:
    """Process groups by world size, in processes that have imported the libraries once."""
    with rank_pools(_PRELOADED) as pools:
        yield pools


@pytest.fixture
def measure(clients: RankPools, record: Record) -> Measure:
    """Record the largest of what a comparison returns on each of so many ranks.

    `measure("peft", "losses and adapters", 2, difference, "ZeRO-3")` calls `difference("ZeRO-3")`.
    """

    def run(
        client: str,
        compared: str,
        ranks: int,
        function: Callable[..., float],
        *args: object,
        at_most: float = 1e-6,
        **options: object,
    ) -> None:
        record(client, compared, max(clients(ranks).run(function, *args, **options)), at_most)

    return run
