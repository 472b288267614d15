"""Recorded streams: operations run synchronously on the CPU and are recorded as if queued."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, override

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.comm.streams import NcclCollectives, Numels, Stream
from megatron_fsdp_v2.memory.host_memory import is_in_host_memory
from megatron_fsdp_v2.memory.observer import (
    BufferAcquired,
    BufferReleasing,
    Event,
    MainGradientAllocated,
)
from tests.stream_safety.accesses import Accesses, accesses_of, plain_tensors
from tests.stream_safety.backward import BackwardStreams, running_node
from tests.stream_safety.schedule import HOST, Buffer, Region, Schedule

COMPUTE = "compute"
"""Name of the default stream of computation."""

_COPIES = (torch.ops.aten.copy_, torch.ops.aten._foreach_copy_, torch.ops.aten._to_copy)
"""Operations that may copy between host and device memory; all others access only one of them."""


@dataclass(slots=True)
class _Storage:
    """A storage accessed by an operation, with the state that the allocator of a GPU would hold.

    Several storages may be parts of one buffer; `start` is the offset of a storage in its buffer,
    in bytes. Host memory has the stream `HOST`, and its frees are not recorded: the allocator of
    pinned memory waits for copies.
    """

    ref: StorageWeakRef
    buffer: Buffer
    stream: str
    has_memory: bool
    start: int = 0
    is_part: bool = False

    @property
    def is_dead(self) -> bool:
        return bool(self.ref.expired())


class RecordedStream:
    """A recorded stream. See `streams.Stream`."""

    def __init__(self, name: str, recorder: StreamRecorder) -> None:
        self.name = name
        self._recorder = recorder

    def wait_stream(self, stream: Any, /) -> None:
        """Record that this stream waits for another stream."""
        self._recorder.current_schedule.wait_stream(self.name, stream.name)

    def record_event(self) -> RecordedEvent:
        """Record an event on this stream."""
        return RecordedEvent(
            self._recorder.current_schedule.record_event(self.name), self._recorder
        )

    def wait_event(self, event: RecordedEvent, /) -> None:
        """Record that this stream waits for an event."""
        self._recorder.current_schedule.wait_event(self.name, event.number)

    def synchronize(self) -> None:
        """Record that the host waits for this stream."""
        self._recorder.current_schedule.wait_stream(HOST, self.name)


class RecordedEvent:
    """A recorded event, with the waiting methods of `torch.cuda.Event`."""

    def __init__(self, number: int, recorder: StreamRecorder) -> None:
        self.number = number
        self._recorder = recorder

    def wait(self, stream: RecordedStream | None = None) -> None:
        """Record that a stream, by default the current stream, waits for this event."""
        (stream or self._recorder.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Record that the host waits for this event."""
        self._recorder.current_schedule.wait_event(HOST, self.number)


