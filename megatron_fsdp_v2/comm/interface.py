"""Interface of collectives: communicators, work handles, and errors of failed collectives."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, override

import torch
import torch.distributed as dist

from megatron_fsdp_v2._text import listed_ranks
from megatron_fsdp_v2.comm.record import RECORD


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the data-parallel mesh as this rank sees it.

    Attributes:
        group: Process group of the axis.
        size: Number of ranks.
        rank: This rank's coordinate.
        gather_group: Separate process group of the same ranks for gathers of weights; None:
            `group`.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    gather_group: dist.ProcessGroup | None = None

    def for_gathers(self) -> Axis:
        """Return the axis with the process group of gathers."""
        if self.gather_group is None:
            return self
        return Axis(self.gather_group, self.size, self.rank)


class CommStream(enum.Enum):
    """Independent communication queues; on a GPU, each one is a CUDA stream."""

    GATHER = "gather"
    REDUCE = "reduce"
    OUTER = "outer"


class CollectiveKind(enum.Enum):
    """Kind of a collective."""

    ALL_GATHER = "all_gather"
    """Fill the output with the inputs of all ranks, in rank order."""
    REDUCE_SCATTER = "reduce_scatter"
    """Sum this rank's slice of the input over ranks, and store the sum in the output."""
    ALL_REDUCE = "all_reduce"
    """Sum the input over ranks, and store the sum in the output."""
    ALL_TO_ALL = "all_to_all"
    """Send every rank its part of the input, and receive this rank's part from every rank."""

    # Faster than the `__hash__` of enums, which is written in Python.
    __hash__ = object.__hash__


SUMS = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
"""Kinds that sum over ranks; `store_scaled` writes their result."""


class Collective(NamedTuple):
    """Description of a collective to issue. A NamedTuple: a dataclass takes 3x as long to make.

    Attributes:
        kind: Kind of the collective.
        output: Flat output. Has `axis.size` times the elements of the input for an all-gather, and
            1 / `axis.size` of them for a reduce-scatter. The output of a sum may have any floating
            dtype; other outputs have the dtype of the input.
        input: Flat input. For an all-gather it may be a view of the output, and for an all-reduce
            the output; other kinds need separate memory. A reduction overwrites its input, which is
            in the communication dtype.
        axis: Participating ranks.
        comm_stream: Communication stream to run in.
        scale: Factor of a sum, applied once, when the sum is stored.
        accumulate: Whether a sum is added to the output instead of overwriting it.
        output_numels: Elements that an all-to-all receives from each rank.
        input_numels: Elements that an all-to-all sends to each rank.
        before: Fills the input; runs in the same stream before the collective.
        after: Consumes the output; runs in the same stream after the collective.
        sums_in_fp32: Whether a reduce-scatter is an all-to-all and a local sum in fp32, since NCCL
            rounds every partial sum to the dtype of the input. Ignored by other kinds.
        name: Name of the communicated buffers, for the error of a failed collective.
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
    sums_in_fp32: bool = False
    name: str = ""

    @property
    def full(self) -> torch.Tensor:
        """The larger tensor: the output of an all-gather, the input of other kinds."""
        return self.output if self.kind is CollectiveKind.ALL_GATHER else self.input

    def store(self, total: torch.Tensor) -> None:
        """Store a sum in the output, or add the sum to it."""
        store_scaled(self.output, total, self.scale, self.accumulate)

    def failure(self, error: Exception) -> RuntimeError:
        """Return the exception to raise if the process group raised an error."""
        kind = self.kind.value.replace("_", "-")
        what = f"{kind} of {self.name}" if self.name else kind
        RECORD.failed(f"{what} failed: {error}")
        failed = collective_error(what, self.axis.group, error)
        return RuntimeError(
            f"{failed}. If ranks ran different units, or units in another order (gloo then aborts "
            "one of them with 'collective mismatch'), fully_shard(..., "
            "options=RuntimeOptions(check_ranks='always')) names the unit and the ranks"
        )

    def run_on_one_rank(self) -> None:
        """Run the collective locally, for an axis of one rank."""
        if self.before is not None:
            self.before()
        if self.kind in SUMS:
            self.store(self.input)
        elif self.output.data_ptr() != self.input.data_ptr():
            self.output.copy_(self.input)
        if self.after is not None:
            self.after()


class Work(Protocol):
    """Work handle of a collective under way."""

    def wait(self) -> None:
        """Make later work of the calling stream wait for the collective. Idempotent."""


class _CompletedWork:
    def wait(self) -> None:
        """See `Work.wait`."""


DONE: Work = _CompletedWork()


class Communicator:
    """Issues the collectives of one root, or of one optimizer.

    With `async_op=False`, the result is available when the call returns. Tensors must stay
    allocated until the work handle has been waited for; the handle holds references to them.

    A collective that fails, when issued or waited for, raises a RuntimeError with its name.

    Attributes:
        has_streams: Whether operations are queued on streams. If False, there are no side streams,
            all methods that order streams are no-ops, and memory may be allocated anywhere.
    """

    has_streams = False

    def issue(self, collective: Collective, *, async_op: bool) -> Work:
        """Start a collective.

        Args:
            collective: The collective.
            async_op: Whether to return before it is done.
        """
        raise NotImplementedError

    def run(self, function: Callable[[], object], stream: Any, *, async_op: bool) -> Work:
        """Run a function that issues collectives or other operations.

        Args:
            function: The function.
            stream: Stream to run it in; None for that of reductions along an outer axis.
            async_op: Whether to return before its operations are done.
        """
        del stream, async_op
        function()
        return DONE

    def begin_pass(self, *, reuses_memory: bool = True) -> None:
        """Make the current stream the compute stream.

        Args:
            reuses_memory: Whether it waits for the compute stream of earlier passes, whose memory
                the pass may reuse.
        """

    def side_stream(self) -> Any | None:
        """Return the current stream; None if it is the compute stream."""
        return None

    def wait_event(self, event: Any) -> None:
        """Make the current stream and the compute stream wait for an event."""

    def wait_for(self, streams: Iterable[Any], *, and_compute: bool) -> None:
        """Make the current stream wait for other streams.

        Args:
            streams: Side streams to wait for.
            and_compute: Whether to wait for the compute stream as well.
        """

    def synchronize(self) -> None:
        """Make the host wait for the current stream."""

    def allocation_context(self) -> AbstractContextManager[Any]:
        """Return a context in which temporary buffers are allocated: on the compute stream.

        The value of the context is that stream, for `wait_before_free`; None without streams. After
        the context, the current stream waits for earlier uses of that memory.
        """
        return _ANYWHERE

    def wait_before_free(self, stream: Any) -> None:
        """Make a stream wait for the current stream, before memory is freed.

        Args:
            stream: The stream on which the memory was allocated.
        """


_ANYWHERE: AbstractContextManager[Any] = nullcontext()


class AbortedCommunicator(Communicator):
    """Raises an error in place of every collective.

    Args:
        reason: Message of the error.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    @override
    def issue(self, collective: Collective, *, async_op: bool) -> Work:
        """See `Communicator.issue`."""
        raise RuntimeError(self.reason)

    @override
    def run(self, function: Callable[[], object], stream: Any, *, async_op: bool) -> Work:
        """See `Communicator.run`."""
        raise RuntimeError(self.reason)


