"""Ranks whose Megatron has Transformer Engine, which is decided once per process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPools, rank_pools

__all__ = ["blackwell_te", "megatron_te"]


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


def _skip_without_transformer_engine() -> None:
    from megatron_fsdp_v2_mcore.rehearsal.te import load

    # Whether this process could have it makes no difference: the pools' ranks import Megatron anew.
    why_not = load.why_not_installed()
    if why_not:
        pytest.skip(why_not)
