"""What is wrong with a checkpoint, in one sentence for the user."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

__all__ = ["CheckpointError", "NotFoundError", "ReplacedError", "naming_full_disk"]

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file may not become that long",
}


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete, damaged, of another model or not to be trusted."""


class NotFoundError(CheckpointError):
    """There is nothing at a path, or only checkpoints below it."""


class ReplacedError(CheckpointError):
    """Another checkpoint took the place of the one that was being read."""


@contextlib.contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Say that the disk is full where that is why something could not be written.

    `torch.save` raises "unexpected pos 704 vs 598" where a write fails, and hides the cause.

    Args:
        path: What is being written.

    Raises:
        OSError: The disk is full, or the system does not let a file become that long.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno in _FULL:
                raise OSError(cause.errno, _FULL[cause.errno], str(path)) from error
            cause = cause.__cause__ or cause.__context__
        raise
