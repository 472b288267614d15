"""Pools of ranks whose Megatron uses Transformer Engine, which is determined once per process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.mcore.session import impl_of
from tests.ranks import RankPools, rank_pools

RECIPES = ("delayed", "tensorwise", "blockwise")
BLACKWELL_RECIPES = ("mxfp8", "nvfp4")
"""Recipes that need a Blackwell GPU."""


@pytest.fixture(scope="session")
def megatron_te() -> Iterator[RankPools]:
    """Process groups for Megatron with Transformer Engine's layers.

    Tests that use it are skipped if the Python package of Transformer Engine is not installed.
    """
    _skip_without_transformer_engine()
    with rank_pools(["tests.mcore.preloaded_te"]) as pools:
        yield pools


@pytest.fixture(scope="module")
def blackwell_te() -> Iterator[RankPools]:
    """Process groups that rehearse a GPU with MXFP8; a process rehearses one GPU."""
    _skip_without_transformer_engine()
    with rank_pools(["tests.mcore.preloaded_blackwell"]) as pools:
        yield pools


@pytest.fixture
def recipe_te(request: pytest.FixtureRequest, recipe: str) -> RankPools:
    """Return the process groups for the argument `recipe` of a test."""
    name = "blackwell_te" if recipe in BLACKWELL_RECIPES else "megatron_te"
    return request.getfixturevalue(name)


def pools_for(request: pytest.FixtureRequest, flags: Sequence[str]) -> RankPools:
    """Return the process groups that support a command line."""
    name = "megatron"
    if impl_of(flags) == "transformer_engine":
        name = "megatron_te" if {"mxfp8", "nvfp4"}.isdisjoint(flags) else "blackwell_te"
    return request.getfixturevalue(name)


def _skip_without_transformer_engine() -> None:
    from megatron_cpu_rehearsal.te import load

    # The ranks of the pools import Megatron themselves; modules of this process do not matter.
    why_not = load.why_not_installed()
    if why_not:
        pytest.skip(why_not)
