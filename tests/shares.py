"""Selection of a share of the longer tests by commit.

The tests marked `functional` take about two hours. Continuous integration runs a different
share of them for each commit: all tests run over time, and the same commit repeats a failure.
"""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path


def commit_of(root: Path) -> str:
    """Return the commit of a working tree; empty if it is not a git repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


def is_chosen(name: str, one_in: int, chosen_by: str) -> bool:
    """Return whether a test is part of the share.

    Args:
        name: Name of the test.
        one_in: The share selects one in this number of tests.
        chosen_by: A seed, such as the commit.
    """
    return zlib.crc32(f"{chosen_by} {name}".encode()) % one_in == 0
