"""What collectives look like to the rest of the core: issue, get a work handle, wait."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm.errors import Label

__all__ = [
    "DONE",
    "SUMS",
    "Axis",
    "Collective",
    "CollectiveKind",
    "CommStream",
    "Communicator",
    "Registrar",
    "Work",
    "run_alone",
    "store",
]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the data-parallel mesh as this rank sees it.

    Attributes:
        group: Its process group.
        size: Ranks along it.
        rank: This rank's coordinate on it.
        gather_group: Another group of the same ranks, that weights are gathered in; None for
            `group`.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    gather_group: dist.ProcessGroup | None = None

    def for_gathers(self) -> Axis:
        """The same ranks, with the group that weights are gathered in."""
        if self.gather_group is None:
            return self
        return Axis(self.gather_group, self.size, self.rank)


class CommStream(enum.Enum):
    """Independent queues of communication; each is a stream of its own on a GPU."""

    GATHER = "gather"
    REDUCE = "reduce"
    OUTER = "outer"


class CollectiveKind(enum.Enum):
    """What a collective does."""

    ALL_GATHER = "all_gather"
    """Fill the output with the inputs of all ranks, in rank order."""
    REDUCE_SCATTER = "reduce_scatter"
    """Sum this rank's slice of the input over ranks, and store that in the output."""
    ALL_REDUCE = "all_reduce"
    """Sum the input over ranks, and store that in the output."""
    ALL_TO_ALL = "all_to_all"
    """Send every rank its part of the input, and receive what all have for this one."""

    # That of enums is a Python function.
    __hash__ = object.__hash__

    @property
    def title(self) -> str:
        """What to call it in a message."""
        return self.value.replace("_", "-")


SUMS = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
"""Those whose result is stored from what was summed."""


class Collective(NamedTuple):
    """A collective, before it is issued. Made often: a dataclass takes three times as long.

    Attributes:
        kind: What it does.
        output: Flat. `axis.size` times as many elements as the input for an all-gather, as many
            fewer for a reduce-scatter. A sum is stored in any floating dtype, everything else in
            the dtype of the input.
        input: Flat; for an all-gather it may be a view of the output. What a reduction is given,
            in the communication dtype, is consumed.
        axis: Ranks that take part.
        comm_stream: Queue to run in.
        scale: Factor of a sum, applied once, where it is stored.
        accumulate: Whether a sum is added to the output instead of overwriting it.
        output_numels: Elements that an all-to-all receives of each rank.
        input_numels: Elements that it sends to each rank.
        before: Queues what fills the input, in the same queue.
        after: Queues what becomes of the output, likewise.
        sums_in_fp32: Whether a reduce-scatter sends its terms to the ranks that add them up in
            fp32, where a library's would round every partial sum to the dtype of the input.
            Nothing to other kinds.
        arrival: Memory of the output, in the dtype of the input, for all that other ranks send to
            a reduce-scatter; free for that until the sum is stored, unless it is added. None where
            it does not fit in there.
    """

    kind: CollectiveKind
    output: torch.Tensor
    input: torch.Tensor
    axis: Axis
    comm_stream: CommStream
    scale: float = 1.0
    accumulate: bool = False
    output_numels: Sequence[int] = ()
    input_numels: Sequence[int] = ()
    before: Callable[[], object] | None = None
    after: Callable[[], object] | None = None
    arrival: torch.Tensor | None = None
    sums_in_fp32: bool = False

    @property
    def full(self) -> torch.Tensor:
        """The larger of both tensors: what all ranks together have or give."""
        return self.output if self.kind is CollectiveKind.ALL_GATHER else self.input


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Order what the caller does next after the collective. Idempotent."""
        ...


@runtime_checkable
class Communicator(Protocol):
    """The collectives data parallelism needs.

    With `async_op=False` the result is in place when the call returns. Tensors passed in must
    stay allocated until the work has been waited for; the work holds references to them.

    One that fails, on being issued or waited for, is a RuntimeError with its label's name.

    Attributes:
        has_streams: Whether operations are queued on streams. If not, there is nothing to order:
            no side stream, nothing to wait for or to settle, and memory is had anywhere.
    """

    @property
    def has_streams(self) -> bool:
        """See above."""
        ...

    def labeled(self, label: Label) -> Communicator:
        """The same, on the same communication streams, for what a label names.

        Args:
            label: Read where a collective fails.
        """
        ...

    def issue(self, collective: Collective, *, async_op: bool) -> Work:
        """Start a collective.

        Args:
            collective: What it does.
            async_op: Whether to return before it is done.
        """
        ...

    def together(self) -> AbstractContextManager[None]:
        """Put asynchronous collectives off to the end of a context, and issue those alike in one.

        That is, gathers or sums of one dtype among the same ranks. What is issued in the context is
        waited for after it. Also of communicators that share labels with this one.
        """
        ...

    def begin_pass(self) -> None:
        """Take the stream that operations are queued on now for the compute stream."""
        ...

    def side_stream(self) -> Any | None:
        """The stream that operations are queued on now; None where that is the compute stream."""
        ...

    def wait_for(self, streams: Iterable[Any], *, and_compute: bool) -> None:
        """Order what the caller does next after what is queued on other streams.

        Args:
            streams: Side streams.
            and_compute: Whether on the compute stream as well.
        """
        ...

    def synchronize(self) -> None:
        """Have the host wait for everything queued on the current stream."""
        ...

    def memory(self) -> AbstractContextManager[Any]:
        """Where temporary buffers are given memory: that of the compute stream.

        What the caller does next is ordered after whatever used that memory before.
        """
        ...

    def settle(self) -> None:
        """Order the compute stream after the caller's, before memory is taken away."""
        ...


