"""Whole steps under sanitizers: torch's for streams, NVIDIA's for accesses outside of memory."""

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
    # An outer axis is sharded only where the inner one is.
    if (strategy, outer) != ("no_shard", "optim")
]


def _sanitized(machine: Machine, folder: Path, *arguments: str) -> Run:
    environment: dict[str, str | None] = {"TORCH_CUDA_SANITIZER": "1"} if machine.on_cuda else {}
    return run_command([*STEPS, *arguments], folder / "log", environment=environment)


@pytest.mark.parametrize(("strategy", "sizes", "outer"), CASES)
def test_two_steps_have_no_report(
    machine: Machine, tmp_path: Path, strategy: str, sizes: str, outer: str
) -> None:
    if machine.is_small and (strategy, sizes, outer) != CASES[-1]:
        pytest.skip("--small")
    done = _sanitized(machine, tmp_path, strategy, sizes, outer, machine.device)
    assert done.code == 0, done.output
    assert "finished" in done.output
    machine.end_rehearsal()
    assert "CSAN detected" not in done.output


def test_the_sanitizer_reports_a_race(machine: Machine, tmp_path: Path) -> None:
    machine.end_rehearsal()
    done = _sanitized(machine, tmp_path, "race")
    assert done.code != 0
    assert "CSAN detected a possible data race" in done.output


def test_no_kernel_reaches_outside_of_memory(machine: Machine, tmp_path: Path) -> None:
    machine.end_rehearsal()
    # Other tools of it would report what is not there: collectives of these steps write nothing.
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("needs compute-sanitizer of the CUDA toolkit")
    tool = [program, "--tool", "memcheck", "--error-exitcode", "9"]
    # Every allocation by itself, or neighbors in one block would hide what reaches beyond.
    environment: dict[str, str | None] = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    words = [*tool, *STEPS, *CASES[-1]]
    done = run_command(words, tmp_path / "log", environment=environment)
    assert done.code == 0, done.output[-2000:]
