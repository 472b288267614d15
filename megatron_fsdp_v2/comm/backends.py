"""How devices differ: processes with gloo on a CPU, streams with NCCL on CUDA.

How collectives and memory differ between devices is known here alone; names that differ between
versions of torch are in `comm/calls.py`. The interface is in `comm/interface.py`; which stream
waits for which is in `comm/streams.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm.calls import (
    all_gather_several,
    all_gather_single,
    broadcast_shards,
    in_one_launch,
    is_gloo,
    reduce_scatter_single,
)
from megatron_fsdp_v2.comm.errors import Label
from megatron_fsdp_v2.comm.interface import (
    DONE,
    Axis,
    Collective,
    CollectiveKind,
    Communicator,
    Registrar,
    Work,
    run_alone,
    store,
)
from megatron_fsdp_v2.comm.streams import Stream, StreamCommunicator
from megatron_fsdp_v2.comm.together import Labeled, Together

__all__ = [
    "SUM_CHUNK",
    "CpuCommunicator",
    "CudaStreams",
    "LateFlag",
    "NcclCollectives",
    "NcclRegistrar",
    "communicator_for",
    "host_block",
    "is_capturing",
    "registrar_for",
    "wait_for_device",
]


_ANYWHERE: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

SUM_CHUNK = 1 << 16
"""Elements summed at a time where dtypes differ, or the sum is not made in place."""

BROADCAST_BYTES = 1 << 19
"""Bytes of all ranks together, from which on gloo gathers faster by broadcasts."""


class _BackendWork:
    """An asynchronous operation of a CPU process group, and what to do with its result."""

    __slots__ = ("_c10d_work", "_finish", "_label", "_of")

    def __init__(
        self,
        c10d_work: Any,
        of: Sequence[Collective],
        finish: Callable[[], None] | None,
        label: Label,
    ) -> None:
        self._c10d_work = c10d_work
        # Holds the tensors, which have to stay until it is done.
        self._of = of
        self._finish = finish
        self._label = label

    def wait(self) -> None:
        collectives = self._of
        if not collectives:
            return
        try:
            self._c10d_work.wait()
        except RuntimeError as error:
            kind, group = collectives[0].kind.title, collectives[0].axis.group
            raise self._label.failure(kind, group, error) from error
        finish, self._c10d_work, self._of, self._finish = self._finish, None, (), None
        if finish is not None:
            finish()
        for collective in collectives:
            if collective.after is not None:
                collective.after()


class CpuCommunicator:
    """Collectives of a CPU process group (gloo).

    Args:
        label: What they are for, where they fail.
    """

    has_streams = False

    def __init__(self, label: Label | None = None) -> None:
        self.label = label or Label()

    def labeled(self, label: Label) -> CpuCommunicator:
        """See `Communicator.labeled`."""
        return CpuCommunicator(label)

    def issue(self, collective: Collective, *, async_op: bool) -> Work:
        """See `Communicator.issue`. Communication streams mean nothing here."""
        if collective.axis.size == 1:
            run_alone(collective)
            return DONE
        if _CPU_TOGETHER.is_open:
            if async_op:
                return _CPU_TOGETHER.put_off(collective, self.label)
            # The order has to be the same on all ranks.
            _CPU_TOGETHER.issue()
        work = _issue([collective], self.label)
        if not async_op:
            work.wait()
        return work

    def together(self) -> contextlib.AbstractContextManager[None]:
        """See `Communicator.together`."""
        return _CPU_TOGETHER()

    def begin_pass(self) -> None:
        """There are no streams."""

    def side_stream(self) -> None:
        """There are no streams."""
        return

    def wait_for(self, streams: Iterable[Any], *, and_compute: bool) -> None:
        """There are no streams."""

    def synchronize(self) -> None:
        """There are no streams."""

    def memory(self) -> contextlib.AbstractContextManager[Any]:
        """There are no streams."""
        return _ANYWHERE

    def settle(self) -> None:
        """There are no streams."""


def _issue(collectives: Sequence[Collective], label: Label) -> Work:
    """Start a collective, or several alike in one."""
    for collective in collectives:
        if collective.before is not None:
            collective.before()
    kind, group = collectives[0].kind, collectives[0].axis.group
    is_one = len(collectives) == 1
    call = _CALLS[kind](collectives[0]) if is_one else _CALLS_IN_ONE[kind](collectives)
    try:
        c10d_work = call.operation(*call.operands, group=group, async_op=True)
    except RuntimeError as error:
        raise label.failure(kind.title, group, error) from error
    return _BackendWork(c10d_work, collectives, call.finish, label)


def _issue_alike(labeled: Sequence[Labeled]) -> Sequence[Work]:
    label = Label.of_several([each.label for each in labeled])
    return [_issue([each.collective for each in labeled], label)] * len(labeled)


# Of all CPU communicators: units are sharded one by one, each with its own.
_CPU_TOGETHER = Together(_issue_alike)


class _Call(NamedTuple):
    """A call of torch's, and what follows.

    Attributes:
        operation: The function.
        operands: Its arguments.
        finish: Makes the result of what arrived.
    """

    operation: Callable[..., Any]
    operands: tuple[Any, ...]
    finish: Callable[[], None] | None = None


def _all_gather(c: Collective) -> _Call:
    """Gloo's ring takes up to three times as long as a broadcast by every rank, side by side."""
    is_long = c.output.nbytes >= BROADCAST_BYTES
    gather = broadcast_shards if is_long and is_gloo(c.axis.group) else all_gather_single
    return _Call(gather, (c.output, c.input))


