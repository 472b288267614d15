"""Virtual time: a host that queues work, and queues that do it one after the other."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Queue", "Timeline"]


@dataclass(slots=True, eq=False)
class Queue:
    """Work that is done in order: a stream, a communicator, a link.

    Attributes:
        name: For reports.
        ready: Moment in seconds at which everything queued so far is done.
        busy: Seconds it has worked; the rest of the time it waited, or had nothing to do.
    """

    name: str
    ready: float = 0.0
    busy: float = 0.0


class Timeline:
    """The moment at which the host is, and all queues.

    When work is queued it is known at once when it begins and ends, so that nobody ever sleeps, and
    every run gives the same times.

    Attributes:
        queues: By name.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self.queues: dict[str, Queue] = {}

    @property
    def now(self) -> float:
        """The host's moment in seconds."""
        return self._now

    def queue(self, name: str) -> Queue:
        """The queue of a name, made where there is none."""
        return self.queues.setdefault(name, Queue(name))

    def run(self, seconds: float, *queues: Queue) -> float:
        """Have work done that takes all of these queues at a time; return when it ends.

        It begins when the host has asked for it and the last of the queues is free.
        """
        begin = max(self.now, *(queue.ready for queue in queues))
        for queue in queues:
            queue.ready = begin + seconds
            queue.busy += seconds
        return begin + seconds

    def wait(self, until: float) -> None:
        """Have the host wait for a moment, if that is to come."""
        self._now = max(self._now, until)
