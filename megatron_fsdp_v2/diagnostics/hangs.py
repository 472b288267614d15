"""Files that say which collective every rank has reached, and where it is if it hangs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from megatron_fsdp_v2.comm import record
from megatron_fsdp_v2.comm.record import RECORD


def watch_collectives(
    folder: str | Path,
    *,
    stalled_after_s: float = 300.0,
    on_signal: signal.Signals | None = signal.SIGUSR1,
) -> Callable[[], None]:
    """Write what this rank communicates, and where it is when a collective fails or stalls.

    Every rank keeps its latest collectives by unit in `rank_<rank>.ring`, which remains however its
    process ends. When a collective fails or stalls, and on a signal, it writes `rank_<rank>.json`,
    where its main thread is and why the file is written, and a copy of the first file,
    `rank_<rank>.reported`. `megatron-fsdp-v2 hang FOLDER` compares the files of all ranks and says
    which rank differs, and at which unit. Files of an earlier run are moved to `FOLDER/previous`.
    Call it on every rank, in the main thread, after the process group is initialized.

    Args:
        folder: Folder of the files, which all ranks can write. It is created.
        stalled_after_s: Seconds without a new collective after which the report is written.
        on_signal: Signal upon which the report is written, also while the main thread waits in a
            collective. None: no signal.

    Returns:
        A function that ends the watch.

    Raises:
        ValueError: `stalled_after_s` is not above 0, or the signal has a handler already, or is to
            be handled although another thread than the main one calls.
        OSError: The folder or a file in it cannot be written.
    """
    if stalled_after_s <= 0:
        raise ValueError(f"stalled_after_s must be above 0, got {stalled_after_s}")
    if on_signal is not None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("a signal can be handled in the main thread only; pass on_signal=None")
        if signal.getsignal(on_signal) not in (signal.SIG_DFL, signal.SIG_IGN):
            raise ValueError(
                f"{on_signal.name} has a handler already; end an earlier watch, or pass another "
                "on_signal, or None"
            )
    Path(folder).mkdir(parents=True, exist_ok=True)
    watch = _Watch(Path(folder), stalled_after_s, on_signal)
    return watch.end


_OWN_FILES = (__file__, record.__file__)


class _Watch:
    """A thread that writes the file. Python's own handlers run in the main thread, which waits."""

    def __init__(self, folder: Path, stalled_after_s: float, on: signal.Signals | None) -> None:
        rank = dist.get_rank()
        self._path = folder / f"rank_{rank}.json"
        self._ring, self._reported = map(self._path.with_suffix, (".ring", ".reported"))
        for path in (self._path, self._ring, self._reported):
            if path.exists():
                (folder / "previous").mkdir(exist_ok=True)
                path.replace(folder / "previous" / path.name)
        RECORD.open(self._ring, rank, dist.get_world_size())
        self._stalled_after_s = stalled_after_s
        self._main = threading.main_thread().ident
        self._lock = threading.Lock()
        self._reader, self._writer = os.pipe()
        self._is_over = False
        self._signal = on
        if on is not None:
            os.set_blocking(self._writer, False)
            self._previous = signal.signal(on, self._ignore)
            # The interpreter writes a byte here at once, without running Python.
            self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        RECORD.on_failure.append(self._write)
        self._thread = threading.Thread(target=self._run, name="fsdp-hangs", daemon=True)
        self._thread.start()

    def _ignore(self, number: int, frame: FrameType | None) -> None:
        del number, frame

    def _run(self) -> None:
        reported = None
        while not self._is_over:
            ready, _, _ = select.select([self._reader], [], [], min(1.0, self._stalled_after_s / 4))
            numbers = os.read(self._reader, 64) if ready else b""
            if self._signal is not None and self._signal.value in numbers:
                self._write(f"signal {self._signal.name}")
            latest = RECORD.latest_at
            if latest is None or latest == reported:
                continue
            if time.time() - latest > self._stalled_after_s:
                reported = latest
                self._write(f"no collective for {self._stalled_after_s:g} s")

    def _write(self, reason: str) -> None:
        frame = sys._current_frames().get(self._main or 0)
        while frame is not None and frame.f_code.co_filename in _OWN_FILES:
            frame = frame.f_back
        data: dict[str, Any] = {
            "reason": reason,
            "at": time.time(),
            "stack": [
                f"{part.filename}:{part.lineno} {part.name}"
                for part in (traceback.extract_stack(frame) if frame is not None else ())
            ],
        }
        # A disk that is full must not replace the error of the collective.
        with self._lock, contextlib.suppress(OSError):
            partial = self._path.with_suffix(".partial")
            # The collectives up to now, since the training may go on.
            for path, content in (
                (self._reported, self._ring.read_bytes()),
                (self._path, json.dumps(data).encode()),
            ):
                partial.write_bytes(content)
                partial.replace(path)

    def end(self) -> None:
        """End the watch. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        RECORD.on_failure.remove(self._write)
        RECORD.close()
        if self._signal is not None:
            signal.set_wakeup_fd(self._previous_fd)
            signal.signal(self._signal, self._previous)
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)