def _reduce_scatter(c: Collective) -> _Call:
    """Gloo's reduce-scatter is several times slower than an all-to-all of the same bytes.

    The sum is made here, in rank order and in the output's dtype, whatever the communication dtype;
    in fp32 where the collective says so.
    """
    size, rank, full = c.axis.size, c.axis.rank, c.input
    # One's own piece does not travel, so that what is received is less than the whole.
    numel = full.numel() // size
    numels = [numel if r != rank else 0 for r in range(size)]
    parts = full.chunk(size)
    end = _move_to_end(parts, rank)
    num_travel = full.numel() - numel
    lent = None if c.accumulate else c.arrival
    received = full.new_empty(num_travel) if lent is None else lent
    sent = full.narrow(0, numel if end == 0 else 0, num_travel)
    pieces = list(received.chunk(size - 1))
    pieces.insert(rank, parts[end])

    def finish() -> None:
        _sum_into(c, pieces, are_apart=lent is None)
        if lent is None:
            # Gloo's own thread lets go of it only when it gets to run again.
            received.untyped_storage().resize_(0)

    operands = (received, sent, numels, numels)
    return _Call(dist.all_to_all_single, operands, finish)


def _all_reduce(c: Collective) -> _Call:
    def finish() -> None:
        if c.input.dtype == c.output.dtype:
            store(c.output, c.input, c.scale, c.accumulate)
        else:
            _sum_into(c, [c.input])

    return _Call(dist.all_reduce, (c.input,), finish)


def _all_to_all(c: Collective) -> _Call:
    operands = (c.output, c.input, list(c.output_numels), list(c.input_numels))
    return _Call(dist.all_to_all_single, operands)


_CALLS: dict[CollectiveKind, Callable[[Collective], _Call]] = {
    CollectiveKind.ALL_GATHER: _all_gather,
    CollectiveKind.REDUCE_SCATTER: _reduce_scatter,
    CollectiveKind.ALL_REDUCE: _all_reduce,
    CollectiveKind.ALL_TO_ALL: _all_to_all,
}


def _all_gather_in_one(cs: Sequence[Collective]) -> _Call:
    return _Call(all_gather_several, ([c.output for c in cs], [c.input for c in cs]))


def _reduce_scatter_in_one(cs: Sequence[Collective]) -> _Call:
    """As `_reduce_scatter`: what goes to a rank is what each of them sends it."""
    size, rank = cs[0].axis.size, cs[0].axis.rank
    matrices = [c.input.view(size, -1) for c in cs]
    widths = [matrix.shape[1] for matrix in matrices]
    others = [r for r in range(size) if r != rank]
    sent = torch.cat([matrix[r] for r in others for matrix in matrices])
    received = torch.empty_like(sent)
    numels = [sum(widths) if r != rank else 0 for r in range(size)]

    def finish() -> None:
        parts = [torch.split(row, widths) for row in received.view(len(others), -1)]
        for index, (c, matrix) in enumerate(zip(cs, matrices, strict=True)):
            pieces = [part[index] for part in parts]
            pieces.insert(rank, matrix[rank])
            _sum_into(c, pieces)
        for tensor in (sent, received):
            tensor.untyped_storage().resize_(0)

    return _Call(dist.all_to_all_single, (received, sent, numels, numels), finish)