def store_scaled(into: torch.Tensor, value: torch.Tensor, scale: float, accumulate: bool) -> None:
    """Compute `into = scale * value`, or `into += scale * value`, without a converted copy.

    Products and sums are computed in the wider of both dtypes and rounded once.

    Args:
        into: Flat destination; may be `value` itself.
        value: Tensor of the same number of elements, of any floating dtype.
        scale: Factor of `value`.
        accumulate: Whether to add to `into` instead of overwriting it.
    """
    wider = into.dtype
    if value.dtype != wider:
        wider = torch.promote_types(wider, value.dtype)
    if into.data_ptr() == value.data_ptr() and into.dtype == value.dtype:
        if scale != 1.0:
            into.mul_(scale)
    elif accumulate:
        # `add_` converts elements itself; a converted copy would take as much memory as `into`.
        into.add_(value, alpha=scale)
    elif scale == 1.0:
        into.copy_(value)
    elif wider == value.dtype:
        torch.mul(value, scale, out=into)
    else:
        # With a Python number as factor, torch would round the product to the narrower dtype first.
        torch.mul(value, value.new_full((1,), scale, dtype=wider), out=into)


# -- errors -----------------------------------------------------------------------------------

_LOST = ("connection", "closed by peer", "broken pipe", "socket", "reset by peer", "remote process")
_LATE = ("timed out", "timeout")


def collective_error(what: str, group: dist.ProcessGroup | None, error: Exception) -> RuntimeError:
    """Return the error to raise for a failed collective.

    Args:
        what: The collective and its purpose, such as `all-gather of layers.3/0`.
        group: Process group of the collective; None for all ranks.
        error: Error of the process group.
    """
    ranks, timeout = members_of(group)
    own = dist.get_rank() if dist.is_initialized() else 0
    lines = str(error).strip().splitlines() or [type(error).__name__]
    others = [rank for rank in ranks if rank != own]
    return RuntimeError(f"{what} failed on rank {own}: {_explained(lines[0], others, timeout)}")


def is_connection_error(error: object) -> bool:
    """Whether the text of an error of a process group says that another process ended."""
    return any(word in str(error).lower() for word in _LOST)


def _explained(reason: str, others: list[int], timeout: timedelta | None) -> str:
    """Return the message of a process group, preceded by its meaning for other ranks."""
    several = len(others) != 1
    whose = listed_ranks(others) if others else "the others"
    who = f"one of {whose}" if several else whose
    lowered = reason.lower()
    if any(word in lowered for word in _LATE):
        within = f"within {timeout.total_seconds():g} s" if timeout else "in time"
        meaning = f"{who} did not take part {within}, the timeout of this process group"
    elif is_connection_error(reason):
        meaning = f"the connection to {who} was lost: a process ended"
    else:
        return reason
    return f"{meaning}. The first error in the logs of {whose} is the cause ({reason})"


@contextmanager
def naming_failures(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Name the collective in errors of the context; used for collectives outside of steps.

    Args:
        what: The collective and its purpose.
        group: Process group of the collective; None for all ranks.

    Raises:
        RuntimeError: The process group raised; its error is the cause.
    """
    try:
        yield
    except RuntimeError as error:
        raise collective_error(what, group, error) from error


def members_of(group: dist.ProcessGroup | None) -> tuple[list[int], timedelta | None]:
    """Return the global ranks of a group and its timeout; empty and None if it has failed."""
    ranks: list[int] = []
    timeout = None
    # Called while an error is constructed; an error of the failed group must not replace it.
    with suppress(Exception):
        group = group or dist.group.WORLD
        assert group is not None
        ranks = dist.get_process_group_ranks(group)
        timeout = group._get_backend(group._device_types[0]).options._timeout
    return ranks, timeout