class StreamRecorder:
    """A device whose streams record a schedule. See `streams.StreamDevice`.

    Memory is modeled after the caching allocator: a storage is allocated on the stream that is
    current at its creation, and once the storage is freed, this stream may reuse the memory.

    Attributes:
        schedule: The schedule recorded so far.
        is_paused: Whether recording of operations is paused.
    """

    def __init__(self) -> None:
        self.schedule = Schedule()
        # Streams, with the autograd node that was running when the stream was selected, or None.
        self._current: list[tuple[RecordedStream, Any]] = [(RecordedStream(COMPUTE, self), None)]
        self._backward: BackwardStreams | None = None
        self._names = {COMPUTE}
        self._storages: dict[int, _Storage] = {}
        self._main_names: dict[torch.Tensor, str] = {}
        self._num_unnamed = 0
        self.is_paused = False

    # -- the device ---------------------------------------------------------------------------

    def new_stream(self, name: str) -> RecordedStream:
        """Create a stream; a number is appended to a name that is already used."""
        unique, number = name, 1
        while unique in self._names:
            number += 1
            unique = f"{name} {number}"
        self._names.add(unique)
        return RecordedStream(unique, self)

    def new_compute_stream(self, name: str) -> RecordedStream:
        """Create another stream for computation, as `torch.cuda.Stream()` does.

        From then on, the nodes of a backward run on the streams of their forwards.
        """
        if self._backward is None:
            self._backward = BackwardStreams(self._current[0][0])
        return self.new_stream(name)

    def current_stream(self) -> RecordedStream:
        """Return the stream on which operations are currently recorded."""
        stream, node = self._current[-1]
        if self._backward is None:
            return stream
        return self._backward.current(stream if running_node() is node else None)

    def is_current(self, stream: Any) -> bool:
        """Return whether a stream is the one on which operations are currently recorded."""
        return stream is self.current_stream()

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Record operations on a stream inside the context, like `torch.cuda.stream()`."""
        assert isinstance(stream, RecordedStream)
        before = self.current_stream()
        self._current.append((stream, running_node()))
        self._made_on(stream)
        try:
            yield
        finally:
            self._current.pop()
            self._made_on(before)

    def keep_stream(self, node: Any) -> None:
        """Store the stream of an autograd node, instead of deriving it from the sequence number.

        Call this method before `Node._set_sequence_nr`, after `new_compute_stream`.
        """
        if self._backward is not None:
            self._backward.keep(node)

    def _made_on(self, stream: RecordedStream) -> None:
        if self._backward is not None:
            self._backward.made_on(stream)

    # -- operations ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the recording of operations inside the context."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in host memory: offloaded, or computed there by the host."""
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        return is_in_host_memory(tensor) or (storage is not None and storage.stream == HOST)

    def operation(
        self,
        name: str,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        *,
        on_host: bool = False,
    ) -> None:
        """Record an operation on the current stream, after allocations of its new tensors.

        Args:
            name: Name of the operation.
            reads: Plain tensors that the operation reads.
            writes: Plain tensors that the operation writes.
            on_host: Whether the host runs the operation; its results are in host memory.
        """
        if on_host:
            # 0-dim tensors, such as step counts, may belong to the host or the device: ignore them.
            reads, writes = ([t for t in each if t.dim()] for each in (reads, writes))
        written = self._regions(name, writes, made_here=True, on_host=on_host)
        read = self._regions(name, reads, made_here=False, on_host=on_host)
        if not written and not read:
            return
        self.current_schedule.operation(
            HOST if on_host else self.current_stream().name,
            name,
            [r for r in read if r not in written],
            written,
        )

    def _regions(
        self, name: str, tensors: Iterable[torch.Tensor], *, made_here: bool, on_host: bool
    ) -> list[Region]:
        regions: dict[Region, None] = {}
        for tensor in tensors:
            if tensor.numel() == 0 or tensor.device.type == "meta":
                continue
            storage = self._storage_of(tensor, name, made_here=made_here, on_host=on_host)
            start = storage.start + int(tensor.storage_offset()) * tensor.element_size()
            strides = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * int(stride) for size, stride in strides)
            stop = start + (last + 1) * tensor.element_size()
            regions[Region(storage.buffer, start, stop)] = None
        return list(regions)

    # -- memory -------------------------------------------------------------------------------

    @property
    def current_schedule(self) -> Schedule:
        """The schedule, after recording the frees of storages that died since the last access."""
        for key in [key for key, storage in self._storages.items() if storage.is_dead]:
            storage = self._storages.pop(key)
            if storage.has_memory:
                lazily = self._backward is not None
                self.schedule.free(storage.stream, storage.buffer, when_reused=lazily)
        return self.schedule

    def stop(self) -> None:
        """Record the frees of storages that have died, and stop tracking memory."""
        assert self.current_schedule is self.schedule
        self._storages.clear()

    def is_tracked(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's storage is tracked."""
        return tensor.untyped_storage()._cdata in self._storages

    def _storage_of(
        self, tensor: torch.Tensor, maker: str, *, made_here: bool, on_host: bool = False
    ) -> _Storage:
        untyped = tensor.untyped_storage()
        found = self._storages.get(untyped._cdata)
        is_on_host = on_host or self.is_on_host(tensor)
        # A storage that is assigned to host memory after its creation is tracked anew.
        if found is not None and is_on_host == (found.stream == HOST):
            # The weak reference prevents the reuse of this address for another storage.
            return found
        self._num_unnamed += 1
        origin = f"of {maker}" if made_here else "from before"
        buffer = Buffer(f"tensor {self._num_unnamed} {origin}")
        if is_on_host:
            ref = StorageWeakRef(untyped)
            self._storages[untyped._cdata] = _Storage(ref, buffer, HOST, has_memory=False)
            return self._storages[untyped._cdata]
        stream = self.current_stream().name if made_here else COMPUTE
        # Record frees first: the new storage may reuse the memory of a dead storage.
        schedule = self.current_schedule
        ref = StorageWeakRef(untyped)
        # The autograd engine registers consumers of a node's results with the allocator.
        is_a_gradient = made_here and self._backward is not None and running_node() is not None
        found = _Storage(ref, buffer, stream, has_memory=not is_a_gradient)
        self._storages[untyped._cdata] = found
        if made_here:
            schedule.allocate(stream, buffer)
        return found

    def name(self, tensor: torch.Tensor, name: str, *, has_memory: bool = True) -> None:
        """Name the storage of a tensor for reports, unless the storage is a part of another.

        Args:
            tensor: Any view of the storage.
            name: The name.
            has_memory: Whether the storage has memory, if it is not tracked yet.
        """
        is_new = not self.is_tracked(tensor)
        storage = self._storage_of(tensor, "", made_here=False)
        if storage.is_part:
            return
        storage.buffer.name = name
        if is_new and not has_memory:
            storage.has_memory = False
            self.schedule.free(storage.stream, storage.buffer)

    def mark_part(self, tensor: torch.Tensor, block: torch.Tensor) -> None:
        """Make a storage a part of the buffer of another storage.

        Args:
            tensor: Any view of the part.
            block: A tensor of bytes that begins at the start of its storage.
        """
        whole = self._storage_of(block, "", made_here=False)
        part = self._storage_of(tensor, "", made_here=False)
        # A part owns no memory, so its death records no free.
        part.buffer, part.has_memory, part.is_part = whole.buffer, False, True
        whole.buffer.name = f"trace pool, {tensor.dtype}"
        part.start = tensor.untyped_storage().data_ptr() - block.data_ptr()

    def record_allocation(self, tensor: torch.Tensor) -> None:
        """Record that a storage is allocated on the current stream."""
        storage = self._storage_of(tensor, "", made_here=False)
        if storage.stream == HOST:
            return
        storage.stream, storage.has_memory = self.current_stream().name, True
        self.current_schedule.allocate(storage.stream, storage.buffer)

    def receive(self, event: Event) -> None:
        """Record the allocation or free of an observer's event.

        A pool keeps the memory of its buffers. Main gradients are freed with their last view.
        """
        match event:
            case BufferAcquired(buffer):
                block = buffer.backing.block
                if block is None:
                    self.record_allocation(buffer.tensor)
                else:
                    self.mark_part(buffer.tensor, block)
            case BufferReleasing(buffer) if buffer.backing.block is None:
                self.record_free(buffer.tensor)
            case MainGradientAllocated(grad_buffer, flat):
                if not self.is_tracked(flat):
                    self.record_allocation(flat)
                self.name(flat, self._main_names.get(grad_buffer.tensor, "main"))

    def name_main(self, grad_buffer: torch.Tensor, name: str) -> None:
        """Name the main gradients of a group for reports.

        Args:
            grad_buffer: The tensor of the group's full gradient buffer.
            name: The name.
        """
        self._main_names[grad_buffer] = name

    def record_free(self, tensor: torch.Tensor) -> None:
        """Record that the memory of a storage is freed."""
        storage = self._storage_of(tensor, "", made_here=False)
        self.current_schedule.free(storage.stream, storage.buffer)
        storage.has_memory = False


class RecordedCollectives(NcclCollectives):
    """Collectives that are recorded and run synchronously with gloo."""

    def __init__(self, recorder: StreamRecorder) -> None:
        self._recorder = recorder

    @contextlib.contextmanager
    def _recorded(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Record a collective; do not record the operations inside the context."""
        self._recorder.operation(name, reads=reads, writes=writes)
        with self._recorder.paused():
            yield

    @override
    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, axis: Axis) -> None:
        """Fill `output` with the shards of all ranks."""
        with self._recorded("all_gather", [shard], [output]):
            super().all_gather(output, shard, axis)

    @override
    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, axis: Axis) -> None:
        """Fill `output` with the sum over ranks of this rank's slice of `full`."""
        with self._recorded("reduce_scatter", [full], [output]):
            received = torch.empty_like(full)
            dist.all_to_all_single(received, full, group=axis.group)
            dtype = torch.promote_types(full.dtype, torch.float32)
            output.copy_(received.view(axis.size, -1).sum(0, dtype=dtype))

    @override
    def all_reduce(self, full: torch.Tensor, axis: Axis) -> None:
        """Replace `full` with its sum over ranks."""
        with self._recorded("all_reduce", [], [full]):
            super().all_reduce(full, axis)

    @override
    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, numels: Numels, axis: Axis
    ) -> None:
        """Send every rank its part of `sent`, and receive the parts for this rank."""
        with self._recorded("all_to_all", [sent], [received]):
            super().all_to_all(received, sent, numels, axis)


class OperationMode(TorchDispatchMode):
    """Records every operation of torch, forward and backward, while active."""

    def __init__(self, recorder: StreamRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, then record its accesses."""
        if any(issubclass(cls, DTensor) for cls in types):
            # DTensor dispatches to operations on local tensors, which are recorded.
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._recorder.is_paused:
            found = accesses_of(func, args, kwargs, result)
            if found is not None:
                self._record(func, args, kwargs, found)
        return result

    def _record(self, func: Any, args: Any, kwargs: Mapping[str, Any], found: Accesses) -> None:
        recorder = self._recorder
        sides = {recorder.is_on_host(tensor) for tensor in plain_tensors([args, kwargs])}
        moves = func.overloadpacket in _COPIES and len(sides) == 2
        recorder.operation(
            str(func), found.reads, found.writes, on_host=True in sides and not moves
        )
        if moves and not kwargs.get("non_blocking", args[2] if len(args) > 2 else False):
            recorder.current_stream().synchronize()