def _all_reduce_in_one(cs: Sequence[Collective]) -> _Call:
    packed = torch.cat([c.input for c in cs])

    def finish() -> None:
        totals = torch.split(packed, [c.input.numel() for c in cs])
        for c, total in zip(cs, totals, strict=True):
            if total.dtype == c.output.dtype:
                store(c.output, total, c.scale, c.accumulate)
            else:
                _sum_into(c, [total])
        packed.untyped_storage().resize_(0)

    return _Call(dist.all_reduce, (packed,), finish)


_CALLS_IN_ONE: dict[CollectiveKind, Callable[[Sequence[Collective]], _Call]] = {
    CollectiveKind.ALL_GATHER: _all_gather_in_one,
    CollectiveKind.REDUCE_SCATTER: _reduce_scatter_in_one,
    CollectiveKind.ALL_REDUCE: _all_reduce_in_one,
}


def _move_to_end(pieces: Sequence[torch.Tensor], index: int) -> int:
    """Bring one piece to the nearer end of all, the others keep their order; return where."""
    end = 0 if index < len(pieces) / 2 else len(pieces) - 1
    if index == end:
        return end
    own = pieces[index].clone()
    towards = 1 if end > index else -1
    for position in range(index, end, towards):
        pieces[position].copy_(pieces[position + towards])
    pieces[end].copy_(own)
    return end


def _sum_into(c: Collective, pieces: list[torch.Tensor], *, are_apart: bool = True) -> None:
    """Store or add a collective's sum of pieces, made in their order in its output's dtype.

    What the pieces hold may be used up. Where they are not apart from the output, one of them is
    the end of it: a chunk of the sum is stored where that chunk of it was, or before.
    """
    into, scale, accumulate = c.output, c.scale, c.accumulate
    dtype = torch.promote_types(into.dtype, torch.float32) if c.sums_in_fp32 else into.dtype
    if not accumulate and pieces[0].dtype == dtype == into.dtype:
        torch.add(pieces[0], pieces[1], out=into)
        for piece in pieces[2:]:
            into.add_(piece)
        if scale != 1.0:
            into.mul_(scale)
        return
    tensors = (torch.split(tensor, SUM_CHUNK) for tensor in (into, *pieces))
    for target, first, *others in zip(*tensors, strict=True):
        # What is of another dtype is copied, also to add it; of a chunk, that is a small copy.
        is_direct = are_apart and not accumulate and dtype == into.dtype
        total = target.copy_(first) if is_direct else first.to(dtype)
        for other in others:
            total.add_(other)
        if accumulate:
            target.add_(total, alpha=scale)
        elif not is_direct:
            torch.mul(total, scale, out=target)
        elif scale != 1.0:
            total.mul_(scale)
        # Or it would be there while the next one is made.
        del total


class CudaStreams:
    """Streams of the current CUDA device. See `streams.StreamDevice`."""

    def new_stream(self, name: str) -> Stream:
        """Make a stream whose work goes before computation where both are ready."""
        del name
        # Computation waits for communication, never the other way round for long.
        stream: Stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        return stream

    def current_stream(self) -> Stream:
        """The stream that operations are queued on now."""
        return torch.cuda.current_stream()

    def is_current(self, stream: Stream) -> bool:
        """Whether that is a given stream."""
        return bool(torch.cuda.current_stream() == stream)

    def use(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Queue operations on a stream while the context lasts."""
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)


class NcclCollectives:
    """Collectives of NCCL on the current stream. See `streams.Collectives`.

    Reductions are plain sums: switches (NVLink SHARP) add, and do not multiply or divide.
    """

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, axis: Axis) -> None:
        """Fill `output` with the shards of all ranks."""
        all_gather_single(output, shard, group=axis.group)

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, axis: Axis) -> None:
        """Fill `output` with the sum over ranks of this rank's slice of `full`."""
        reduce_scatter_single(output, full, op=dist.ReduceOp.SUM, group=axis.group)

    def all_reduce(self, full: torch.Tensor, axis: Axis) -> None:
        """Replace `full` by its sum over ranks."""
        dist.all_reduce(full, op=dist.ReduceOp.SUM, group=axis.group)

    def in_one(self, axis: Axis) -> contextlib.AbstractContextManager[Any]:
        """Have the collectives of a context, all alike, be one kernel."""
        return in_one_launch(axis.group)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_numels: Sequence[int],
        sent_numels: Sequence[int],
        axis: Axis,
    ) -> None:
        """Send every rank its part of `sent`, and receive what all have for this one."""
        dist.all_to_all_single(
            received, sent, list(received_numels), list(sent_numels), group=axis.group
        )


