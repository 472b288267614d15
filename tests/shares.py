"""A share of the longer tests: one in so many, chosen by the commit.

Everything marked `functional` takes most of an hour. Continuous integration runs a share of it that
is another one for every commit, so that all of it has its turn and a failure can be repeated.
"""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path


def commit_of(root: Path) -> str:
    """The commit a working tree is at; empty where it is none of git's."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


def is_chosen(name: str, one_in: int, chosen_by: str) -> bool:
    """Whether a test is part of the share.

    Args:
        name: The test's.
        one_in: How many tests there are for each that is chosen.
        chosen_by: Any text; another one makes another choice.
    """
    return zlib.crc32(f"{chosen_by} {name}".encode()) % one_in == 0
