"""CUDA without a device: what the host does in a step on `cuda`, with tensors that hold no values.

Tensors are torch's fake ones on `cuda`, collectives those of torch's `fake` process group, and
streams write a schedule. Everything else is what runs on a GPU: `CudaStreams`, `NcclCollectives`,
the units' hooks, torch's optimizers, and the autograd engine with its thread for the device.

`enter` changes torch for good: it is for a process of its own.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
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
from megatron_fsdp_v2.runtime.module import named_units, unit_of
from tests.processes import ROOT
from tests.stream_safety import accesses, find_violations, schedule
from tests.stream_safety.recorder import RecordedEvent, RecordedStream, StreamRecorder

CUDA = torch.device("cuda", 0)
ENGINE_DEVICE = torch.device("privateuseone", 0)

_aten, _c10d = torch.ops.aten, torch.ops.c10d
_WAITING_OPERATIONS = (_aten.nonzero, _aten.masked_select, _aten._unique2)
# Positions of what a collective reads and writes, which its schema does not say.
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
    """What the host did that it should not do in a step, and the schedule of its streams.

    Attributes:
        waits: Each place where the host waited for the device, or moved data between them.
        collectives: Name and stream of every collective.
        recorder: Writes down what is queued where.
        mode: Torch's mode of fake tensors.
        threads: Threads that queued work.
        is_capturing: Whether what is queued is captured in a graph.
        events_are_done: What an event says that the host asks.
        flag: The value of what the host reads in its own memory.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self._is_watching = False
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self.waits: list[str] = []
        self.collectives: list[tuple[str, str]] = []
        self.recorder = _Recorder()
        self.threads: set[int] = set()
        self.is_capturing = False
        self.events_are_done = True
        self.flag = False
        # Held, or another storage could have the same address.
        self.pinned: dict[int, torch.Tensor] = {}
        _Stream.recorder = self.recorder

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Watch the host while the context lasts."""
        self._is_watching = True
        try:
            with _Watch(self):
                yield
        finally:
            self._is_watching = False

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[str]]:
        """Capture what is queued; give a list of what CUDA would reject in it, filled at the end.

        Work of every stream that takes part has to come before the end of the capturing stream,
        and none may wait for what was queued before.
        """
        wrong: list[str] = []
        first, self.is_capturing = len(self.recorder.settled.records), True
        try:
            yield wrong
        finally:
            self.is_capturing = False
        wrong += _wrong_in_capture(self.recorder.settled.records[first:])

    def follow(self, model: torch.nn.Module) -> None:
        """Have the schedule tell when temporary buffers of a sharded model gain and lose memory."""
        for path, unit in named_units(model):
            for group in unit.groups:
                for kind, buffer in group.temporaries().items():
                    name = f"{path or 'root'} {kind}"
                    self.recorder.name(buffer.tensor, name, has_memory=buffer.is_live)
        unit_of(model).context.observer.subscribe(self.recorder.receive)

    def violations(self) -> list[str]:
        """Operations on the same memory that no wait of a stream orders."""
        return [str(violation) for violation in find_violations(self.recorder.settled)]

    def note(self, what: str) -> None:
        """Write down that the host waits, and the place of ours where it does."""
        if not self._is_watching:
            return
        frames = [f for f in traceback.extract_stack() if str(ROOT) in f.filename]
        ours = [f for f in frames if f.filename != __file__ and "site-packages" not in f.filename]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "torch"
        self.waits.append(f"{what} at {where}")


class _Stream:
    """In the place of `torch.cuda.Stream`: writes to the schedule."""

    recorder: StreamRecorder
    host: FakeCuda
    device = CUDA
    num_made = 0

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "") -> None:
        type(self).num_made += 1
        self.cuda_stream = type(self).num_made
        self.name = name or f"stream {self.cuda_stream}"

    @property
    def _recorded(self) -> RecordedStream:
        return RecordedStream(self.name, self.recorder)

    def wait_stream(self, stream: _Stream) -> None:
        self._recorded.wait_stream(stream)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.recorded = self._recorded.record_event()
        return event

    def wait_event(self, event: _Event) -> None:
        if event.recorded is not None:
            self._recorded.wait_event(event.recorded)

    def synchronize(self) -> None:
        self.host.note("Stream.synchronize")
        self._recorded.synchronize()

    def query(self) -> bool:
        return True


class _Event:
    """In the place of `torch.cuda.Event`."""

    host: FakeCuda

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.recorded: RecordedEvent | None = None

    def record(self, stream: _Stream | None = None) -> None:
        (stream or _current_stream()).record_event(self)

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or _current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self.host.note("Event.synchronize")
        if self.recorded is not None:
            self.recorded.synchronize()

    def query(self) -> bool:
        return self.host.events_are_done


_COMPUTE = _Stream(name="compute")
_streams = threading.local()


def _current_stream(device: Any = None) -> _Stream:
    stack = getattr(_streams, "stack", None)
    return stack[-1] if stack else _COMPUTE


@contextlib.contextmanager
def _use(stream: _Stream | None) -> Iterator[None]:
    stack = _streams.__dict__.setdefault("stack", [])
    stack.append(stream or _current_stream())
    try:
        yield
    finally:
        stack.pop()


class _Recorder(StreamRecorder):
    """What is queued goes to the thread's own current stream."""

    def current_stream(self) -> RecordedStream:
        return _current_stream()._recorded


