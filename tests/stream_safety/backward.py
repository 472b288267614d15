"""Which stream a backward runs on, node by node, as the autograd engine of a GPU has it.

The engine runs a node on the stream that was current when its forward made it, and has a node wait
for those whose results it takes. Nothing is taken from the nodes that accumulate gradients of
parameters, so nobody waits for them before the whole backward ends. On a CPU there are no streams
for the engine to know, so this is made up for from the graph.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.stream_safety.recorder import RecordedEvent, RecordedStream

__all__ = ["BackwardStreams"]


class BackwardStreams:
    """Follows the nodes that a backward runs.

    Numbers of nodes grow in the order they are made in; so stretches of numbers have streams.

    Args:
        stream: The stream that nodes are made on at first.
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
        # Where the backward was called, by the first node of it that is seen.
        self._origins: dict[Any, tuple[RecordedStream, RecordedEvent]] = {}
        self._ends: dict[Any, tuple[RecordedStream, RecordedEvent]] = {}
        self._leaf_streams: dict[RecordedStream, None] = {}

    def made_on(self, stream: RecordedStream) -> None:
        """Note that nodes are made on a stream from now on."""
        self._note(stream, _next_number())

    def keep(self, node: Any) -> None:
        """Remember the stream of a node that is about to be given another number."""
        if node not in self._kept:
            self._kept[node] = self._stream_of(node)

    def current(self, chosen: RecordedStream | None) -> RecordedStream:
        """The stream to run on now; follows from one node to the next.

        Args:
            chosen: What was chosen since the node began that runs now; never None outside of a
                backward.
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
        # What was made since it was asked last was made by what runs now.
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
        """The node is done, and the engine adds its results to those of others before it."""
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
            # It is made where its parameter is first used.
            node = min(self._producers[node], key=lambda producer: producer._sequence_nr())
        if node in self._kept:
            return self._kept[node]
        return self._streams[bisect.bisect_right(self._starts, node._sequence_nr()) - 1]

    def _learn(self, node: Any) -> None:
        """Note who takes the results of a node, and of all after it."""
        left = [node]
        while left:
            producer = left.pop()
            if producer in self._known:
                continue
            self._known.add(producer)
            if not _accumulates(producer):
                # After all other hooks, which are run as part of the node.
                producer.register_hook(self._done)
            for consumer, _ in producer.next_functions:
                if consumer is not None:
                    self._producers[consumer].append(producer)
                    left.append(consumer)

    def _done(self, grad_inputs: Any, grad_outputs: Any) -> None:
        del grad_inputs, grad_outputs
        # A backward inside a node has nodes of its own.
        self._adds_up = running_node() is self._running

    def _awaited(self, node: Any) -> list[tuple[RecordedStream, RecordedEvent]]:
        """Where those ended whose results a node takes, through nodes that had nothing to do."""
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
    """The node of a graph whose backward runs now, or None."""
    return torch._C._current_autograd_node()


def _accumulates(node: Any) -> bool:
    return hasattr(node, "variable")


def _next_number() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
