"""CUDA without a device: run the host code of a step on `cuda`, with tensors without values.

Tensors are torch's fake tensors on `cuda`, collectives run in torch's `fake` process group, and
streams record a schedule. All other code is what a GPU runs: `CudaStreams`, `NcclCollectives`,
the units' hooks, torch's optimizers, and the autograd engine with its thread for the device.

`enter` patches torch permanently: call it in a dedicated process.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from megatron_fsdp_v2.dtensor.sharded_rows import FastAttributes
from megatron_fsdp_v2.memory import allocator
from megatron_fsdp_v2.memory.host_memory import is_in_host_memory, is_storage_in_host_memory
from megatron_fsdp_v2.runtime.module import named_units, unit_of
from tests.processes import ROOT
from tests.stream_safety import accesses, find_violations, schedule
from tests.stream_safety.recorder import RecordedEvent, RecordedStream, StreamRecorder

CUDA = torch.device("cuda", 0)
ENGINE_DEVICE = torch.device("privateuseone", 0)

_aten, _c10d = torch.ops.aten, torch.ops.c10d
_WAITING_OPERATIONS = (_aten.nonzero, _aten.masked_select, _aten._unique2)
# Positions of the arguments that a collective reads and writes, which its schema does not declare.
_COLLECTIVES = {
    _c10d._allgather_base_: ([1], [0]),
    _c10d._reduce_scatter_base_: ([1], [0]),
    _c10d.allreduce_: ([], [0]),
    _c10d.alltoall_base_: ([1], [0]),
}
_IN_ONE = {
    _c10d.allgather_into_tensor_coalesced_: ([1], [0]),
    _c10d.reduce_scatter_tensor_coalesced_: ([1], [0]),
    _c10d.allreduce_coalesced_: ([], [0]),
}
_COLLECTIVES |= _IN_ONE


class FakeCuda:
    """The host's synchronizations with the device in a step, and the schedule of the streams.

    Attributes:
        waits: Each source line where the host waited for the device or copied to or from it.
        collectives: Name and stream of every collective.
        recorder: Records the operations that are queued on each stream.
        mode: The `FakeTensorMode` of all tensors.
        threads: Threads that queued work.
        asked: How often the host asked for the current stream: as an object, or as a raw handle.
        is_capturing: Whether a CUDA graph captures the queued operations.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self._is_watching = False
        self.reset()

    def reset(self) -> None:
        """Clear all records."""
        self.waits: list[str] = []
        self.collectives: list[tuple[str, str]] = []
        self.recorder = _Recorder()
        self.threads: set[int] = set()
        self.asked: Counter[str] = Counter()
        self.is_capturing = False
        # Keeps the storages alive, so that their addresses are not reused.
        self.pinned: dict[int, torch.Tensor] = {}
        _Stream._recorder = self.recorder

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Record the host's synchronizations within the context."""
        self._is_watching = True
        try:
            with _Watch(self):
                yield
        finally:
            self._is_watching = False

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[str]]:
        """Capture queued operations; yield a list that receives CUDA's errors at the end.

        As with `torch.cuda.graph`, a stream other than that of earlier steps captures. Every stream
        in the capture must join it before the end, and no stream may wait for an operation that was
        queued before the capture.
        """
        wrong: list[str] = []
        first, self.is_capturing = len(self.recorder.current_schedule.records), True
        try:
            yield wrong
        finally:
            self.is_capturing = False
        wrong += _capture_errors(self.recorder.current_schedule.records[first:])

    def record_memory(self, model: torch.nn.Module) -> None:
        """Record when temporary buffers of a sharded model are allocated and freed."""
        for path, unit in named_units(model):
            for group in unit.groups:
                for kind, buffer in group.temporaries().items():
                    name = f"{path or 'root'} {kind}"
                    self.recorder.name(buffer.tensor, name, has_memory=buffer.is_live)
        unit_of(model).context.observer.subscribe(self.recorder.receive)

    def violations(self) -> list[str]:
        """Accesses of the same memory that no stream wait orders."""
        return [str(violation) for violation in find_violations(self.recorder.current_schedule)]

    def note(self, what: str) -> None:
        """Record that the host waits, with the source line of this repository."""
        if not self._is_watching:
            return
        frames = [f for f in traceback.extract_stack() if str(ROOT) in f.filename]
        ours = [f for f in frames if f.filename != __file__ and "site-packages" not in f.filename]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "torch"
        self.waits.append(f"{what} at {where}")


