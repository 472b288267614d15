"""The latest collectives that this process issued, for reports of hangs.

Always on: an entry takes well below a microsecond. Ranks of a process group issue the same
collectives in the same order, so that equal numbers in a group belong together.
"""

from __future__ import annotations

import enum
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

SIZE = 1 << 12
"""Number of entries that are kept."""


class Issued(NamedTuple):
    """A collective that this process issued.

    Attributes:
        number: Number of the collective in its process group, from 1.
        group: Name of the process group.
        name: Name of the communicated buffers, such as `layers.3/0`.
        kind: Kind of the collective.
        nbytes: Bytes of the larger one of its tensors.
        passed: Number of the pass, and its kind.
        at: Seconds since the epoch.
    """

    number: int
    group: str
    name: str
    kind: enum.Enum
    nbytes: int
    passed: tuple[int, str]
    at: float


class CollectiveRecord:
    """The latest collectives of this process.

    Attributes:
        entries: The latest ones, the newest last.
        passed: Number of the pass under way, and its kind.
        on_failure: Functions that are called when a collective fails, with its description.
    """

    def __init__(self) -> None:
        self.entries: deque[Issued] = deque(maxlen=SIZE)
        self.passed = (0, "")
        self.on_failure: list[Callable[[str], object]] = []
        self._numbers: dict[str, int] = {}
        self._groups: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def begin(self, kind: str) -> None:
        """Note that a pass begins."""
        self.passed = self.passed[0] + 1, kind

    def add(self, name: str, kind: enum.Enum, nbytes: int, group: dist.ProcessGroup) -> None:
        """Add a collective that is about to be issued."""
        where = group.group_name
        number = self._numbers.get(where, 0) + 1
        self._numbers[where] = number
        if number == 1:
            self._groups[where] = group
        self.entries.append(Issued(number, where, name, kind, nbytes, self.passed, time.time()))

    def failed(self, what: str) -> None:
        """Report that a collective failed."""
        for report in list(self.on_failure):
            report(what)

    def as_data(self) -> dict[str, Any]:
        """Return the global ranks of every process group, and the entries, as plain data."""
        # Copies: the main thread may add entries while a thread of a report reads them.
        entries = [e._asdict() | {"kind": e.kind.value} for e in self.entries.copy()]
        groups = dict(self._groups)
        ranks = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
        return {"ranks": ranks, "entries": entries}


RECORD = CollectiveRecord()
"""The collectives of this process."""
