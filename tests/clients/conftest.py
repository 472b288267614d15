"""Tests with other libraries: no network, processes that have imported them, a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.metadata import version

import pytest

from tests.clients.table import text
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
type Record = Callable[..., None]
type Measure = Callable[..., None]


def forget_accelerators() -> None:
    """Drop what an `Accelerator` of another test keeps for the whole process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have a share taken of the tests that measure something; the others always run."""
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here) and "record" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.functional)


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, ...]]]:
    """What this run measures; printed with `--tables`."""
    rows: list[tuple[str, ...]] = []
    yield rows
    print_at_the_end(request.config, text(rows))


@pytest.fixture
def record(request: pytest.FixtureRequest, measured: list[tuple[str, ...]]) -> Record:
    """Note what a test compared: `record("peft", "losses and adapters", difference, at_most)`.

    It asserts that the difference is at most what is allowed, and is what the table is made of.
    """

    def note(client: str, compared: str, difference: float, at_most: float = 1e-6) -> None:
        assert difference <= at_most, f"{compared}: {difference} is more than {at_most}"
        number = "0" if difference == 0 else f"{difference:.0e}"
        test = request.node.name.removeprefix("test_")
        measured.append((client, version(client), test, compared, number))

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
