"""The latest collectives that this process issued, in a file that says where a training hangs.

Ranks of a process group issue the same collectives in the same order, so that equal numbers in a
group belong together.

An entry is written when its collective is issued, since a process may end without another chance:
gloo ends one that communicates another size than its peer. A written page belongs to the system
and outlives the process. It is not mapped memory, whose pages end a process if the disk is full.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

SIZE = 1 << 12
"""Number of entries that are kept."""

_ENTRY = struct.Struct("<IIQQd")
"""An entry: its number in its process group, from 1, the number of its pass, the index of its
description, the bytes of the larger one of its tensors, and seconds since the epoch."""

_HEADER = 1 << 12
"""Bytes before the entries: a line of JSON. Further lines behind them describe entries and process
groups when they first occur."""


class CollectiveRecord:
    """Records the latest collectives of this process.

    Attributes:
        passed: Number of the pass under way, and its kind.
        latest_at: Time of the latest entry; None if there is none.
        on_failure: Functions that are called when a collective fails, with its description.
    """

    def __init__(self) -> None:
        self.passed = (0, "")
        self.latest_at: float | None = None
        self.on_failure: list[Callable[[str], object]] = []
        self._numbers: dict[str, int] = {}
        self._file: int | None = None
        self._num_entries = 0
        self._known: dict[tuple[str, str, int, str], int] = {}
        self._known_groups: set[str] = set()

    def begin(self, kind: str) -> None:
        """Record the beginning of a pass."""
        self.passed = self.passed[0] + 1, kind

    def add(self, name: str, kind: enum.Enum, nbytes: int, group: dist.ProcessGroup) -> None:
        """Add a collective that is about to be issued.

        Args:
            name: Name of the communicated buffers, such as `layers.3/0`.
            kind: Kind of the collective.
            nbytes: Bytes of the larger one of its tensors.
            group: Its process group.
        """
        where = group.group_name
        number = self._numbers.get(where, 0) + 1
        self._numbers[where] = number
        if self._file is None:
            return
        passed, pass_kind = self.passed
        # The hash of a member of an Enum is a Python call.
        what = where, name, id(kind), pass_kind
        known = self._known.get(what)
        if known is None:
            known = self._known[what] = len(self._known)
            self._describe(group, [where, name, kind.value, pass_kind])
        self.latest_at = time.time()
        entry = _ENTRY.pack(number, passed, known, nbytes, self.latest_at)
        place = _HEADER + self._num_entries % SIZE * _ENTRY.size
        self._num_entries += 1
        try:
            os.pwrite(self._file, entry, place)
        except OSError:
            # A full disk must not end the training.
            self.close()

    def failed(self, what: str) -> None:
        """Report that a collective failed."""
        for report in list(self.on_failure):
            report(what)

    def open(self, path: Path, rank: int, world_size: int) -> None:
        """Begin to write entries to a file, which is replaced.

        Raises:
            OSError: The file cannot be written.
        """
        header = {"rank": rank, "world_size": world_size, "entry": _ENTRY.format}
        header |= {"begin": _HEADER, "end": _HEADER + SIZE * _ENTRY.size}
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        first = json.dumps(header).encode().ljust(_HEADER - 1) + b"\n"
        os.write(file, first + bytes(SIZE * _ENTRY.size))
        self._file, self._num_entries, self.latest_at = file, 0, None
        self._known.clear()
        self._known_groups.clear()

    def close(self) -> None:
        """Write no further entries, and number the next collectives from 1. Keeps the file."""
        self._numbers.clear()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _describe(self, group: dist.ProcessGroup, entry: list[str]) -> None:
        """Append the description of an entry, and of its process group if that is new."""
        lines: list[dict[str, Any]] = [{"entry": entry}]
        if group.group_name not in self._known_groups:
            self._known_groups.add(group.group_name)
            ranks = dist.get_process_group_ranks(group)
            lines.append({"group": group.group_name, "ranks": ranks})
        with contextlib.suppress(OSError):
            os.write(self._file or 0, b"".join(json.dumps(line).encode() + b"\n" for line in lines))


RECORD = CollectiveRecord()
"""The collectives of this process."""
