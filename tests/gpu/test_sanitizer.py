"""Whole steps under torch's CUDA sanitizer, which reports unsynchronized accesses of streams."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu.conftest import NEEDS_GPU
from tests.parity.test_parity import STRATEGIES
from tests.processes import ran

pytestmark = NEEDS_GPU

MESHES = [("1", "no_shard"), ("2", "no_shard"), ("2x2", "no_shard"), ("2x2", "optim")]


def _sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    words = (sys.executable, "-m", "tests.gpu.sanitized_step", *arguments)
    return ran(*words, env=environment, timeout=300)


@pytest.mark.parametrize(
    ("strategy", "sizes", "outer"),
    # An outer axis is sharded only where the inner one is.
    [
        (strategy, sizes, outer)
        for strategy in STRATEGIES
        for sizes, outer in MESHES
        if (strategy, outer) != ("no_shard", "optim")
    ],
)
def test_two_steps_have_no_report(strategy: str, sizes: str, outer: str) -> None:
    done = _sanitized(strategy, sizes, outer)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    assert "CSAN detected" not in done.stderr


def test_the_sanitizer_reports_a_race() -> None:
    done = _sanitized("race")
    assert done.returncode != 0
    assert "CSAN detected a possible data race" in done.stderr
