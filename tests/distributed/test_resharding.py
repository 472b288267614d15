"""A checkpoint loads at any world size and strategy, regardless of those of the save."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp_v2 import checkpoint, fully_shard
from tests.cases import quick_only
from tests.distributed.checkpoint_trainings import digests
from tests.distributed.cut_parameters import Place
from tests.distributed.test_tensor_parallel import _Parts, _sharded
from tests.distributed.test_torch_checkpoint import OPTIMIZERS
from tests.distributed.wrapping import STRATEGIES, mesh_of
from tests.ranks import RankPools

NAMES = ("AdamW", "SGD, momentum", "Muon")
SIZES = ((1, 1), (2, 1), (4, 1), (2, 2), (3, 1))
ARRANGEMENTS = (
    *(Place(size, strategy, has_tensor_axis=True) for size in SIZES for strategy in STRATEGIES),
    *(
        Place((2, 2), strategy, outer)
        for outer in ("no_shard", "optim")
        for strategy in ("optim", "optim_grads_params")
    ),
)

Pair = tuple[Place, Place]
Source = tuple[Place, str]
"""What saves, and its optimizer."""


def size_of(place: Place) -> tuple[int, ...]:
    """Numbers of data-parallel and of tensor-parallel ranks."""
    return place.mesh if place.has_tensor_axis else (4, 1)


# -- on every rank -------------------------------------------------------------------------------


def saved(folder: str, sources: Iterable[Source]) -> dict[Source, dict[str, str]]:
    """Train and save; return digests."""
    found = {}
    for source in sources:
        model, optimizer = _made(*source)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3)).backward()
            optimizer.step()
        checkpoint.save(f"{folder}/{source}", model, optimizer, extra=str(source))
        found[source] = digests(model, optimizer)
    return found


def loaded(
    folder: str, loads: Place, sources: Iterable[Source]
) -> dict[tuple[Source, Place], dict[str, str]]:
    """Load into new models; return digests."""
    found = {}
    for source in sources:
        model, optimizer = _made(loads, source[1])
        for group in optimizer.param_groups:
            group["lr"] = 7.0
        extra = checkpoint.load(f"{folder}/{source}", model, optimizer)
        assert extra == str(source)
        assert all(group["lr"] == 0.1 for group in optimizer.param_groups)
        found[source, loads] = digests(model, optimizer)
    return found


def _made(place: Place, name: str) -> tuple[Any, torch.optim.Optimizer]:
    if place.has_tensor_axis:
        model = _sharded(*place.mesh, place.strategy)
    else:
        options = {"mesh": mesh_of(*place.mesh), "outer_dp_sharding_strategy": place.outer}
        model = fully_shard(_Parts(0, 1), sharding_strategy=place.strategy, **options)
    return model, OPTIMIZERS[name](model)


# -- tests ---------------------------------------------------------------------------------------


def _check(pools: RankPools, folder: Path, trials: Iterable[tuple[Pair, str]]) -> None:
    """Save and load; loaded values are bitwise identical to saved ones."""
    saves_of: dict[Place, set[Source]] = {}
    loads_of: dict[Place, set[Source]] = {}
    for (saves, loads), name in trials:
        saves_of.setdefault(saves, set()).add((saves, name))
        loads_of.setdefault(loads, set()).add((saves, name))

    def run(place: Place, function: Any, *args: Any) -> list[Any]:
        return pools(math.prod(place.mesh)).run(function, str(folder), *args)

    expected: dict[Source, dict[str, str]] = {}
    for place, sources in saves_of.items():
        expected |= run(place, saved, sorted(sources, key=str))[0]
    for place, sources in loads_of.items():
        for found in run(place, loaded, place, sorted(sources, key=str)):
            wrong = [trial for trial, values in found.items() if values != expected[trial[0]]]
            assert wrong == []


# Every arrangement saves once, and loads what one of another size and strategy saved.
ROTATED = (*ARRANGEMENTS[9:], *ARRANGEMENTS[:9])
QUICK = list(zip(zip(ARRANGEMENTS, ROTATED, strict=True), itertools.cycle(NAMES), strict=False))


@pytest.mark.parametrize("size", quick_only(SIZES, (2, 1), (2, 2), (3, 1)), ids=str)
def test_a_checkpoint_loads_bit_equal_at_every_size_and_strategy(
    pools: RankPools, tmp_path: Path, size: tuple[int, ...]
) -> None:
    _check(pools, tmp_path, [trial for trial in QUICK if size_of(trial[0][0]) == size])


@pytest.mark.functional
@pytest.mark.parametrize("saves", ARRANGEMENTS, ids=str)
def test_a_checkpoint_loads_bit_equal_in_every_arrangement(
    pools: RankPools, tmp_path: Path, saves: Place
) -> None:
    pairs = itertools.product([saves], ARRANGEMENTS)
    # Optimizers in turn: every arrangement saves and loads each of them.
    names = itertools.islice(itertools.cycle(NAMES), ARRANGEMENTS.index(saves), None)
    _check(pools, tmp_path, zip(pairs, names, strict=False))
