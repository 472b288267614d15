"""Device backends: collectives of gloo on a CPU; streams, events and registered memory of CUDA.

All code that depends on the type of a device is here. Names that depend on the version of torch are
in `comm/calls.py`, the interface is in `comm/interface.py`, and the order of streams and
collectives on a device with streams is in `comm/streams.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, override

import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm.calls import all_gather_single, broadcast_shards, is_gloo
from megatron_fsdp_v2.comm.interface import (
    DONE,
    Collective,
    CollectiveKind,
    Communicator,
    Work,
    store_scaled,
)
from megatron_fsdp_v2.comm.record import RECORD
from megatron_fsdp_v2.comm.streams import (
    CommStreams,
    NcclCollectives,
    Stream,
    StreamCommunicator,
    new_comm_streams,
)

SUM_CHUNK = 1 << 16
"""Elements summed at a time if dtypes differ or the sum is not computed in place."""

BROADCAST_BYTES = 1 << 19
"""Bytes of a gather's output from which on broadcasts are faster with gloo."""


EXIT_DELAY_S = 0.1
"""Time for gloo's threads to free their last tensors before Python shuts down."""


@dataclass(slots=True, eq=False)
class _BackendWork:
    """Work handle of a CPU process group.

    Attributes:
        collective: The collective, whose tensors stay allocated until it is done.
        c10d_work: Work handle of the process group.
        finish: Computes the result from the received data; None if it is the result.
    """

    collective: Collective | None
    c10d_work: Any
    finish: Callable[[], None] | None

    def wait(self) -> None:
        """See `Work.wait`."""
        collective, c10d_work, finish = self.collective, self.c10d_work, self.finish
        if collective is None:
            return
        # Cleared first: the cleanup after a failure calls `wait` again before it frees memory.
        self.collective = self.c10d_work = self.finish = None
        try:
            c10d_work.wait()
        except RuntimeError as error:
            raise collective.failure(error) from error
        del c10d_work
        if finish is not None:
            finish()
        if collective.after is not None:
            collective.after()


class CpuCommunicator(Communicator):
    """Collectives of a CPU process group (gloo). Communication streams are ignored."""

    @override
    def issue(self, collective: Collective, *, async_op: bool) -> Work:
        """See `Communicator.issue`."""
        if collective.axis.size == 1:
            collective.run_on_one_rank()
            return DONE
        nbytes = max(collective.output.nbytes, collective.input.nbytes)
        RECORD.add(collective.name, collective.kind, nbytes, collective.axis.group)
        if collective.before is not None:
            collective.before()
        try:
            c10d_work, finish = _START[collective.kind](collective)
        except RuntimeError as error:
            raise collective.failure(error) from error
        work = _BackendWork(collective, c10d_work, finish)
        if not async_op:
            work.wait()
        return work


type _Started = tuple[Any, Callable[[], None] | None]
"""Work handle of the process group, and `_BackendWork.finish`."""


def _all_gather(c: Collective) -> _Started:
    """All-gather. Gloo's ring takes up to 3x as long as concurrent broadcasts of all ranks."""
    group = c.axis.group
    if c.output.nbytes >= BROADCAST_BYTES and is_gloo(group):
        return broadcast_shards(c.output, c.input, group=group), None
    return all_gather_single(c.output, c.input, group=group, async_op=True), None


def _reduce_scatter(c: Collective) -> _Started:
    """Reduce-scatter as an all-to-all and a local sum; gloo's is several times slower.

    The sum is computed in rank order; `_sum_into` defines its dtype.
    """
    size, rank, full = c.axis.size, c.axis.rank, c.input
    # This rank's own piece is not sent, which saves its memory in the receive buffer.
    numel = full.numel() // size
    numels = [numel if r != rank else 0 for r in range(size)]
    parts = full.chunk(size)
    end = _move_to_end(parts, rank)
    num_travel = full.numel() - numel
    # With 2 ranks, the received terms fit into the end of the output that their sum overwrites.
    is_lent = size == 2 and not c.accumulate and full.itemsize <= c.output.itemsize
    received = c.output.view(full.dtype)[-num_travel:] if is_lent else full.new_empty(num_travel)
    sent = full.narrow(0, numel if end == 0 else 0, num_travel)
    pieces = list(received.chunk(size - 1))
    pieces.insert(rank, parts[end])

    def finish() -> None:
        _sum_into(c, pieces)
        if not is_lent:
            # Freed explicitly: gloo's thread holds a reference until it runs again.
            received.untyped_storage().resize_(0)

    work = dist.all_to_all_single(received, sent, numels, numels, group=c.axis.group, async_op=True)
    return work, finish


