"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable(path: str | Path) -> None:
    """Check that a file can be written, before a command computes what goes into it.

    Args:
        path: The file; it may exist.

    Raises:
        ValueError: Its folder does not exist or may not be written to, or the path is a folder.
    """
    path = Path(path)
    folder = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"{path} cannot be written: it is a folder")
    if not folder.is_dir():
        raise ValueError(f"{path} cannot be written: its folder does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{path} cannot be written: permission denied")