class _Stream(RecordedStream):
    """Replaces `torch.cuda.Stream` and records into the schedule."""

    # Of the class, since a reset replaces the recorder of all streams.
    _recorder: StreamRecorder
    host: FakeCuda
    device = CUDA
    device_index = 0
    num_made = 0

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "") -> None:
        type(self).num_made += 1
        self.cuda_stream = type(self).num_made
        self.name = name or f"stream {self.cuda_stream}"

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.recorded = super().record_event()
        return event

    def wait_event(self, event: _Event) -> None:
        if event.recorded is not None:
            super().wait_event(event.recorded)

    def synchronize(self) -> None:
        self.host.note("Stream.synchronize")
        super().synchronize()


class _Event:
    """Replaces `torch.cuda.Event`."""

    host: FakeCuda

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.recorded: RecordedEvent | None = None

    def record(self, stream: _Stream | None = None) -> None:
        (stream or _asked_stream()).record_event(self)

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or _asked_stream()).wait_event(self)

    def synchronize(self) -> None:
        self.host.note("Event.synchronize")
        if self.recorded is not None:
            self.recorded.synchronize()


_COMPUTE = _Stream(name="compute")
_CAPTURE = _Stream(name="capture")
_streams = threading.local()


def _current_stream() -> _Stream:
    stack = getattr(_streams, "stack", None)
    return stack[-1] if stack else (_CAPTURE if _Stream.host.is_capturing else _COMPUTE)


def _asked_stream(device: Any = None) -> _Stream:
    """Replaces `torch.cuda.current_stream`."""
    _Stream.host.asked["object"] += 1
    return _current_stream()


def _asked_handle(device_index: int) -> int:
    """Replaces `torch._C._cuda_getCurrentRawStream`."""
    _Stream.host.asked["handle"] += 1
    return _current_stream().cuda_stream


@contextlib.contextmanager
def _use(stream: _Stream | None) -> Iterator[None]:
    stack = _streams.__dict__.setdefault("stack", [])
    # As torch's context does, to restore it.
    before = _asked_stream()
    stack.append(stream or before)
    try:
        yield
    finally:
        stack.pop()


class _Recorder(StreamRecorder):
    """Records operations on the current stream of the calling thread."""

    def current_stream(self) -> RecordedStream:
        return _current_stream()


class _Watch(TorchDispatchMode):
    """Sees every operation, also in the autograd engine's thread, to which torch passes modes."""

    def __init__(self, host: FakeCuda) -> None:
        super().__init__()
        self._host = host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        kwargs, host = kwargs or {}, self._host
        packet = func.overloadpacket
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            made = func(*args, **{**kwargs, "pin_memory": False})
            host.pinned[made.untyped_storage()._cdata] = made
            return made
        if packet in (_aten._local_scalar_dense, _aten.equal):
            # Any number: no code may depend on it, and the step continues to the next read.
            if args[0].device.type == "cuda":
                host.note("a device tensor's value")
            is_bool = packet is _aten.equal or args[0].dtype is torch.bool
            return True if is_bool else 1
        if packet in _WAITING_OPERATIONS and args[0].device.type == "cuda":
            host.note(str(packet))
        host.threads.add(threading.get_ident())
        # Fake tensors have no rule for coalesced collectives, and no values to compute.
        result = FakeWork().boxed() if packet in _IN_ONE else func(*args, **kwargs)
        self._record(func, packet, args, kwargs, result)
        return result

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host.pinned

    def _record(self, func: Any, packet: Any, args: Any, kwargs: Any, result: Any) -> None:
        if packet in _COLLECTIVES:
            read, written = (
                [tensor for place in places for tensor in _plain_tensors(args[place])]
                for places in _COLLECTIVES[packet]
            )
            self._host.collectives.append((packet._qualified_op_name, _current_stream().name))
        else:
            found = accesses.accesses_of(func, args, kwargs, result)
            if found is None:
                return
            read, written = found.reads, found.writes
            self._check_copies(packet, read, written)
        on_host = not any(map(_is_on_cuda, (*read, *written)))
        read, written = ([t for t in each if _is_recorded(t)] for each in (read, written))
        self._host.recorder.operation(str(func), read, written, on_host=on_host)

    def _check_copies(self, packet: Any, read: Any, written: Any) -> None:
        # Operations other than copies take a 0-dim host tensor as an argument, without a transfer.
        takes_numbers = packet not in (_aten._to_copy, _aten.copy_)
        from_host = [t for t in read if not _is_on_cuda(t) and (t.dim() or not takes_numbers)]
        if from_host and any(_is_on_cuda(t) for t in written):
            self._host.note(f"{packet}: host to device")
        # A copy to pinned memory is asynchronous.
        waits = any(not (_is_on_cuda(t) or self._is_pinned(t)) for t in written)
        if any(_is_on_cuda(t) for t in read) and waits:
            self._host.note(f"{packet}: device to host")


