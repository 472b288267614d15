"""Events of a step: phases of units, and memory that temporary buffers and main gradients get.

A root's units share one `Observer`. Diagnostics subscribe to it; without subscribers no event is
made. It belongs to the lowest room that emits events.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron_fsdp_v2.memory.allocator import TemporaryBuffer

__all__ = [
    "BufferAcquired",
    "BufferReleasing",
    "Event",
    "MainGradientAllocated",
    "Observer",
    "PhaseBegan",
    "PhaseEnded",
    "Subscriber",
]


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    """The host begins a phase of a unit or of a parameter group.

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
    """The host ends a phase; see `PhaseBegan`. Also emitted when an exception ends it."""

    owner: str
    phase: str


@dataclass(frozen=True, slots=True)
class BufferAcquired:
    """A temporary buffer was given memory, on the current stream."""

    buffer: TemporaryBuffer


@dataclass(frozen=True, slots=True)
class BufferReleasing:
    """The memory of a temporary buffer is about to be taken away."""

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


Event = PhaseBegan | PhaseEnded | BufferAcquired | BufferReleasing | MainGradientAllocated
Subscriber = Callable[[Event], None]

_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


class Observer:
    """Passes events to subscribers, in the order in which they subscribed.

    Attributes:
        subscribers: Everyone who receives events. Plain, since every buffer asks in every step.
    """

    __slots__ = ("subscribers",)

    def __init__(self) -> None:
        self.subscribers: tuple[Subscriber, ...] = ()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Pass events to `subscriber` from now on."""
        self.subscribers = (*self.subscribers, subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Pass no more events to `subscriber`. Nothing happens if it does not subscribe."""
        self.subscribers = tuple(each for each in self.subscribers if each != subscriber)

    def emit(self, event: Event) -> None:
        """Pass an event to all subscribers."""
        for subscriber in self.subscribers:
            subscriber(event)

    def phase(self, owner: str, phase: str) -> AbstractContextManager[Any]:
        """Emit the begin and the end of a phase around a block; see `PhaseBegan`."""
        return self._phase(owner, phase) if self.subscribers else _NOTHING

    @contextlib.contextmanager
    def _phase(self, owner: str, phase: str) -> Iterator[None]:
        self.emit(PhaseBegan(owner, phase))
        try:
            yield
        finally:
            self.emit(PhaseEnded(owner, phase))

    def acquire(self, buffer: TemporaryBuffer) -> torch.Tensor:
        """Give a buffer memory and emit that; see `TemporaryBuffer.acquire`."""
        if not self.subscribers or buffer.is_live:
            return buffer.acquire()
        tensor = buffer.acquire()
        self.emit(BufferAcquired(buffer))
        return tensor

    def release(self, buffer: TemporaryBuffer) -> None:
        """Emit that a buffer loses its memory and take it away. Idempotent."""
        if self.subscribers and buffer.is_live:
            self.emit(BufferReleasing(buffer))
        buffer.release()
