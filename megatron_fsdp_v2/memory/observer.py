"""Events of a step: phases of units, collectives, and memory of buffers and main gradients.

The units of a root share one `Observer`, to which diagnostics subscribe. Without subscribers no
event is made. This file is in `memory`, the lowest package that emits events.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fsdp_v2.comm.interface import Work
from megatron_fsdp_v2.memory.allocator import TemporaryBuffer


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    """The host begins a phase of a unit or parameter group.

    Attributes:
        owner: Name of the unit under its root, empty for the root; or of the parameter group.
        phase: `unshard`, `wait_for_unshard`, `reshard`, `pre_forward`, `post_forward`,
            `pre_backward`, `post_backward` or `reduce_grad` of a unit; `finish_reduction` of a
            group.
    """

    owner: str
    phase: str


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """The host ends a phase, normally or by an exception; see `PhaseBegan`."""

    owner: str
    phase: str


@dataclass(frozen=True, slots=True)
class BufferAcquired:
    """A temporary buffer acquired memory, on the current stream."""

    buffer: TemporaryBuffer


@dataclass(frozen=True, slots=True)
class BufferReleasing:
    """A temporary buffer is about to release its memory."""

    buffer: TemporaryBuffer


@dataclass(frozen=True, slots=True)
class MainGradientAllocated:
    """The main gradient of a parameter group was allocated.

    Attributes:
        grad_buffer: The full gradient buffer of its parameter group.
        flat: The flat tensor.
    """

    grad_buffer: TemporaryBuffer
    flat: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveIssued:
    """A collective of a parameter group, over several ranks, is about to be issued.

    Attributes:
        group: Name of the parameter group.
        kind: `all_gather`, `reduce_scatter` or `all_reduce`.
        axis: Index of the mesh axis.
        numel: Elements of the full buffer.
        itemsize: Bytes of an element.
        is_temporary: Whether the result is in a temporary buffer, such as a gathered weight.
        is_async: Whether the host returns before the collective is done.
    """

    group: str
    kind: str
    axis: int
    numel: int
    itemsize: int
    is_temporary: bool
    is_async: bool


@dataclass(frozen=True, slots=True)
class CollectiveWaiting:
    """The host, or the current stream, is about to wait for a collective."""

    issued: CollectiveIssued


@dataclass(frozen=True, slots=True)
class CollectiveWaited:
    """The host, or the current stream, has waited for a collective."""

    issued: CollectiveIssued


Event = (
    PhaseBegan
    | PhaseEnded
    | BufferAcquired
    | BufferReleasing
    | MainGradientAllocated
    | CollectiveIssued
    | CollectiveWaiting
    | CollectiveWaited
)
Subscriber = Callable[[Event], None]

_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


class Observer:
    """Passes events to subscribers, in the order of subscription.

    Attributes:
        subscribers: Functions that receive events. A plain attribute, since it is read for every
            buffer in every step.
    """

    __slots__ = ("subscribers",)

    def __init__(self) -> None:
        self.subscribers: tuple[Subscriber, ...] = ()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Pass events to `subscriber` from now on."""
        self.subscribers = (*self.subscribers, subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stop passing events to `subscriber`. No-op if it is not subscribed."""
        self.subscribers = tuple(each for each in self.subscribers if each != subscriber)

    def emit(self, event: Event) -> None:
        """Pass an event to all subscribers."""
        for subscriber in self.subscribers:
            subscriber(event)

    def phase(self, owner: str, phase: str) -> AbstractContextManager[Any]:
        """Return a context that emits the beginning and end of a phase; see `PhaseBegan`."""
        return self._phase(owner, phase) if self.subscribers else _NOTHING

    @contextlib.contextmanager
    def _phase(self, owner: str, phase: str) -> Iterator[None]:
        self.emit(PhaseBegan(owner, phase))
        try:
            yield
        finally:
            self.emit(PhaseEnded(owner, phase))

    def collective(self, event: CollectiveIssued, issue: Callable[[], Work]) -> Work:
        """Issue a collective, and emit the events of the issue and the wait."""
        self.emit(event)
        if event.is_async:
            return _ObservedWork(self, event, issue())
        self.emit(CollectiveWaiting(event))
        work = issue()
        self.emit(CollectiveWaited(event))
        return work


class _ObservedWork:
    """Work handle of a collective that emits events when it is waited for."""

    def __init__(self, observer: Observer, event: CollectiveIssued, work: Work) -> None:
        self._observer, self._event = observer, event
        self._work: Work | None = work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self._observer.emit(CollectiveWaiting(self._event))
            work.wait()
            self._observer.emit(CollectiveWaited(self._event))
