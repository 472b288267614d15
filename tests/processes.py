"""Programs that tests run in a subprocess."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

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
