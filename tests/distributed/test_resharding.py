"""A checkpoint loads at any size, with any strategy, whatever saved it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.reshard_matrix import (
    ARRANGEMENTS,
    KINDS,
    OPTIMIZERS,
    SIZES,
    Arrangement,
    Outcome,
    covering_pairs,
    loaded,
    matrix_page,
    saved,
)
from tests.pages import print_at_the_end
from tests.ranks import RankPools

# Pair by pair another optimizer.
QUICK = list(zip(covering_pairs(), itertools.cycle(OPTIMIZERS), strict=False))


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[Outcome, bool]]:
    """Whether a load was bit-equal; printed with `--tables` when all are known."""
    found: dict[Outcome, bool] = {}
    yield found
    if len(found) == len(ARRANGEMENTS) ** 2 * len(OPTIMIZERS):
        print_at_the_end(request.config, matrix_page(found))


def test_the_quick_pairs_have_every_pair_of_sizes_and_of_strategies() -> None:
    sizes = {(saves.size, loads.size) for (saves, loads), _ in QUICK}
    kinds = {(saves.kind, loads.kind) for (saves, loads), _ in QUICK}
    assert len(sizes) == len(SIZES) ** 2
    assert len(kinds) == len(KINDS) ** 2
    assert {name for _, name in QUICK} == set(OPTIMIZERS)
    assert len(QUICK) < 60


@pytest.mark.parametrize("size", [f"{dp}x{tp}" for dp, tp in SIZES])
def test_a_checkpoint_loads_bit_equal_at_every_size_and_strategy(
    pools: RankPools, tmp_path: Path, size: str
) -> None:
    mine = [(pair, name) for pair, name in QUICK if pair[0].size == size]
    originals = {
        saves: pools(saves.ranks).run(saved, str(tmp_path), saves, sorted(names))[0]
        for saves, names in _grouped((saves, name) for (saves, _), name in mine).items()
    }
    loads_of = _grouped((loads, (saves, name)) for (saves, loads), name in mine)
    for loads, sources in loads_of.items():
        for of_rank in pools(loads.ranks).run(loaded, str(tmp_path), loads, sources):
            for (saves, name), found in of_rank.items():
                assert found == originals[saves][name], f"{saves.name} to {loads.name}, {name}"


def _grouped[K, V](items: Iterator[tuple[K, V]]) -> dict[K, list[V]]:
    found: dict[K, list[V]] = {}
    for key, value in items:
        if value not in found.setdefault(key, []):
            found[key].append(value)
    return found


@pytest.mark.functional
@pytest.mark.parametrize("saves", ARRANGEMENTS, ids=lambda saves: saves.name.replace(" ", "-"))
def test_a_checkpoint_loads_bit_equal_in_every_other_way(
    pools: RankPools, tmp_path: Path, outcomes: dict[Outcome, bool], saves: Arrangement
) -> None:
    original = pools(saves.ranks).run(saved, str(tmp_path), saves, OPTIMIZERS)[0]
    sources = [(saves, name) for name in OPTIMIZERS]
    for loads in ARRANGEMENTS:
        results = pools(loads.ranks).run(loaded, str(tmp_path), loads, sources)
        for source in sources:
            name = source[1]
            outcomes[saves, loads, name] = all(r[source] == original[name] for r in results)
    assert [(loads.name, name) for (_, loads, name), equal in outcomes.items() if not equal] == []