def _all_reduce(c: Collective) -> _Started:
    def finish() -> None:
        if c.input.dtype == c.output.dtype:
            c.store(c.input)
        else:
            _sum_into(c, [c.input])

    return dist.all_reduce(c.input, group=c.axis.group, async_op=True), finish


def _all_to_all(c: Collective) -> _Started:
    numels = list(c.output_numels), list(c.input_numels)
    work = dist.all_to_all_single(c.output, c.input, *numels, group=c.axis.group, async_op=True)
    return work, None


_START: dict[CollectiveKind, Callable[[Collective], _Started]] = {
    CollectiveKind.ALL_GATHER: _all_gather,
    CollectiveKind.REDUCE_SCATTER: _reduce_scatter,
    CollectiveKind.ALL_REDUCE: _all_reduce,
    CollectiveKind.ALL_TO_ALL: _all_to_all,
}


def _move_to_end(pieces: Sequence[torch.Tensor], index: int) -> int:
    """Move one piece to the nearer end in place, others stay in order; return the end's index."""
    end = 0 if index < len(pieces) / 2 else len(pieces) - 1
    if index == end:
        return end
    own = pieces[index].clone()
    towards = 1 if end > index else -1
    for position in range(index, end, towards):
        pieces[position].copy_(pieces[position + towards])
    pieces[end].copy_(own)
    return end


def _sum_into(c: Collective, pieces: list[torch.Tensor]) -> None:
    """Store or add a collective's sum of pieces, computed in their order.

    The sum is computed in the dtype of the pieces, the communication dtype, as NCCL does; in fp32
    with `sums_in_fp32`. May overwrite the pieces. If a piece aliases the end of the output, each
    chunk of the sum is stored over the same chunk of that piece, or before it.
    """
    into, scale, accumulate = c.output, c.scale, c.accumulate
    dtype = torch.float32 if c.sums_in_fp32 else pieces[0].dtype
    if not accumulate and pieces[0].dtype == dtype == into.dtype:
        torch.add(pieces[0], pieces[1], out=into)
        for piece in pieces[2:]:
            into.add_(piece)
        if scale != 1.0:
            into.mul_(scale)
        return
    tensors = (torch.split(tensor, SUM_CHUNK) for tensor in (into, *pieces))
    for target, first, *others in zip(*tensors, strict=True):
        # Several pieces are summed in a copy, since one of them may alias the target.
        total = first.to(dtype, copy=bool(others))
        for other in others:
            total.add_(other)
        store_scaled(target, total, scale, accumulate)
        # Otherwise this chunk would stay allocated while the next one is computed.
        del total


