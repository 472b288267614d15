"""Fixtures of tests with other libraries: rank pools with imports, and the table of results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.metadata import version

import pytest

from tests.clients.table import text
from tests.mcore.te_pools import megatron_te
from tests.pages import print_at_the_end
from tests.ranks import RankPools, rank_pools

__all__ = ["megatron_te"]

# The libraries read these variables when they are imported, here or on a rank.
os.environ.update(
    ACCELERATE_USE_CPU="true",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_OFFLINE="1",
    # Otherwise accelerate gives each rank as many threads as the machine has cores.
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_VERBOSITY="error",
)

_PRELOADED = ("tests.clients.preloaded",)
type Record = Callable[..., None]
type Measure = Callable[..., None]


def forget_accelerators() -> None:
    """Reset the process-wide state of accelerate."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that record a result as `functional`: a run may select a share of them."""
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here) and "record" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.functional)


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, ...]]]:
    """Yield the rows of the table of results; the table is printed with `--tables`."""
    rows: list[tuple[str, ...]] = []
    yield rows
    print_at_the_end(request.config, text(rows))


@pytest.fixture
def record(request: pytest.FixtureRequest, measured: list[tuple[str, ...]]) -> Record:
    """Return `record("peft", "losses and adapters", difference, at_most)`.

    The function asserts that a difference is at most the tolerance, and adds a row to the table.
    """

    def note(client: str, compared: str, difference: float, at_most: float = 1e-6) -> None:
        assert difference <= at_most, f"{compared}: {difference} is more than {at_most}"
        number = "0" if difference == 0 else f"{difference:.0e}"
        test = request.node.name.removeprefix("test_")
        versions = version(client), version("torch").partition("+")[0]
        measured.append((client, *versions, test, compared, number))

    return note


@pytest.fixture(scope="session")
def clients() -> Iterator[RankPools]:
    """Yield rank pools by world size, forked from a process that has imported the libraries."""
    with rank_pools(_PRELOADED) as pools:
        yield pools


@pytest.fixture
def measure(clients: RankPools, record: Record) -> Measure:
    """Return a function that records the largest result of a comparison over all ranks.

    `measure("peft", "losses and adapters", 2, difference, "ZeRO-3")` calls `difference("ZeRO-3")`
    on 2 ranks.
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
