"""Whole steps under torch's stream sanitizer and under NVIDIA's memcheck."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.distributed.wrapping import STRATEGIES
from tests.gpu.machine import Machine, run_command
from tests.mcore.command_line import Run

STEPS = (sys.executable, "-m", "tests.gpu.sanitized_step")
MESHES = [("1", "no_shard"), ("2", "no_shard"), ("2x2", "no_shard"), ("2x2", "optim")]
CASES = [
    (strategy, sizes, outer)
    for strategy in STRATEGIES
    for sizes, outer in MESHES
    # Sharding along the outer axis requires sharding along the inner axis.
    if (strategy, outer) != ("no_shard", "optim")
]


def _sanitized(machine: Machine, folder: Path, *arguments: str) -> Run:
    environment: dict[str, str | None] = {"TORCH_CUDA_SANITIZER": "1"} if machine.on_cuda else {}
    return run_command(machine, [*STEPS, *arguments], folder / "log", environment=environment)


@pytest.mark.parametrize(("strategy", "sizes", "outer"), CASES)
def test_sanitizer_reports_nothing_in_two_steps(
    machine: Machine, tmp_path: Path, strategy: str, sizes: str, outer: str
) -> None:
    if machine.is_small and (strategy, sizes, outer) != CASES[-1]:
        pytest.skip("--small")
    done = _sanitized(machine, tmp_path, strategy, sizes, outer, machine.device)
    assert done.code == 0, done.output
    assert "finished" in done.output
    machine.require_cuda()
    assert "CSAN detected" not in done.output


def test_the_sanitizer_reports_a_race(machine: Machine, tmp_path: Path) -> None:
    machine.require_cuda()
    done = _sanitized(machine, tmp_path, "race")
    assert done.code != 0
    assert "CSAN detected a possible data race" in done.output


def test_no_kernel_accesses_memory_out_of_bounds(machine: Machine, tmp_path: Path) -> None:
    machine.require_cuda()
    # Its other tools would report false errors, since the no-op collectives write nothing.
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("needs compute-sanitizer of the CUDA toolkit")
    tool = [program, "--tool", "memcheck", "--error-exitcode", "9"]
    # Without the caching allocator, an out-of-bounds access does not hit a neighbor in its block.
    environment: dict[str, str | None] = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    words = [*tool, *STEPS, *CASES[-1]]
    done = run_command(machine, words, tmp_path / "log", environment=environment)
    assert done.code == 0, done.output[-2000:]
