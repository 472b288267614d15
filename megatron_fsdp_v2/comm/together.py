"""Collectives that are put off, to be issued in one with others like them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megatron_fsdp_v2.comm.errors import Label
from megatron_fsdp_v2.comm.interface import SUMS, Collective, CollectiveKind, Work

__all__ = ["Labeled", "Together"]

_MERGED = (CollectiveKind.ALL_GATHER, *SUMS)


class Labeled(NamedTuple):
    """A collective, and what it is for.

    Attributes:
        collective: What it does.
        label: Read where it fails.
    """

    collective: Collective
    label: Label


class _PutOff:
    """Work that is not issued yet, or is part of what is."""

    __slots__ = ("_together", "work")

    def __init__(self, together: Together) -> None:
        self._together = together
        self.work: Work | None = None

    def wait(self) -> None:
        if self.work is None:
            self._together.issue()
        # None where the context was left by an exception: nobody issued it.
        if self.work is not None:
            self.work.wait()


class Together(threading.local):
    """What is put off until the end of a context; of every thread its own.

    Args:
        issue_alike: Issues some in one, of the same kind, axis and dtypes, on the same
            communication stream; returns the work of each.
    """

    def __init__(self, issue_alike: Callable[[Sequence[Labeled]], Sequence[Work]]) -> None:
        self._issue_alike = issue_alike
        self._num_open = 0
        self._waiting: list[tuple[Labeled, _PutOff]] = []

    @property
    def is_open(self) -> bool:
        """Whether collectives are put off now."""
        return self._num_open > 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Put collectives off until the end."""
        self._num_open += 1
        try:
            yield
            if self._num_open == 1:
                self.issue()
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._waiting.clear()

    def put_off(self, collective: Collective, label: Label) -> Work:
        """Issue one at the end, or when it is waited for."""
        work = _PutOff(self)
        self._waiting.append((Labeled(collective, label), work))
        return work

    def issue(self) -> None:
        """Issue what was put off, those alike in one, in the order of the first of each."""
        waiting, self._waiting = self._waiting, []
        alike: dict[object, list[tuple[Labeled, _PutOff]]] = {}
        for labeled, work in waiting:
            alike.setdefault(_likeness(labeled.collective), []).append((labeled, work))
        for some in alike.values():
            issued = self._issue_alike([labeled for labeled, _ in some])
            for (_, put_off), part in zip(some, issued, strict=True):
                put_off.work = part


def _likeness(collective: Collective) -> object:
    """The same for collectives that can be one."""
    if collective.kind not in _MERGED:
        return id(collective)
    dtypes = collective.input.dtype, collective.output.dtype
    how = collective.comm_stream, collective.sums_in_fp32
    return collective.kind, collective.axis, *how, dtypes