class CudaStreams:
    """Streams of the current CUDA device. See `streams.StreamDevice`.

    Every collective and gradient asks for the current stream. `torch.cuda.current_stream` makes an
    object in several Python calls; a comparison of handles is one call in C.
    """

    def new_stream(self, name: str) -> Stream:
        """Make a stream with a higher priority than computation."""
        del name
        # Computation often waits for communication, and communication rarely for computation.
        stream: Stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        return stream

    def current_stream(self) -> Stream:
        """Return the current stream."""
        return torch.cuda.current_stream()

    def is_current(self, stream: Any) -> bool:
        """Return whether a stream is the current one."""
        handle: int = torch._C._cuda_getCurrentRawStream(stream.device_index)
        return bool(handle == stream.cuda_stream)

    def use(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which operations are queued on a stream."""
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)


class NcclRegistrar:
    """Allocates memory of a device and registers it with NCCL, independently on each rank.

    Does not use windows (symmetric registration): all ranks would have to register together, and
    ranks may plan their gradients at different times.
    """

    def allocate(
        self, nbytes: int, group: dist.ProcessGroup, device: torch.device
    ) -> tuple[Any, torch.Tensor]:
        """Return a pool of memory of NCCL's allocator, and a flat block of bytes from it.

        Args:
            nbytes: Size of the block.
            group: Process group whose library allocates the memory.
            device: Device of the memory.
        """
        pool = torch.cuda.MemPool(_nccl(group, device).mem_allocator)
        with torch.cuda.use_mem_pool(pool, device):
            return pool, torch.empty(nbytes, dtype=torch.uint8, device=device)

    def register(self, pool: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        """Register all memory of a pool with a process group. Not collective.

        Raises:
            RuntimeError: The memory cannot be registered.
        """
        _nccl(group, device).register_mem_pool(pool)

    def wait(self, device: torch.device) -> None:
        """Make the host wait for all streams of a device."""
        torch.cuda.synchronize(device)

    def deregister(self, pool: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        """Deregister the memory of a pool, before it is freed."""
        _nccl(group, device).deregister_mem_pool(pool)


def _nccl(group: dist.ProcessGroup, device: torch.device) -> Any:
    return group._get_backend(device)


def wait_for_device(device: torch.device) -> None:
    """Make the host wait for a device's current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def wait_for_all_streams(device: torch.device) -> None:
    """Make the host wait for all streams of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def abort_process_groups(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Abort process groups: their collectives under way end with an error. No communication.

    Only NCCL can abort. Collectives of gloo end by themselves: with an error if a rank is lost, at
    the latest after the timeout of the process group.

    Args:
        groups: Process groups; those that were destroyed are left out.
        device: Device that they communicate on.
    """
    known = [group for group in groups if group in dist.distributed_c10d._world.pg_map]
    backends: list[Any] = [group._get_backend(device) for group in known]
    # NCCL aborts several communicators in one call: separate calls may wait for each other
    # (pytorch issue 119797).
    grouped = backends[0] if backends and hasattr(backends[0], "_group_start") else None
    if grouped is not None:
        grouped._group_start()
    for group in known:
        group.abort()
    if grouped is not None:
        grouped._group_end()


def is_capturing(device: torch.device) -> bool:
    """Return whether operations on a device are captured in a CUDA graph now."""
    # An uninitialized CUDA is not capturing, and the query would load the driver.
    is_used = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_used and torch.cuda.is_current_stream_capturing()


def registrar_for(device: torch.device) -> NcclRegistrar | None:
    """Return the registrar of a device; None if its memory needs no registration."""
    return NcclRegistrar() if device.type == "cuda" else None


def communicator_for(device: torch.device) -> Communicator:
    """Make the communicator of a root, or of an optimizer, on a device.

    Raises:
        ValueError: The device type is neither `cpu` nor `cuda`.
    """
    # Plans run on the meta device, with a simulated cluster instead of gloo.
    if device.type in ("cpu", "meta"):
        if device.type == "cpu":
            _leave_gloo_time_at_exit()
        return CpuCommunicator()
    if device.type == "cuda":
        return StreamCommunicator(CudaStreams(), NcclCollectives(), _comm_streams(device))
    raise ValueError(f"fully_shard runs on 'cuda' and 'cpu' meshes, got {device.type!r}")


@functools.cache
def _leave_gloo_time_at_exit() -> None:
    # A thread of gloo needs the interpreter lock to free the tensors of a collective. If it first
    # asks for the lock while Python shuts down, it terminates the process: a program that ends
    # right after a collective, with a process group that is alive, was seen to fail in 6 of 15 runs
    # on a busy machine. A sleeping main thread releases the lock.
    atexit.register(time.sleep, EXIT_DELAY_S)


@functools.cache
def _comm_streams(device: torch.device) -> CommStreams:
    # Shared by all roots: torch takes streams from a pool of 32, and would soon give one stream to
    # several roots anyway.
    with torch.cuda.device(device):
        return new_comm_streams(CudaStreams())
