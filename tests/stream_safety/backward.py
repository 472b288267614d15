"""Emulation of the streams that the autograd engine uses for the nodes of a backward on a GPU.

The engine runs a node on the stream that was current when the forward created the node, and the
node waits for the producers of its inputs. No node consumes the results of nodes that accumulate
gradients of parameters; the engine synchronizes with these at the end of the backward. On a CPU the
engine has no streams, so this module derives streams and waits from the graph.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.stream_safety.recorder import RecordedEvent, RecordedStream


class BackwardStreams:
    """Tracks the nodes that a backward runs.

    Sequence numbers of nodes increase in order of creation, so each stream owns ranges of numbers.

    Args:
        stream: The stream on which the first nodes are created.
    """

    def __init__(self, stream: RecordedStream) -> None:
        self._starts = [0]
        self._streams = [stream]
        self._last_number = 0
        self._running: Any = None
        self._running_on = stream
        self._adds_up = False
        self._kept: dict[Any, RecordedStream] = {}
        self._producers: defaultdict[Any, list[Any]] = defaultdict(list)
        self._known: set[Any] = set()
        # Stream and event at the start of a backward, by its first node.
        self._origins: dict[Any, tuple[RecordedStream, RecordedEvent]] = {}
        self._ends: dict[Any, tuple[RecordedStream, RecordedEvent]] = {}
        self._leaf_streams: dict[RecordedStream, None] = {}

    def made_on(self, stream: RecordedStream) -> None:
        """Record that nodes are created on a stream from now on."""
        self._note(stream, _next_number())

    def keep(self, node: Any) -> None:
        """Store the stream of a node whose sequence number is about to change."""
        if node not in self._kept:
            self._kept[node] = self._stream_of(node)

    def current(self, chosen: RecordedStream | None) -> RecordedStream:
        """Return the current stream, after processing a change of the running node.

        Args:
            chosen: The stream selected since the running node started, or None; outside a
                backward, the current stream.
        """
        node = running_node()
        if node is not self._running:
            self._leave()
            self._enter(node, chosen)
        elif self._adds_up:
            self._add_up()
        stream = self._running_on if chosen is None else chosen
        if node is None:
            self._running_on = stream
        # Nodes created since the last call belong to the running node.
        self._note(stream, self._last_number)
        self._last_number = _next_number()
        return stream

    def _note(self, stream: RecordedStream, number: int) -> None:
        if self._streams[-1] is not stream:
            self._starts.append(number)
            self._streams.append(stream)

    def _leave(self) -> None:
        if self._running is None:
            return
        if _accumulates(self._running):
            self._leaf_streams[self._running_on] = None
        elif self._adds_up or self._running not in self._ends:
            self._ends[self._running] = (self._running_on, self._running_on.record_event())
        self._adds_up = False

    def _enter(self, node: Any, chosen: RecordedStream | None) -> None:
        self._running = node
        if node is None:
            assert chosen is not None
            for stream in self._leaf_streams:
                if stream is not chosen:
                    chosen.wait_stream(stream)
            for table in (self._leaf_streams, self._producers, self._origins, self._ends):
                table.clear()
            self._known.clear()
            return
        if node not in self._known:
            self._origins[node] = (self._running_on, self._running_on.record_event())
        self._learn(node)
        self._ends.pop(node, None)
        self._running_on = self._stream_of(node)
        self._wait_for(node)

    def _add_up(self) -> None:
        """After a node, wait for producers of a common consumer: the engine sums their results."""
        self._leave()
        sums = [
            consumer
            for consumer, _ in self._running.next_functions
            if consumer is not None and len(self._producers[consumer]) > 1
        ]
        if sums:
            self._running_on = self._stream_of(sums[0])
            for consumer in sums:
                self._wait_for(consumer)

    def _wait_for(self, node: Any) -> None:
        for stream, event in self._awaited(node):
            if stream is not self._running_on:
                self._running_on.wait_event(event)

    def _stream_of(self, node: Any) -> RecordedStream:
        if _accumulates(node):
            # The first use of a parameter creates the node that accumulates its gradient.
            node = min(self._producers[node], key=lambda producer: producer._sequence_nr())
        if node in self._kept:
            return self._kept[node]
        return self._streams[bisect.bisect_right(self._starts, node._sequence_nr()) - 1]

    def _learn(self, node: Any) -> None:
        """Record the consumers of a node and of all its descendants."""
        left = [node]
        while left:
            producer = left.pop()
            if producer in self._known:
                continue
            self._known.add(producer)
            if not _accumulates(producer):
                # This hook runs after all other hooks, which are part of the node.
                producer.register_hook(self._done)
            for consumer, _ in producer.next_functions:
                if consumer is not None:
                    self._producers[consumer].append(producer)
                    left.append(consumer)

    def _done(self, grad_inputs: Any, grad_outputs: Any) -> None:
        # A backward inside a node runs other nodes.
        self._adds_up = running_node() is self._running

    def _awaited(self, node: Any) -> list[tuple[RecordedStream, RecordedEvent]]:
        """Return streams and end events of the producers of a node; skip nodes that never ran."""
        found, seen, left = [], set(), [node]
        while left:
            producer = left.pop()
            if producer in seen:
                continue
            seen.add(producer)
            end = None if producer is node else self._ends.get(producer)
            if end is None:
                left += self._producers.get(producer, ())
                end = self._origins.get(producer)
            if end is not None:
                found.append(end)
        return found


def running_node() -> Any:
    """Return the node that autograd is running, or None."""
    return torch._C._current_autograd_node()


def _accumulates(node: Any) -> bool:
    return hasattr(node, "variable")


def _next_number() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
