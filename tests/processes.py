"""Programs that tests run in a subprocess, and what is live in this process."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def ran(
    *words: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program; return its exit code and output. The caller checks the exit code."""
    return subprocess.run(
        words, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True, check=False
    )


def resident_nbytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def num_open_files() -> int:
    """Return the number of open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def num_live_tensors() -> int:
    """Return the number of live tensors: the smallest of ten readings over more than a second.

    gloo's threads may hold the tensor of a collective after it has returned: in a measurement on
    two busy cores, after one collective of six, for up to 0.1 s.
    """
    gc.collect()
    readings = []
    for _ in range(10):
        live = (issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        readings.append(sum(live))
        time.sleep(0.1)
    return min(readings)
