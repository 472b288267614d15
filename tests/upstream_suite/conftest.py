"""Collection of upstream's tests from a checkout of Megatron-LM (`--megatron`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mcore.te_pools import megatron_te
from tests.ranks import rank_pools
from tests.upstream_suite import ranks

__all__ = ["megatron_te"]

FILES = {
    f"mfsdp_v2/test_{name}.py": 4
    for name in ("checkpoint", "context", "expert_parallel", "fully_shard", "optimizer")
} | {"mfsdp_v2/test_memory.py": 2, "mfsdp_v1/test_mfsdp_fully_shard.py": 8}
"""Files of tests, and their numbers of ranks. docs/tested.md says why the others are not run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the checkout."""
    parser.addoption("--megatron", type=Path, required=True, help="a checkout of Megatron-LM")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate one test per test of upstream."""
    if "node" in metafunc.fixturenames:
        checkout = metafunc.config.getoption("--megatron").resolve()
        with rank_pools(["tests.mcore.preloaded_te"]) as pools:
            (nodes,) = pools(1).run(ranks.collect, checkout, list(FILES))
        metafunc.parametrize("node", nodes, ids=str)
