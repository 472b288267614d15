"""Putting a checkpoint in the place of another, and finding one that is being replaced.

A folder is written under a name of its own, which no other save uses. Names end in a token, and a
folder that is being written is marked inside: what has no mark was made by somebody else, and is
never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.manifest import MANIFEST, Manifest
from megatron_fsdp_v2.checkpoint.metadata import INCOMPLETE, METADATA

__all__ = [
    "PREVIOUS",
    "check_replaceable",
    "find_folder",
    "interrupted_saves",
    "make_temporary",
    "put_in_place",
    "put_new",
    "remove_leftovers",
    "remove_own",
    "sync",
    "temporary_name",
]

PREVIOUS = ".previous"
"""Suffix of a checkpoint that a new one has taken the place of, until it is removed."""

_MARK = ".unfinished-save"
_MARK_TEXT = "megatron_fsdp_v2 is writing this folder, or was stopped while it did\n"
_TOKEN = r"[0-9a-f]{32}"
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")

_ATTEMPTS = 20
_PAUSE_S = 0.01

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def temporary_name(target: Path, token: str) -> Path:
    """Where what will be at a path is written."""
    return target.with_name(f"{target.name}.{token}{INCOMPLETE}")


def make_temporary(folder: Path) -> None:
    """Make a folder to write to, and mark it as one."""
    folder.mkdir(parents=True)
    (folder / _MARK).write_text(_MARK_TEXT)


def check_replaceable(target: Path, *, or_unfinished: bool = False) -> None:
    """Refuse to put a checkpoint where something else is.

    Args:
        target: Where one is to be.
        or_unfinished: Whether a folder may be there with nothing in it but what a save of torch's
            leaves that was stopped.

    Raises:
        ValueError: There is something that is no checkpoint.
    """
    if not target.exists() or (target / MANIFEST).exists() or (target / METADATA).exists():
        return
    if _is_empty(target):
        return
    if or_unfinished and target.is_dir() and all(map(_is_unfinished, os.listdir(target))):
        return
    raise ValueError(
        f"{target} exists and is no checkpoint; name a folder that does not exist or is empty, or "
        "remove it"
    )


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not os.listdir(folder)


def _is_unfinished(name: str) -> bool:
    return name == f"{METADATA}.tmp" or _DATA_FILE.fullmatch(name) is not None


def remove_leftovers(target: Path) -> None:
    """Remove what interrupted saves to a path left. Only for who holds the lock of the path."""
    folders = list(_own(target, INCOMPLETE))
    if target.exists():
        folders += _own(target, PREVIOUS)
    for folder in folders:
        # What cannot be removed is in nobody's way.
        with contextlib.suppress(OSError):
            remove_own(folder)


def interrupted_saves(target: Path) -> list[Path]:
    """What interrupted saves to a path left incomplete."""
    return list(_own(target, INCOMPLETE))


def remove_own(folder: Path) -> None:
    """Remove a checkpoint, or the part of one that was written; other files in it stay.

    The mark goes last: what is left by an interruption is still known for what it is.
    """
    with contextlib.suppress(FileNotFoundError):
        if not (folder / _MARK).exists():
            # Metadata comes first: without, nobody takes it for a checkpoint. To rename it needs no
            # space on the disk, which may be full.
            try:
                (folder / METADATA).rename(folder / _MARK)
            except FileNotFoundError:
                (folder / _MARK).touch()
        names = set(os.listdir(folder))
        own = {METADATA, f"{METADATA}.tmp", MANIFEST, _MARK}
        own |= {name for name in names if _DATA_FILE.fullmatch(name)}
        for name in sorted(own - {_MARK}):
            (folder / name).unlink(missing_ok=True)
        others = sorted(names - own)
        if others:
            warnings.warn(
                f"{folder} is left: {', '.join(others)} in it belong to no checkpoint, and were in "
                "one that was replaced",
                skip_file_prefixes=(str(Path(__file__).parent),),
            )
        (folder / _MARK).unlink(missing_ok=True)
        if not others:
            folder.rmdir()


def put_in_place(folder: Path, target: Path, *, or_unfinished: bool = False) -> None:
    """Put a complete checkpoint where it belongs; what was there is removed afterwards.

    Where the file system can exchange two folders (Linux, on most local ones), there is a whole
    checkpoint at the path at any moment. Elsewhere there is none between two renames, and
    `find_folder` finds the previous one.

    Args:
        folder: The checkpoint.
        target: Where it belongs.
        or_unfinished: See `check_replaceable`.

    Raises:
        ValueError: There is something that is no checkpoint.
        OSError: It could not be renamed; the path is as it was.
    """
    check_replaceable(target, or_unfinished=or_unfinished)
    previous = folder.with_name(folder.name.removesuffix(INCOMPLETE) + PREVIOUS)
    (folder / _MARK).unlink(missing_ok=True)
    if not target.exists() or _is_empty(target):
        folder.rename(target)
    elif _exchanged(folder, target):
        folder.rename(previous)
    else:
        target.rename(previous)
        try:
            folder.rename(target)
        except OSError:
            previous.rename(target)
            raise
    sync(target.parent)
    # It is complete by now, whatever becomes of the old ones.
    with contextlib.suppress(OSError):
        remove_own(previous)
        remove_leftovers(target)


def put_new(folder: Path, target: Path) -> None:
    """Put a complete checkpoint where there is nothing.

    Raises:
        ValueError: There is something.
    """
    if os.path.lexists(target):
        raise ValueError(f"{target} is there already; remove it or name another")
    (folder / _MARK).unlink(missing_ok=True)
    folder.rename(target)
    sync(target.parent)


def find_folder(path: Path) -> Path | None:
    """The checkpoint at a path, or the one that was there when a save was stopped.

    Returns:
        The path; where there is nothing, and a save was stopped between two renames, the previous
        checkpoint, with a warning; None where there is neither.
    """
    # What a link leads to is replaced, not the link.
    target = Path(os.path.realpath(path))
    for _ in range(_ATTEMPTS):
        if target.exists():
            return path
        if not _is_in_listing(target):
            return None
        previous = max(_own(target, PREVIOUS), key=_changed, default=None)
        time.sleep(_PAUSE_S)
        if previous is not None and previous.exists() and not target.exists():
            warnings.warn(
                f"{path} does not exist, since the save to replace it was interrupted; "
                f"{previous} is what it was to replace, and is loaded",
                skip_file_prefixes=(str(Path(__file__).parent),),
            )
            return previous
    return None


def _is_in_listing(target: Path) -> bool:
    """Whether a folder, or one that a save to it makes or puts aside, is there at one moment.

    Looking for one name and then for another finds nothing if they are exchanged in between; a
    listing has one of them.
    """
    pattern = re.compile(
        re.escape(target.name) + rf"(\.{_TOKEN}({re.escape(INCOMPLETE)}|{re.escape(PREVIOUS)}))?"
    )
    try:
        return any(pattern.fullmatch(name) for name in os.listdir(target.parent))
    except (FileNotFoundError, NotADirectoryError):
        return False


def sync(path: Path) -> None:
    """Bring a file or folder to disk."""
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


def _own(target: Path, suffix: str) -> Iterator[Path]:
    """Folders that saves to a path made: by their names, and by what is in them."""
    pattern = re.compile(re.escape(target.name) + rf"\.{_TOKEN}" + re.escape(suffix))
    try:
        names = sorted(os.listdir(target.parent))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        folder = target.with_name(name)
        if pattern.fullmatch(name) and not folder.is_symlink() and _is_own(folder):
            yield folder


def _is_own(folder: Path) -> bool:
    if (folder / _MARK).is_file() or (folder / METADATA).is_file():
        return True
    # A name with a token and nothing in it: stopped between making it and marking it.
    if _is_empty(folder):
        return True
    try:
        return Manifest.read(folder) is not None
    except CheckpointError:
        return False


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = os.fsencode(one), os.fsencode(other)
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(one))
