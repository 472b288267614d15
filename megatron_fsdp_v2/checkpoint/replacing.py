"""Write a checkpoint into a temporary folder and rename it; one save at a time to one path.

Temporary folders have a random token in their names. Of what is in them, only files with names of
a checkpoint are ever removed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from megatron_fsdp_v2.checkpoint.errors import warn
from megatron_fsdp_v2.checkpoint.manifest import INCOMPLETE, MANIFEST, METADATA

PREVIOUS = ".previous"
"""Suffix of a checkpoint that is being replaced, until it is removed."""

_TOKEN = r"[0-9a-f]{32}"
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")

_ATTEMPTS = 20
_PAUSE_S = 0.01
_PATIENCE_S = 0.1


class NotRestoredError(OSError):
    """A checkpoint was renamed for a new one, and neither could be given its path.

    Attributes:
        previous: Where the checkpoint is now. `find_folder` finds it there.
    """

    def __init__(self, error: OSError, previous: Path) -> None:
        super().__init__(*error.args)
        self.previous = previous


def acquire_lock(target: Path) -> BaseFileLock:
    """Acquire the lock of a path, on the first rank. The system releases it when a process dies.

    Raises:
        RuntimeError: Another save to it is under way; names its process.
    """
    file = target.with_name(f".{target.name}.save-lock")
    # A background thread may release it.
    lock = FileLock(file, thread_local=False)
    try:
        # Long enough for a save that is finishing, and for a new owner to write its name.
        lock.acquire(timeout=_PATIENCE_S, poll_interval=_PAUSE_S)
    except Timeout:
        owner = "another process"
        with contextlib.suppress(OSError):
            owner = file.read_text() or owner
        raise RuntimeError(
            f"a save to {target} is under way, by {owner}; wait for the result() of its future, or "
            "until that job is done, or name another folder"
        ) from None
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    # The owner is recorded only for the error message of another job.
    with contextlib.suppress(OSError):
        file.write_text(f"process {os.getpid()} on {socket.gethostname()} since {now}")
    return lock


def release_lock(lock: BaseFileLock) -> None:
    """Release the lock of a path."""
    # The file goes first: a waiting process detects that it is gone and creates a new one.
    with contextlib.suppress(OSError):
        os.unlink(lock.lock_file)
    lock.release()


def temporary_name(target: Path, token: str) -> Path:
    """Where a checkpoint is written before it is renamed to `target`."""
    return target.with_name(f"{target.name}.{token}{INCOMPLETE}")


def check_absent(path: Path) -> None:
    """Check that nothing is at a path, not even a dangling link.

    Raises:
        ValueError: Something is.
    """
    if os.path.lexists(path):
        raise ValueError(f"{path} already exists; remove it or name another")


@contextlib.contextmanager
def created(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Create several files or a checkpoint, all of them or none; the last one appears last.

    Args:
        paths: What to create; existing ones are not changed.

    Yields:
        Temporary paths to write them to.

    Raises:
        ValueError: One of them already exists.
        OSError: One of them cannot be written; names it, not its temporary path.
    """
    for path in paths:
        check_absent(path)
    token = uuid.uuid4().hex
    unfinished = [temporary_name(path, token) for path in paths]
    placed: list[Path] = []
    try:
        yield unfinished
        for written, path in zip(unfinished, paths, strict=True):
            sync(written)
            # Writing may take long, and a rename would replace a file that was created meanwhile.
            check_absent(path)
            written.rename(path)
            placed.append(path)
    except BaseException as error:
        for path in placed:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            for written, path in zip(unfinished, paths, strict=True):
                if str(error.filename).startswith(str(written)):
                    raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        for written in unfinished:
            if written.is_dir():
                remove_own(written)
            else:
                written.unlink(missing_ok=True)
    sync(paths[0].parent)


def check_replaceable(target: Path) -> None:
    """Refuse to put a checkpoint where something else is.

    Checkpoints, empty folders, and the files of an interrupted save of torch's are replaced.

    Raises:
        ValueError: There is something that is not a checkpoint.
    """
    if not target.exists() or (target / MANIFEST).exists() or (target / METADATA).exists():
        return
    names = os.listdir(target) if target.is_dir() else [target.name]
    if not all(n == f"{METADATA}.tmp" or _DATA_FILE.fullmatch(n) for n in names):
        raise ValueError(
            f"{target} exists and is not a checkpoint; name a folder that does not exist or is "
            "empty, or remove it"
        )


