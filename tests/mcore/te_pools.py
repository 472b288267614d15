"""Ranks whose Megatron has Transformer Engine, which is decided once per process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.mcore.session import impl_of
from tests.ranks import RankPools, rank_pools

__all__ = ["blackwell_te", "megatron_te", "pools_for", "recipe_te"]

RECIPES = ("delayed", "tensorwise", "blockwise")
BLACKWELL_RECIPES = ("mxfp8", "nvfp4")
"""That no earlier GPU has."""


@pytest.fixture(scope="session")
def megatron_te() -> Iterator[RankPools]:
    """Process groups for Megatron with Transformer Engine's layers.

    Tests that use it are skipped where Transformer Engine's Python is not installed.
    """
    _skip_without_transformer_engine()
    with rank_pools(["tests.mcore.preloaded_te"]) as pools:
        yield pools


@pytest.fixture(scope="module")
def blackwell_te() -> Iterator[RankPools]:
    """The same on a GPU that has MXFP8, which is decided once per process as well."""
    _skip_without_transformer_engine()
    with rank_pools(["tests.mcore.preloaded_blackwell"]) as pools:
        yield pools


@pytest.fixture
def recipe_te(request: pytest.FixtureRequest, recipe: str) -> RankPools:
    """One of these: for the argument `recipe` of a test."""
    name = "blackwell_te" if recipe in BLACKWELL_RECIPES else "megatron_te"
    found: RankPools = request.getfixturevalue(name)
    return found


def pools_for(request: pytest.FixtureRequest, flags: Sequence[str]) -> RankPools:
    """The process groups whose ranks have what a command line needs."""
    name = "megatron"
    if impl_of(flags) == "transformer_engine":
        name = "megatron_te" if {"mxfp8", "nvfp4"}.isdisjoint(flags) else "blackwell_te"
    found: RankPools = request.getfixturevalue(name)
    return found


def _skip_without_transformer_engine() -> None:
    from megatron_cpu_rehearsal.te import load

    # Whether this process could have it makes no difference: the pools' ranks import Megatron anew.
    why_not = load.why_not_installed()
    if why_not:
        pytest.skip(why_not)
