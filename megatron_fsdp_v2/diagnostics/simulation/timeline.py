"""Virtual time: a host that queues work, and queues that run it in order."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Queue", "Timeline"]


@dataclass(slots=True, eq=False)
class Queue:
    """A queue that runs its work in order: a stream, a communicator or a link.

    Attributes:
        name: Name for reports.
        ready: Moment at which all work queued so far is done, in seconds.
        busy: Seconds of work; the queue is idle or waits in the rest of the time.
    """

    name: str
    ready: float = 0.0
    busy: float = 0.0


class Timeline:
    """The host's time, and all queues.

    The begin and the end of work are known when it is queued, so that nothing sleeps and every run
    gives the same times.

    Attributes:
        queues: By name.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self.queues: dict[str, Queue] = {}

    @property
    def now(self) -> float:
        """The host's time in seconds."""
        return self._now

    def queue(self, name: str) -> Queue:
        """The queue of a name; a new one if there is none."""
        return self.queues.setdefault(name, Queue(name))

    def run(self, seconds: float, *queues: Queue) -> float:
        """Queue work that occupies all of these queues; return the moment of its end.

        It begins at the host's time, or when the last of the queues is free.
        """
        begin = max(self.now, *(queue.ready for queue in queues))
        for queue in queues:
            queue.ready = begin + seconds
            queue.busy += seconds
        return begin + seconds

    def wait(self, until: float) -> None:
        """Make the host wait for a moment."""
        self._now = max(self._now, until)
