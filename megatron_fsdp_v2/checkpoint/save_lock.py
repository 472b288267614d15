"""One save at a time to one path, whoever asks for it: a lock file beside the folder.

It is created with O_EXCL, which network file systems get right too, and says who holds it. The
lock of a process that is known to have ended is taken over. Of a process that cannot be asked (on
another machine, in another container) the file tells: its holder touches it as long as it runs.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from megatron_fsdp_v2.checkpoint.errors import CheckpointError

__all__ = ["STALE_S", "SaveLock", "lock_file_of"]

BEAT_S = 20.0
"""A lock is touched this often, in seconds."""
STALE_S = 300.0
"""A lock that was not touched for so many seconds is that of a process that ended."""

_FORMAT = "megatron_fsdp_v2.save_lock"
_ATTEMPTS = 20
_PAUSE_S = 0.05

_HELD: set[str] = set()
"""Tokens of the locks of this process."""


def lock_file_of(target: Path) -> Path:
    """The lock file of a checkpoint's folder."""
    return target.with_name(f".{target.name}.save-lock")


class SaveLock:
    """The right to save to a path. Made by the first rank alone, and held until `release`.

    Args:
        target: The folder that is to be saved to.

    Raises:
        RuntimeError: Another save to it is under way; says whose.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._path = lock_file_of(target)
        self._token = uuid.uuid4().hex
        # Before there is a file: another thread must not take it for one that was left behind.
        _HELD.add(self._token)
        try:
            self._file = self._acquired()
        except BaseException:
            _HELD.discard(self._token)
            raise
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="checkpoint-lock", daemon=True).start()

    def check(self) -> None:
        """Find out whether it is still held.

        Raises:
            CheckpointError: Somebody removed the file or took it over.
        """
        if _owner(_content(self._path)).get("token") != self._token:
            raise CheckpointError(
                f"{self._path} was removed or taken over while {self._target} was being saved"
            )

    def release(self) -> None:
        """Let others save. May be called twice."""
        if self._released.is_set():
            return
        self._released.set()
        _HELD.discard(self._token)
        if _owner(_content(self._path)).get("token") == self._token:
            self._path.unlink(missing_ok=True)
        os.close(self._file)

    def _acquired(self) -> int:
        content = json.dumps(_self_description(self._token)).encode()
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileExistsError):
                return self._created(content)
            found = _content(self._path)
            if found is None:
                continue
            if not _is_stale(self._path, _owner(found)):
                raise RuntimeError(self._refusal(_owner(found)))
            if not _remove_stale(self._path, found):
                time.sleep(_PAUSE_S)
        raise RuntimeError(self._refusal(_owner(_content(self._path))))

    def _created(self, content: bytes) -> int:
        file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            while content:
                # All of it, or an error: of a disk that becomes full some bytes are written.
                content = content[os.write(file, content) :]
            os.fsync(file)
        except BaseException:
            # An empty lock would keep everybody out until it is stale.
            os.close(file)
            self._path.unlink(missing_ok=True)
            raise
        return file

    def _refusal(self, owner: dict[str, Any]) -> str:
        who = (
            f"process {owner.get('pid')} on {owner.get('host')} has been saving to it since "
            f"{owner.get('since')}"
            if owner
            else "another process is beginning to save to it"
        )
        return (
            f"a save to {self._target} by another job is under way: {who}; name another folder, or "
            f"remove {self._path} if you know that job to have ended"
        )

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._file)


def _self_description(token: str) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "token": token,
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "started": _start_of(os.getpid()),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _machine() -> str:
    """Where a process id means the same process: one boot of one machine, one namespace of ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _start_of(pid: int) -> str | None:
    """When a process started, in the system's ticks; None where it ended or cannot be found."""
    try:
        # The name in parentheses may hold anything, spaces included.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A killed process stays as a zombie until its parent asks for it.
    return None if fields[0] in "ZX" else fields[19]


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _owner(content: bytes | None) -> dict[str, Any]:
    """Who holds a lock; empty while it is being written, or where the file is none."""
    try:
        found = json.loads(content or b"")
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.get("format") == _FORMAT else {}


def _is_stale(path: Path, owner: dict[str, Any]) -> bool:
    if owner.get("machine") != _machine():
        return _untouched_s(path) > STALE_S
    pid = int(owner["pid"])
    if pid == os.getpid():
        return owner["token"] not in _HELD
    if Path("/proc/self/stat").exists():
        return _start_of(pid) != str(owner["started"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _untouched_s(path: Path) -> float:
    """Seconds since a file was touched, by the clock of the file system it is on."""
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def _remove_stale(path: Path, content: bytes) -> bool:
    """Remove a lock whose holder has ended; False where another process is about to.

    Two that find the same stale lock must not remove the one that either of them made in its place.
    """
    claim = path.with_name(f"{path.name}.{hashlib.sha256(content).hexdigest()[:32]}")
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        if _untouched_s(claim) > STALE_S:
            claim.unlink(missing_ok=True)
        return False
    try:
        if _content(path) == content:
            path.unlink()
        return True
    finally:
        claim.unlink(missing_ok=True)