def _capture_errors(records: Sequence[schedule.Record]) -> list[str]:
    """Errors that CUDA would raise for a capture that begins on the capture stream."""
    wrong: list[str] = []
    # By stream: the number of operations on each stream that precede its next operation.
    seen: dict[str, dict[str, int]] = {"capture": {}}
    events: dict[int, dict[str, int]] = {}
    for record in records:
        mine = seen.get(record.stream)
        match record:
            case schedule.Operation(stream=stream):
                if mine is not None:
                    mine[stream] = mine.get(stream, 0) + 1
            case schedule.EventRecord(event=event):
                if mine is not None:
                    events[event] = dict(mine)
            case schedule.EventWait() | schedule.StreamWait():
                if isinstance(record, schedule.EventWait):
                    others = events.get(record.event)
                else:
                    others = seen.get(record.awaited)
                if others is not None:
                    mine = seen.setdefault(record.stream, {})
                    for stream, count in others.items():
                        mine[stream] = max(count, mine.get(stream, 0))
                    # The wait alone forks the stream off.
                    mine[record.stream] = mine.get(record.stream, 0) + 1
                elif mine is not None:
                    wrong.append(f"{record} waits for what is not captured")
    for stream, its in seen.items():
        if its.get(stream, 0) > seen["capture"].get(stream, 0):
            wrong.append(f"{stream} is not joined")
    return wrong


def _plain_tensors(value: Any) -> list[torch.Tensor]:
    """`accesses.plain_tensors` of fake tensors of this mode, without those that DTensor creates."""
    if isinstance(value, FakeTensor):
        return [value] if value.fake_mode is _Stream.host.mode else []
    return _plain_tensors_of_others(value)