class Registrar(Protocol):
    """What the registration of memory needs of a device; that of CUDA is in `backends.py`."""

    def new_pool(self, group: dist.ProcessGroup, device: torch.device) -> Any:
        """A pool of memory that can be registered.

        Args:
            group: A process group whose library allocates it.
            device: Where.
        """
        ...

    def allocate(self, pool: Any, nbytes: int, device: torch.device) -> torch.Tensor:
        """A flat block of bytes from a pool."""
        ...

    def register(self, pool: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        """Tell a process group of all memory of a pool. Not collective.

        Raises:
            RuntimeError: It cannot be registered.
        """
        ...

    def wait(self, device: torch.device) -> None:
        """Have the host wait for everything that is queued on a device, on all of its streams."""
        ...

    def deregister(self, pool: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        """Take that back, before the memory is given up."""
        ...


class _CompletedWork:
    def wait(self) -> None:
        return None


DONE: Work = _CompletedWork()


def store(into: torch.Tensor, value: torch.Tensor, scale: float, accumulate: bool) -> None:
    """`into = scale * value`, or `into += scale * value`, in one pass over both.

    The product is made in the wider of both dtypes.

    Args:
        into: Flat; may be `value` itself.
        value: As many elements, of any floating dtype.
        scale: Factor of `value`.
        accumulate: Add instead of overwriting.
    """
    wider = into.dtype
    if value.dtype != wider:
        wider = torch.promote_types(wider, value.dtype)
    if into.data_ptr() == value.data_ptr() and into.dtype == value.dtype:
        if scale != 1.0:
            into.mul_(scale)
    elif accumulate:
        # A wider sum takes narrower terms as they are; a copy of them would be as large as it is.
        into.add_(value if wider == into.dtype else value.to(into.dtype), alpha=scale)
    elif scale == 1.0:
        into.copy_(value)
    elif wider == value.dtype:
        torch.mul(value, scale, out=into)
    else:
        # Times a number, the product would be rounded to the narrower dtype first.
        torch.mul(value, value.new_full((1,), scale, dtype=wider), out=into)


def run_alone(collective: Collective) -> None:
    """A collective among one rank, which nobody has to be asked for."""
    output, given = collective.output, collective.input
    if collective.before is not None:
        collective.before()
    if collective.kind in SUMS:
        store(output, given, collective.scale, collective.accumulate)
    elif output.data_ptr() != given.data_ptr():
        output.copy_(given)
    if collective.after is not None:
        collective.after()