class NcclRegistrar:
    """Memory of NCCL's own allocator, registered rank by rank. See `Registrar`.

    Windows (symmetric registration) are left out: all ranks would have to make them at one moment,
    and a rank may plan its gradients at another one than the others.
    """

    def new_pool(self, group: dist.ProcessGroup, device: torch.device) -> Any:
        """A pool of NCCL's allocator."""
        return torch.cuda.MemPool(_nccl(group, device).mem_allocator)

    def allocate(self, pool: Any, nbytes: int, device: torch.device) -> torch.Tensor:
        """A flat block of bytes from a pool."""
        with torch.cuda.use_mem_pool(pool, device):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def register(self, pool: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        """Tell a communicator of all memory of a pool."""
        _nccl(group, device).register_mem_pool(pool)

    def wait(self, device: torch.device) -> None:
        """Have the host wait for the device."""
        torch.cuda.synchronize(device)

    def deregister(self, pool: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        """Take that back."""
        _nccl(group, device).deregister_mem_pool(pool)


def _nccl(group: dist.ProcessGroup, device: torch.device) -> Any:
    return group._get_backend(device)


def host_block(nbytes: int, device: torch.device) -> torch.Tensor:
    """Flat bytes of host memory for copies from a device: pinned for CUDA, which writes it itself.

    Args:
        nbytes: How many.
        device: What is copied from.
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def wait_for_device(device: torch.device) -> None:
    """Wait on the host until everything queued on a device's current stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def is_capturing(device: torch.device) -> bool:
    """Whether what is queued on a device now is captured in a CUDA graph and not run."""
    # What was never used has no stream to capture, and asking would look for a driver.
    is_used = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_used and torch.cuda.is_current_stream_capturing()


class LateFlag:
    """A flag that a device computes, read when it is on the host: nobody waits for it.

    Args:
        flag: A tensor of one bool.
    """

    def __init__(self, flag: torch.Tensor) -> None:
        self._event: Any = None
        self._value = flag
        if flag.device.type == "cuda":
            self._value = host_block(1, flag.device).view(torch.bool)
            self._value.copy_(flag.view(1), non_blocking=True)
            self._event = torch.cuda.current_stream().record_event()

    def read(self, *, wait: bool = False) -> bool | None:
        """The flag; None where it is not there yet.

        Args:
            wait: Whether the host waits for it.
        """
        if self._event is not None:
            if wait:
                self._event.synchronize()
            elif not self._event.query():
                return None
        return bool(self._value)


def registrar_for(device: torch.device) -> Registrar | None:
    """What registers memory of a device; None where nothing has to be registered."""
    return NcclRegistrar() if device.type == "cuda" else None


@functools.cache
def _cuda_communicator(device: torch.device) -> StreamCommunicator:
    # One for all units: CUDA's come from a pool of 32, and with three for every unit
    # those of two units would be the same.
    with torch.cuda.device(device):
        return StreamCommunicator(CudaStreams(), NcclCollectives())


def communicator_for(device: torch.device) -> Communicator:
    """The communicator for a device; on CUDA one for all that is sharded on that device.

    Raises:
        ValueError: The device type is neither `cpu` nor `cuda`.
    """
    if device.type == "cpu":
        return CpuCommunicator()
    if device.type == "cuda":
        return _cuda_communicator(device)
    raise ValueError(f"fully_shard runs on 'cuda' and 'cpu' meshes, got {device.type!r}")
