"""Write a checkpoint into a temporary folder and rename it; one save at a time to one path.

Temporary folders have a random token in their name and a mark inside. Folders without both belong
to somebody else and are never touched.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
import time
import warnings
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from megatron_fsdp_v2.checkpoint.manifest import MANIFEST
from megatron_fsdp_v2.checkpoint.metadata import INCOMPLETE, METADATA

__all__ = [
    "PREVIOUS",
    "acquire_lock",
    "check_replaceable",
    "find_folder",
    "interrupted_saves",
    "make_temporary",
    "put_in_place",
    "put_new",
    "release_lock",
    "remove_leftovers",
    "remove_own",
    "sync",
    "temporary_name",
]

PREVIOUS = ".previous"
"""Suffix of a checkpoint that is being replaced, until it is removed."""

_MARK = ".unfinished-save"
_MARK_TEXT = "megatron_fsdp_v2 is writing this folder, or was stopped while it did\n"
_TOKEN = r"[0-9a-f]{32}"
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")

_ATTEMPTS = 20
_PAUSE_S = 0.01


def acquire_lock(target: Path) -> BaseFileLock:
    """Acquire the right to save to a path, from the first rank. The system frees a dead process's.

    Raises:
        RuntimeError: Another save to it is under way; names its process.
    """
    file = target.with_name(f".{target.name}.save-lock")
    # A background thread may release it.
    lock = FileLock(file, thread_local=False)
    own = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        lock.acquire(blocking=False)
    except Timeout:
        owner = ""
        with contextlib.suppress(OSError):
            owner = file.read_text()
        if owner.startswith(own):
            raise RuntimeError(
                f"a save to {target} is under way; wait for the result() of its future first"
            ) from None
        raise RuntimeError(
            f"a save to {target} by another job is under way ({owner or 'another process'}); name "
            "another folder, or wait until that job is done"
        ) from None
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    # Who holds it is only for the error of another job.
    with contextlib.suppress(OSError):
        file.write_text(f"{own} since {now}")
    return lock


def release_lock(lock: BaseFileLock) -> None:
    """Let others save to the path."""
    # First the file: whoever waits for it finds out that it is gone, and makes another one.
    with contextlib.suppress(OSError):
        os.unlink(lock.lock_file)
    lock.release()


def temporary_name(target: Path, token: str) -> Path:
    """Where a checkpoint is written before it is renamed to `target`."""
    return target.with_name(f"{target.name}.{token}{INCOMPLETE}")


def make_temporary(folder: Path) -> None:
    """Make a folder to write to, and mark it as one."""
    folder.mkdir(parents=True)
    (folder / _MARK).write_text(_MARK_TEXT)


def check_replaceable(target: Path, *, or_unfinished: bool = False) -> None:
    """Refuse to put a checkpoint where something else is.

    Args:
        target: Where it is to be.
        or_unfinished: Whether to accept a folder with nothing but the files of an interrupted save
            of torch's.

    Raises:
        ValueError: There is something that is not a checkpoint.
    """
    if not target.exists() or (target / MANIFEST).exists() or (target / METADATA).exists():
        return
    names = os.listdir(target) if target.is_dir() else [target.name]
    unfinished = [n for n in names if n == f"{METADATA}.tmp" or _DATA_FILE.fullmatch(n)]
    if names and not (or_unfinished and names == unfinished):
        raise ValueError(
            f"{target} exists and is not a checkpoint; name a folder that does not exist or is "
            "empty, or remove it"
        )


def remove_leftovers(target: Path) -> None:
    """Remove what interrupted saves to a path left. The caller holds the lock of the path."""
    folders = _own(target, INCOMPLETE)
    if target.exists():
        folders += _own(target, PREVIOUS)
    for folder in folders:
        # What cannot be removed is in nobody's way.
        with contextlib.suppress(OSError):
            remove_own(folder)


def interrupted_saves(target: Path) -> list[Path]:
    """Incomplete folders that interrupted saves to a path left."""
    return _own(target, INCOMPLETE)


def remove_own(folder: Path) -> None:
    """Remove a checkpoint, or the part of one that was written; other files in it stay."""
    with contextlib.suppress(FileNotFoundError):
        if not (folder / _MARK).exists():
            # Nobody takes a folder without metadata for a checkpoint. Renaming needs no space on a
            # full disk.
            try:
                (folder / METADATA).rename(folder / _MARK)
            except FileNotFoundError:
                (folder / _MARK).touch()
        others = []
        for name in sorted(os.listdir(folder)):
            if name in (METADATA, f"{METADATA}.tmp", MANIFEST) or _DATA_FILE.fullmatch(name):
                (folder / name).unlink(missing_ok=True)
            elif name != _MARK:
                others.append(name)
        # The mark goes last: an interrupted removal can be continued.
        (folder / _MARK).unlink(missing_ok=True)
        if not others:
            folder.rmdir()
            return
        warnings.warn(
            f"{folder} is left: {', '.join(others)} in it belong to no checkpoint, and were in "
            "one that was replaced",
            skip_file_prefixes=(str(Path(__file__).parent),),
        )


def put_in_place(folder: Path, target: Path, *, or_unfinished: bool = False) -> None:
    """Put a complete checkpoint in its place; what was there is removed afterwards.

    If there is a checkpoint, it is renamed first. A process that is killed in between leaves it
    where `find_folder` finds it.

    Args:
        folder: The checkpoint.
        target: Its place.
        or_unfinished: See `check_replaceable`.

    Raises:
        ValueError: There is something that is not a checkpoint.
        OSError: It could not be renamed; the path is unchanged.
    """
    check_replaceable(target, or_unfinished=or_unfinished)
    previous = folder.with_name(folder.name.removesuffix(INCOMPLETE) + PREVIOUS)
    (folder / _MARK).unlink(missing_ok=True)
    if target.exists() and os.listdir(target):
        target.rename(previous)
    try:
        folder.rename(target)
    except OSError:
        if previous.exists():
            previous.rename(target)
        raise
    sync(target.parent)
    # The new checkpoint is complete, whatever becomes of the old ones.
    with contextlib.suppress(OSError):
        remove_own(previous)
        remove_leftovers(target)


def put_new(folder: Path, target: Path) -> None:
    """Put a complete checkpoint where nothing is.

    Raises:
        ValueError: There is something.
    """
    if os.path.lexists(target):
        raise ValueError(f"{target} already exists; remove it or name another")
    (folder / _MARK).unlink(missing_ok=True)
    folder.rename(target)
    sync(target.parent)


def find_folder(path: Path) -> Path | None:
    """Find the checkpoint at a path, or the one that an interrupted save was to replace.

    Returns:
        The path; the previous checkpoint, with a warning, if a save was killed between its two
        renames; None if there is neither.
    """
    # A save replaces what a link leads to, not the link.
    target = Path(os.path.realpath(path))
    for attempt in range(_ATTEMPTS):
        if target.exists():
            return path
        # A listing of names: looking for one after the other misses folders that are renamed.
        names = _names(target.parent)
        previous = sorted(_own(target, PREVIOUS), key=_changed)
        if attempt and previous and not target.exists():
            warnings.warn(
                f"{path} does not exist, since the save to replace it was interrupted; "
                f"{previous[-1]} is what it was to replace, and is loaded",
                skip_file_prefixes=(str(Path(__file__).parent),),
            )
            return previous[-1]
        kinds = "|".join(map(re.escape, (INCOMPLETE, PREVIOUS)))
        left = re.compile(re.escape(target.name) + rf"(\.{_TOKEN}({kinds}))?")
        if not any(left.fullmatch(name) for name in names):
            return None
        time.sleep(_PAUSE_S)
    return None


def sync(path: Path) -> None:
    """Write a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _changed(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _own(target: Path, suffix: str) -> list[Path]:
    """Folders that saves to a path made: by their names, and by what is in them."""
    pattern = re.compile(re.escape(target.name) + rf"\.{_TOKEN}" + re.escape(suffix))
    found = [target.with_name(n) for n in _names(target.parent) if pattern.fullmatch(n)]
    return [folder for folder in found if not folder.is_symlink() and _is_own(folder)]


def _is_own(folder: Path) -> bool:
    # Nothing at all is in a folder that was made and not yet marked.
    is_marked = (folder / _MARK).is_file() or (folder / METADATA).is_file()
    return is_marked or (folder.is_dir() and not _names(folder))
