"""Upstream's tests of Megatron-FSDP pass with this package, except listed differences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fsdp2_suite.differences import reason_of
from tests.ranks import RankFailure, RankPools
from tests.upstream_suite.conftest import FILES
from tests.upstream_suite.differences import REASONS, expected
from tests.upstream_suite.ranks import run

TIMEOUT_S = 300.0
"""Eight ranks compile their models on one machine."""


def test_upstream_test_passes_or_fails_as_listed(
    megatron_te: RankPools, node: str, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    known = expected().get(node, "passed")
    if known in REASONS and REASONS[known].kind == "gpu":
        pytest.skip(REASONS[known].text)
    met: str | None = "passed"
    error = ""
    checkout = pytestconfig.getoption("--megatron").resolve()
    pools = megatron_te(FILES[node.split("::", maxsplit=1)[0]])
    try:
        pools.run(run, checkout, node, tmp_path, timeout_s=TIMEOUT_S)
    except RankFailure as failure:
        error = str(failure)
        met = reason_of(error, REASONS)
    assert met == known, f"met is {met}, and differences.txt has {known}\n{error}"