class _Watch(TorchDispatchMode):
    """Sees every operation, of the engine's thread too: torch hands modes over to it."""

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
        if packet is _aten._local_scalar_dense and self._is_pinned(args[0]):
            return host.flag
        if kwargs.get("pin_memory"):
            made = func(*args, **{**kwargs, "pin_memory": False})
            host.pinned[made.untyped_storage()._cdata] = made
            return made
        if packet in (_aten._local_scalar_dense, _aten.equal):
            # Any number: nothing may depend on it, and all reads are to be seen.
            if args[0].device.type == "cuda":
                host.note("a device tensor's value")
            is_bool = packet is _aten.equal or args[0].dtype is torch.bool
            return True if is_bool else 1
        if packet in _WAITING_OPERATIONS and args[0].device.type == "cuda":
            host.note(str(packet))
        host.threads.add(threading.get_ident())
        # Fake tensors have no rule for these; there is nothing to fill in.
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
        self._host.recorder.operation(
            str(func), [t for t in read if _is_on_cuda(t)], [t for t in written if _is_on_cuda(t)]
        )

    def _check_copies(self, packet: Any, read: Any, written: Any) -> None:
        # An operation takes a number on the host along; a copy, and more than one, is moved.
        takes_numbers = packet not in (_aten._to_copy, _aten.copy_)
        from_host = [t for t in read if not _is_on_cuda(t) and (t.dim() or not takes_numbers)]
        if from_host and any(_is_on_cuda(t) for t in written):
            self._host.note(f"{packet}: host to device")
        # The device itself writes what is pinned.
        waits = any(not (_is_on_cuda(t) or self._is_pinned(t)) for t in written)
        if any(_is_on_cuda(t) for t in read) and waits:
            self._host.note(f"{packet}: device to host")


def _wrong_in_capture(records: Sequence[schedule.Record]) -> list[str]:
    """What CUDA would reject in a capture that begins on the compute stream."""
    wrong: list[str] = []
    # How much of each stream's work comes before what is queued on a stream next.
    seen: dict[str, dict[str, int]] = {"compute": {}}
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
                elif mine is not None:
                    wrong.append(f"{record} waits for what is not captured")
    for stream, its in seen.items():
        if its.get(stream, 0) > seen["compute"].get(stream, 0):
            wrong.append(f"{stream} is not joined")
    return wrong


def _plain_tensors(value: Any) -> list[torch.Tensor]:
    """`accesses.plain_tensors` of our fake tensors; DTensor's own ones are left out."""
    if isinstance(value, FakeTensor):
        return [value] if value.fake_mode is _Stream.host.mode else []
    return _plain_tensors_of_others(value)


def _is_on_cuda(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


_plain_tensors_of_others = accesses.plain_tensors


def enter(world_size: int, rank: int) -> FakeCuda:
    """Give this process a fake CUDA device and process group, for good.

    Args:
        world_size: Number of ranks.
        rank: Which of them this is.
    """
    host = FakeCuda()
    _Stream.host = _Event.host = host
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    _replace_cuda(host)
    _satisfy_the_engine()
    # The storage of a fake tensor is on meta, and its address is 0.
    storage_device: Any = torch.UntypedStorage.device
    torch.UntypedStorage.device = property(
        lambda s: CUDA if storage_device.__get__(s).type == "meta" else storage_device.__get__(s)
    )
    FakeTensor.data_ptr = lambda t: (
        t.untyped_storage()._cdata + t.storage_offset() * t.element_size()
    )
    FakeTensor.as_subclass = _as_subclass
    FakeTensor.is_cuda = property(_is_on_cuda)
    # It asks its local tensor where the engine does.
    for kind in (DTensor, FastAttributes):
        kind.device = property(lambda tensor: tensor._local_tensor.device)
    accesses.plain_tensors = _plain_tensors
    return host


def _as_subclass(tensor: FakeTensor, cls: type[torch.Tensor]) -> torch.Tensor:
    """A fake tensor that is one of a subclass without storage of its own, too."""
    with torch._C.DisableTorchFunctionSubclass():
        other: Any = tensor.detach()
    plain = cls is torch.Tensor
    other.__class__ = FakeTensor if plain else type(cls.__name__, (cls, FakeTensor), {})
    return other


def _replace_cuda(host: FakeCuda) -> None:
    cuda: Any = torch.cuda
    fake_tensor.init_gpu_context = lambda device: None
    cuda.Stream, cuda.Event, cuda.stream = _Stream, _Event, _use
    cuda.current_stream = cuda.default_stream = _current_stream
    cuda.device = lambda device: contextlib.nullcontext()
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.current_device, cuda.device_count = lambda: 0, lambda: 1
    cuda.is_current_stream_capturing = lambda: host.is_capturing
    cuda.synchronize = lambda device=None: host.note("torch.cuda.synchronize")
    for name in ("barrier", "all_gather_object", "broadcast_object_list"):
        setattr(dist, name, _noted(host, name, getattr(dist, name)))


def _noted(host: FakeCuda, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        host.note(name)
        return function(*args, **kwargs)

    return noted


def _satisfy_the_engine() -> None:
    """Have the autograd engine take a thread for a device that CUDA does not know.

    It asks a fake tensor for its device, and its device for streams: for it alone that is torch's
    place for other backends, which has one device and streams that do nothing.
    """
    torch._C._ensureCUDADeviceGuardSet()
    _setup_privateuseone_for_python_backend("engine")
    dispatch = FakeTensorMode.__torch_dispatch__

    def answer(
        mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            tensor = args[0]
            if tensor.fake_device.type == "cuda" and not tensor.fake_mode.in_kernel_invocation:
                return ENGINE_DEVICE
        if kwargs and kwargs.get("device") == ENGINE_DEVICE:
            # A backward that makes something where its input was.
            kwargs = {**kwargs, "device": CUDA}
        return dispatch(mode, func, types, args, kwargs)

    FakeTensorMode.__torch_dispatch__ = answer