def _is_on_cuda(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Whether a stream may access a tensor while the host does something else."""
    return _is_on_cuda(tensor) or is_in_host_memory(tensor)


_plain_tensors_of_others = accesses.plain_tensors


def enter(world_size: int, rank: int) -> FakeCuda:
    """Give this process a fake CUDA device and a fake process group, permanently.

    Args:
        world_size: Number of ranks.
        rank: Rank of this process.
    """
    host = FakeCuda()
    _Stream.host = _Event.host = host
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    _replace_cuda(host)
    _give_the_engine_a_device()
    # The storage of a fake tensor is on meta and has the address 0.
    storage_device: Any = torch.UntypedStorage.device

    def device_of(storage: torch.UntypedStorage) -> torch.device:
        if storage_device.__get__(storage).type != "meta":
            return storage_device.__get__(storage)
        return torch.device("cpu") if is_storage_in_host_memory(storage) else CUDA

    torch.UntypedStorage.device = property(device_of)
    FakeTensor.data_ptr = lambda t: (
        t.untyped_storage()._cdata + t.storage_offset() * t.element_size()
    )
    FakeTensor.as_subclass = _as_subclass
    FakeTensor.is_cuda = property(_is_on_cuda)
    # A DTensor would return the engine's device, as `prim.device` does.
    for kind in (DTensor, FastAttributes):
        kind.device = property(lambda tensor: tensor._local_tensor.device)
    accesses.plain_tensors = _plain_tensors
    allocator._BASE = types.SimpleNamespace(data=_SetData())
    return host


class _SetData:
    """The setter of a tensor's `data`, which also gives a fake tensor the new device."""

    def __set__(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        torch._C.TensorBase.data.__set__(tensor, value)
        if isinstance(tensor, FakeTensor):
            tensor.fake_device = value.device


def _as_subclass(tensor: FakeTensor, cls: type[torch.Tensor]) -> torch.Tensor:
    """A fake tensor that is also an instance of a subclass, without its own storage."""
    with torch._C.DisableTorchFunctionSubclass():
        other: Any = tensor.detach()
    plain = cls is torch.Tensor
    other.__class__ = FakeTensor if plain else type(cls.__name__, (cls, FakeTensor), {})
    return other


def _replace_cuda(host: FakeCuda) -> None:
    cuda: Any = torch.cuda
    fake_tensor.init_gpu_context = lambda device: None
    cuda.Stream, cuda.Event, cuda.stream = _Stream, _Event, _use
    cuda.current_stream = cuda.default_stream = _asked_stream
    private: Any = torch._C
    private._cuda_getCurrentRawStream = _asked_handle
    cuda.device = lambda device: contextlib.nullcontext()
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.current_device, cuda.device_count = lambda: 0, lambda: 1
    cuda.is_current_stream_capturing = lambda: host.is_capturing
    cuda.synchronize = lambda device=None: host.note("torch.cuda.synchronize")
    for name in ("barrier", "all_gather_object", "broadcast_object_list"):
        setattr(dist, name, _recording_waits(host, name, getattr(dist, name)))


def _recording_waits(host: FakeCuda, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        host.note(name)
        return function(*args, **kwargs)

    return noted


_raised: Any = ctypes.pythonapi.PyErr_GetRaisedException
_raised.restype = ctypes.c_void_p


class _EngineDevice(torch._C._acc.DeviceGuard):
    """The engine's device.

    The engine asks for its type in Python, also while an exception of a backward unwinds the C++
    code that selects streams. A call with a pending exception would terminate the process.

    Attributes:
        lost: Exceptions that were pending in a call.
    """

    lost: list[BaseException] = []  # noqa: RUF012

    def type_(self) -> Any:
        # First of all: other Python code would fail, too.
        pending = _raised()
        if pending:
            error = ctypes.cast(pending, ctypes.py_object)
            self.lost.append(error.value)
            ctypes.pythonapi.Py_DecRef(error)
        return _DEVICE_TYPE


_DEVICE_TYPE = torch._C._autograd.DeviceType.PrivateUse1


def _raising_what_was_lost(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward of the engine that raises the exception which the device took."""

    def run(*args: Any, **kwargs: Any) -> Any:
        lost = _EngineDevice.lost
        lost.clear()
        try:
            return run_backward(*args, **kwargs)
        except SystemError:
            if not lost:
                raise
        error = lost[0]
        lost.clear()
        try:
            raise error
        finally:
            # Its traceback has this frame.
            del error

    return run


def _give_the_engine_a_device() -> None:
    """Make the autograd engine run a thread for the fake device.

    The engine reads a tensor's device, and that device's streams. It alone gets torch's
    `privateuseone` device, of which there is one and whose streams do nothing.
    """
    torch._C._ensureCUDADeviceGuardSet()
    _setup_privateuseone_for_python_backend("engine", device_guard=_EngineDevice())
    autograd: Any = torch.autograd
    autograd._engine_run_backward = _raising_what_was_lost(autograd._engine_run_backward)
    dispatch = FakeTensorMode.__torch_dispatch__

    def answer(
        mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            tensor = args[0]
            if tensor.fake_device.type == "cuda" and not tensor.fake_mode.in_kernel_invocation:
                return ENGINE_DEVICE
        if kwargs and kwargs.get("device") == ENGINE_DEVICE:
            # A backward allocates a tensor on the device of its input.
            kwargs = {**kwargs, "device": CUDA}
        return dispatch(mode, func, types, args, kwargs)

    FakeTensorMode.__torch_dispatch__ = answer