def remove_leftovers(target: Path) -> None:
    """Remove what interrupted saves to a path left. The caller holds the lock of the path."""
    left = _temporary(target, INCOMPLETE)
    if target.exists():
        left += _temporary(target, PREVIOUS)
    for folder in left:
        # A leftover that cannot be removed does not affect later saves.
        with contextlib.suppress(OSError):
            remove_own(folder)


def remove_own(folder: Path) -> None:
    """Remove a checkpoint, or the part of one that was written; other files in it stay."""
    with contextlib.suppress(FileNotFoundError):
        # The metadata goes first: a folder without metadata is not a checkpoint.
        own = [METADATA, f"{METADATA}.tmp", MANIFEST]
        own += filter(_DATA_FILE.fullmatch, os.listdir(folder))
        is_one = any((folder / name).exists() for name in own)
        for name in own:
            (folder / name).unlink(missing_ok=True)
        others = sorted(os.listdir(folder))
        if not others:
            folder.rmdir()
        elif is_one:
            warn(
                f"{folder} is left: {', '.join(others)} in it belong to no checkpoint, and were in "
                "one that was replaced"
            )


def put_in_place(folder: Path, target: Path) -> None:
    """Move a complete checkpoint to its path, and remove the previous one there afterwards.

    If there is a checkpoint, it is renamed first. A process that is killed in between leaves it
    where `find_folder` finds it.

    Args:
        folder: The checkpoint.
        target: Its path.

    Raises:
        ValueError: There is something that is not a checkpoint.
        NotRestoredError: It could not be renamed, nor could the previous one be renamed back.
        OSError: It could not be renamed; the path is unchanged.
    """
    check_replaceable(target)
    previous = folder.with_name(folder.name.removesuffix(INCOMPLETE) + PREVIOUS)
    if target.exists() and os.listdir(target):
        target.rename(previous)
    try:
        folder.rename(target)
    except OSError:
        if previous.exists():
            try:
                previous.rename(target)
            except OSError as error:
                raise NotRestoredError(error, previous) from error
        raise
    sync(target.parent)
    # The new checkpoint is complete; failures to remove the previous one are ignored.
    with contextlib.suppress(OSError):
        remove_leftovers(target)


def find_folder(path: Path) -> Path | None:
    """Find the checkpoint at a path, or the one that an interrupted save was to replace.

    Returns:
        The path; the previous checkpoint, with a warning, if a save was killed between its two
        renames; None if there is neither.
    """
    # A save replaces what a link leads to, not the link.
    target = Path(os.path.realpath(path))
    left = re.compile(re.escape(target.name) + rf"(\.{_TOKEN}({INCOMPLETE}|{PREVIOUS}))?")
    for _ in range(_ATTEMPTS):
        if target.exists():
            return path
        # One listing of names: two looks, one after the other, may miss a folder that is renamed.
        if not any(left.fullmatch(name) for name in _names(target.parent)):
            return None
        time.sleep(_PAUSE_S)
    previous = [f for f in _temporary(target, PREVIOUS) if (f / METADATA).is_file()]
    if not previous:
        return None
    newest = max(previous, key=lambda folder: folder.stat().st_mtime)
    warn(
        f"{path} does not exist, since a save was interrupted while it replaced the folder; "
        f"loading the previous checkpoint, {newest}"
    )
    return newest


def sync(path: Path) -> None:
    """Write a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.listdir(folder))
    return []


def _temporary(target: Path, suffix: str) -> list[Path]:
    """Return temporary or previous folders of saves to a path."""
    pattern = re.compile(re.escape(target.name) + rf"\.{_TOKEN}{suffix}")
    found = [target.with_name(n) for n in _names(target.parent) if pattern.fullmatch(n)]
    return [folder for folder in found if folder.is_dir() and not folder.is_symlink()]
