"""Flat buffers of a parameter group, and redistribution between them.

[Note: the buffers of a group] All parameters of a group lie in one flat tensor, split into slices.
Each of these buffers holds a span of slices, with one placement per axis of the data-parallel mesh:

- main weight: stepped by the optimizer;
- model weight: kept between uses; the main weight itself if dtype and placement are the same;
- gathered weight: the whole tensor, for computation;
- full gradient: this rank's gradient of the whole tensor, written by autograd;
- partial gradient: its sum along the inner axis, only with two axes;
- main gradient: read by the optimizer.

`DataParallelBuffer.redistribute` makes every transfer between them.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2.comm.interface import (
    DONE,
    Axis,
    Collective,
    CollectiveKind,
    CommStream,
    Communicator,
    Work,
)
from megatron_fsdp_v2.dtensor.row_shards import GroupInfo
from megatron_fsdp_v2.layout.buffer_layout import BufferLayout, Granularity
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.layout.placement import AxisPlacements, Placement
from megatron_fsdp_v2.memory.allocator import Allocator, BufferUse, TemporaryBuffer, alias_of
from megatron_fsdp_v2.memory.host_memory import empty_in_host_memory
from megatron_fsdp_v2.memory.observer import (
    BufferAcquired,
    BufferReleasing,
    CollectiveIssued,
    Observer,
)


@dataclass(frozen=True, slots=True)
class Span:
    """Neighboring slices of a flat buffer.

    Attributes:
        first: Index of the first slice.
        count: Number of slices.
    """

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class ShardGrid:
    """Mapping of a flat buffer's slices onto the axes of a data-parallel mesh.

    The inner axis splits the buffer into large pieces and the outer axis splits each piece again,
    so that a buffer that the outer axis replicates is gathered along the inner axis alone.

    Attributes:
        axes: The mesh axes, outermost first.
        parts: Number of pieces per axis; 1 for an axis that only replicates.
    """

    axes: tuple[Axis, ...]
    parts: tuple[int, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, placements: Sequence[AxisPlacements]) -> ShardGrid:
        """Return the grid for main weights, the most finely sharded tensors, as this rank sees it.

        Args:
            mesh: The data-parallel mesh.
            placements: Placements per mesh axis, outermost first.
        """
        axes = tuple(
            Axis(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis))
            for axis in range(mesh.ndim)
        )
        parts = tuple(
            axis.size if placement.main_weight is Placement.SHARD else 1
            for axis, placement in zip(axes, placements, strict=True)
        )
        return cls(axes, parts)

    @property
    def num_slices(self) -> int:
        """Number of slices of the flat buffer."""
        return math.prod(self.parts)

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance in slices between neighboring ranks of each axis; 0 if the axis replicates."""
        strides, stride = [], 1
        for parts in self.parts:
            strides.append(stride if parts > 1 else 0)
            stride *= parts
        return tuple(strides)

    def span(self, placements: Sequence[Placement]) -> Span:
        """Return this rank's slices of a tensor with these placements (one per axis)."""
        first, count = 0, self.num_slices
        pairs = zip(self.axes, self.parts, placements, strict=True)
        for axis, parts, placement in reversed(list(pairs)):
            if placement is Placement.SHARD and parts > 1:
                count //= parts
                first += axis.rank * count
        return Span(first, count)


@dataclass(frozen=True, slots=True)
class Offload:
    """Offloading of main weights and main gradients to host memory.

    Attributes:
        pin_memory: Whether the memory is pinned, so that copies overlap other work.
    """

    pin_memory: bool


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Properties that all parameters of one group share.

    Attributes:
        dtypes: Dtypes of weights and gradients.
        requires_grad: Whether the parameters are trained.
        placements: Placements per mesh axis, outermost first.
        granularity: The smallest block that a shard boundary never splits.
        scale: Factor of a gradient's sum over data-parallel ranks.
        on_missing_grad: `none`, `zero` or `error`; see `fully_shard`.
        mesh: The data-parallel mesh.
        grid: Mapping of flat buffers onto the axes of the mesh, as this rank sees them.
        reduces: Whether gradients are summed over data-parallel ranks. Otherwise, a main gradient
            is this rank's own gradient of its rows, without scaling.
        offload: Host memory for main weights and gradients; None keeps them on the device.
    """

    dtypes: GroupDtypes
    requires_grad: bool
    placements: tuple[AxisPlacements, ...]
    granularity: Granularity
    scale: float
    on_missing_grad: str
    # Ranks compare the repr of a spec.
    mesh: DeviceMesh = field(repr=False)
    grid: ShardGrid = field(repr=False, compare=False)
    reduces: bool = True
    offload: Offload | None = None

    @property
    def grad_factors(self) -> tuple[float, float]:
        """Factors of a gradient's terms and of their sum; their product is `scale`.

        The whole factor is applied to the sum, because the sum is a shard and the terms are full
        buffers. A fp16 sum may exceed 65504 and overflow, so with fp16 the terms are multiplied by
        the power of two in a factor below 1, which is exact unless a gradient underflows.
        """
        if torch.float16 not in (self.dtypes.grad_comm, self.dtypes.main_grad):
            return 1.0, self.scale
        before = min(1.0, 2.0 ** (math.frexp(self.scale)[1] - 1))
        return before, self.scale / before

    @property
    def replicated_axes(self) -> list[int]:
        """Indices of the axes whose ranks update the same rows of main weights equally."""
        placements = enumerate(self.placements) if self.reduces else ()
        return [axis for axis, each in placements if each.main_weight is Placement.REPLICATE]

    @property
    def num_replicas(self) -> int:
        """Number of ranks that hold the same rows of main weights and gradients."""
        axes = zip(self.grid.axes, self.grid.strides, strict=True)
        return math.prod(axis.size for axis, stride in axes if not stride)


@dataclass
class BufferContext:
    """State shared by the flat buffers of one parameter group.

    Attributes:
        info: Information about the group for its sharded parameters, with its name.
        layout: Positions of parameters in the whole flat tensor.
        spec: Properties that all parameters of the group share.
        device: Device of the buffers.
        comm: Issues collectives.
        allocator: Makes temporary buffers.
        observer: Receives events of temporary buffers and main gradients.
        transfers: The collectives between two buffers, by the placements of both.
    """

    info: GroupInfo
    layout: BufferLayout
    spec: GroupSpec
    device: torch.device
    comm: Communicator
    allocator: Allocator
    observer: Observer = field(default_factory=Observer)
    transfers: dict[tuple[Sequence[Placement], Sequence[Placement]], Sequence[_Transfer]] = field(
        default_factory=dict
    )

    def temporary(
        self,
        kind: str,
        use: BufferUse,
        placements: Sequence[Placement],
        dtype: torch.dtype,
        *,
        packing: int = 1,
    ) -> DataParallelBuffer:
        """Make a buffer without memory; `take` allocates its memory, and `drop` frees it.

        Args:
            kind: Kind of content, for reports.
            use: Use of the buffer.
            placements: Placements per mesh axis, outermost first.
            dtype: Element type.
            packing: See `DataParallelBuffer`.
        """
        numel = self.spec.grid.span(placements).count * self.layout.shard_numel // packing
        name = f"{self.info.name}/{kind}"
        memory = self.allocator.buffer(name, use, numel, dtype, self.device)
        return DataParallelBuffer(self, placements, memory.tensor, memory, packing=packing)

    def main_memory(
        self, span: Span, dtype: torch.dtype, *, is_overwritten: bool = False
    ) -> torch.Tensor:
        """Allocate flat memory for a main weight or main gradient, on the device or in host memory.

        Args:
            span: Slices that the memory holds.
            dtype: Element type.
            is_overwritten: Whether the caller writes all elements. Otherwise they are zeroed, so
                that padding does not count in norms and checks.
        """
        numel = span.count * self.layout.shard_numel
        make = torch.empty if is_overwritten else torch.zeros
        if self.spec.offload is None:
            return make(numel, dtype=dtype, device=self.device)
        is_pinned = self.spec.offload.pin_memory and self.device.type == "cuda"
        is_meta = self.device.type == "meta"
        memory = empty_in_host_memory((numel,), dtype, pin_memory=is_pinned, is_meta=is_meta)
        return memory if is_overwritten else memory.zero_()

    def observed(
        self, collective: Collective, number: int, *, is_temporary: bool, async_op: bool
    ) -> Work:
        """Start a collective over several ranks, and report it to the observer.

        Args:
            collective: The collective.
            number: Index of its mesh axis.
            is_temporary: Whether the result is in a temporary buffer.
            async_op: Whether to return before it is done.
        """
        full, kind = collective.full, collective.kind.value
        event = CollectiveIssued(
            self.info.name, kind, number, full.numel(), full.itemsize, is_temporary, async_op
        )
        issue = functools.partial(self.comm.issue, collective, async_op=async_op)
        return self.observer.collective(event, issue)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a flat tensor over all ranks of the mesh, in place. Collective."""
        for number, axis in reversed(list(enumerate(self.spec.grid.axes))):
            kind, stream = CollectiveKind.ALL_REDUCE, CommStream.REDUCE
            collective = Collective(kind, tensor, tensor, axis, stream, name=self.info.name)
            if self.observer.subscribers and axis.size > 1:
                self.observed(collective, number, is_temporary=False, async_op=False)
            else:
                self.comm.issue(collective, async_op=False)


class _Transfer(NamedTuple):
    """One collective of a redistribution.

    Attributes:
        kind: Kind of the collective.
        number: Index of the mesh axis.
        axis: Participating ranks.
        comm_stream: Communication stream to run in.
        span: Slices that its output holds.
    """

    kind: CollectiveKind
    number: int
    axis: Axis
    comm_stream: CommStream
    span: Span


class DataParallelBuffer:
    """This rank's span of a group's flat tensor, with one placement per mesh axis.

    Attributes:
        context: Shared by the buffers of the group.
        placements: Placements per mesh axis, outermost first.
        span: Slices that this rank holds.
        tensor: Flat storage of the span, `span.count * layout.shard_numel / packing` elements.
        memory: Temporary memory of `tensor`; None if it always has memory.
        packing: Elements of the layout per element of `tensor`.
        comm_copy: Buffer in the communication dtype that is reduced instead of this one.
        staging: For a buffer in host memory: buffer on the device that receives results.
    """

    def __init__(
        self,
        context: BufferContext,
        placements: Sequence[Placement],
        tensor: torch.Tensor,
        memory: TemporaryBuffer | None = None,
        *,
        packing: int = 1,
        staging: DataParallelBuffer | None = None,
        span: Span | None = None,
    ) -> None:
        self.context = context
        self.placements = tuple(placements)
        self.span = span or context.spec.grid.span(placements)
        self.tensor = tensor
        self.memory = memory
        self.packing = packing
        self.comm_copy: DataParallelBuffer | None = None
        self.staging = staging

    @property
    def layout(self) -> BufferLayout:
        """Positions of parameters in the whole flat tensor."""
        return self.context.layout

    @property
    def nbytes(self) -> int:
        """Bytes of the span."""
        return self.tensor.nbytes

    def rows(self, index: int) -> tuple[int, int]:
        """Return the row range of a parameter in this span: first row, one past the last row."""
        return self.layout.local_rows(index, self.span.first, self.span.count)

    def view(self, index: int) -> torch.Tensor:
        """Return this span's rows of a parameter, as a view of shape `(rows, *shape[1:])`.

        If the span is the whole tensor, these are all rows. With packing, the last dimension is
        shorter.
        """
        offset, shape = place_in(self.layout, self.span, index)
        if self.packing > 1:
            offset, shape = offset // self.packing, (*shape[:-1], shape[-1] // self.packing)
        if self.memory is not None:
            return self.memory.alias(offset, shape)
        return alias_of(self.tensor, offset, shape)

    def track_alias(self, tensor: torch.Tensor) -> None:
        """Register an alias of a view of this buffer, which moves with the buffer's memory."""
        if self.memory is not None:
            self.memory.track_alias(tensor)

    def piece(self, span: Span) -> torch.Tensor:
        """Return the flat part of this buffer that holds a narrower span."""
        if span == self.span:
            return self.tensor
        slice_numel = self.layout.shard_numel // self.packing
        start = (span.first - self.span.first) * slice_numel
        return self.tensor.narrow(0, start, span.count * slice_numel)

    def part(self, placements: Sequence[Placement]) -> DataParallelBuffer:
        """Return the part of this buffer that a finer placement holds, in the same memory."""
        tensor = self.piece(self.context.spec.grid.span(placements))
        return DataParallelBuffer(self.context, placements, tensor, packing=self.packing)

    # -- memory -------------------------------------------------------------------------------

    def reallocate(self) -> None:
        """Move the values of a main weight to new memory. Views of the old memory keep it."""
        memory = self.context.main_memory(self.span, self.tensor.dtype, is_overwritten=True)
        self.tensor = memory.copy_(self.tensor)

    @property
    def is_live(self) -> bool:
        """Whether the buffer has memory."""
        return self.memory is None or self.memory.is_live

    def take(self) -> torch.Tensor:
        """Allocate uninitialized memory if the buffer has none, and return `tensor`."""
        memory, observer = self.memory, self.context.observer
        if memory is None or memory.is_live:
            return self.tensor
        with self.context.comm.allocation_context() as memory.stream:
            tensor = memory.acquire()
            if observer.subscribers:
                observer.emit(BufferAcquired(memory))
        return tensor

    def drop(self) -> None:
        """Free the temporary memory of this buffer and of `comm_copy`. Idempotent."""
        self._release()
        if self.comm_copy is not None:
            self.comm_copy.drop()

    def _release(self) -> None:
        memory, observer = self.memory, self.context.observer
        if memory is not None and memory.is_live:
            self.context.comm.wait_before_free(memory.stream)
            if observer.subscribers:
                observer.emit(BufferReleasing(memory))
            memory.release()

    def return_to_saved_views(self) -> None:
        """Move gathered values to the memory that views saved by autograd refer to.

        A trace pool gathers to other memory while another buffer uses that memory.

        Raises:
            RuntimeError: Another buffer still uses it.
        """
        memory = self.memory
        if memory is not None and memory.displaced_from is not None:
            values = self.tensor.clone()
            self._release()
            self.take()
            if memory.arena is not None:
                memory.arena.check_not_displaced(memory)
            self.tensor.copy_(values)

    # -- redistribution -----------------------------------------------------------------------

    def redistribute(
        self,
        out: DataParallelBuffer,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        async_op: bool = False,
        before: Callable[[], object] | None = None,
    ) -> Work:
        """Transfer the values into another buffer with other placements, and allocate that buffer.

        The placements of both buffers determine the collectives, axis by axis: `SHARD` to
        `REPLICATE` is an all-gather, `PARTIAL` to `SHARD` a reduce-scatter, and `PARTIAL` to
        `REPLICATE` an all-reduce. With equal placements, values are copied, scaled or added.
        Collective over the axes that differ. A reduction destroys the values of this buffer.

        Args:
            out: Destination. It may contain the memory of this buffer (an all-gather in place).
            scale: Factor of a sum.
            accumulate: Whether a sum is added to `out` instead of overwriting it.
            async_op: Whether to return before the transfer is done. Without streams, all of several
                collectives but the last one are waited for, so that ranks issue them in one order.
            before: Fills this buffer; queued in the communication stream before the collective.
        """
        context = self.context
        out.take()
        source = self.tensor if self.comm_copy is None else self._copied_to(self.comm_copy)
        target, after = out.tensor, None
        if out.staging is not None:
            target = out.staging.take()
            load = functools.partial(target.copy_, out.tensor, non_blocking=True)
            before = load if accumulate else before
            after = functools.partial(out.tensor.copy_, target, non_blocking=True)
        between, known = (self.placements, out.placements), context.transfers
        steps = known.get(between) or known.setdefault(between, self._steps(out))
        work = DONE
        is_queued = context.comm.has_streams and len({step.comm_stream for step in steps}) == 1
        for step in steps:
            kind, number, axis, comm_stream, span = step
            is_last = step is steps[-1]
            if kind is CollectiveKind.ALL_GATHER:
                target = out.piece(span)
            collective = Collective(
                kind,
                target,
                source,
                axis,
                comm_stream,
                scale,
                accumulate,
                before=before,
                after=after if is_last else None,
                sums_in_fp32=context.spec.dtypes.sums_in_fp32,
                name=context.info.name,
            )
            is_async = async_op and (is_queued or is_last)
            is_temporary = out.memory is not None
            if context.observer.subscribers and axis.size > 1:
                work = context.observed(
                    collective, number, is_temporary=is_temporary, async_op=is_async
                )
            else:
                work = context.comm.issue(collective, async_op=is_async)
            source, before = target, None
        return work

    def _steps(self, out: DataParallelBuffer) -> list[_Transfer]:
        """Return the collectives that transfer this buffer into another one, in order."""
        grid, steps, held = self.context.spec.grid, [], self.span
        for number, axis in enumerate(grid.axes):
            mine, theirs = self.placements[number], out.placements[number]
            if mine is theirs:
                continue
            if mine is Placement.PARTIAL:
                is_cut = theirs is Placement.SHARD
                kind = CollectiveKind.REDUCE_SCATTER if is_cut else CollectiveKind.ALL_REDUCE
                is_inner = number == len(grid.axes) - 1
                comm_stream = CommStream.REDUCE if is_inner else CommStream.OUTER
                steps.append(_Transfer(kind, number, axis, comm_stream, out.span))
            elif (parts := grid.parts[number]) > 1:
                held = Span(held.first - axis.rank * held.count, held.count * parts)
                gather = CollectiveKind.ALL_GATHER
                steps.append(_Transfer(gather, number, axis.for_gathers(), CommStream.GATHER, held))
        if not steps:
            # Equal placements: an all-reduce over one rank, which copies, scales or adds.
            alone = Axis(grid.axes[-1].group, 1, 0)
            steps.append(
                _Transfer(CollectiveKind.ALL_REDUCE, 0, alone, CommStream.REDUCE, out.span)
            )
        return steps

    def _copied_to(self, other: DataParallelBuffer) -> torch.Tensor:
        """Return the values in a buffer of the communication dtype."""
        copied = other.take().copy_(self.tensor)
        # Freed now, so that a reduction under way holds one full buffer instead of two.
        self._release()
        return copied


def place_in(layout: BufferLayout, span: Span, index: int) -> tuple[int, tuple[int, ...]]:
    """Return the offset in elements and the shape of a parameter's rows in a span.

    Without rows in the span, it is the end of the span that is closer to the parameter.

    Args:
        layout: Layout of the whole flat tensor.
        span: Slices of the buffer.
        index: Index of the parameter.
    """
    slot = layout.slots[index]
    start, end = layout.local_rows(index, span.first, span.count)
    offset = slot.offset + start * slot.row_numel - span.first * layout.shard_numel
    offset = min(max(offset, 0), span.count * layout.shard_numel)
    return offset, (end - start, *slot.shape[1:])


class GradState(enum.Enum):
    """Content of a gradient buffer: the full buffer, or the partial buffer of an outer axis."""

    ABSENT = "absent"
    """No memory: no gradient arrived, or the next buffer has the sum."""
    ARRIVING = "arriving"
    """Full buffer: gradients of this rank, as autograd computes them."""
    ACCUMULATED = "accumulated"
    """Partial buffer: sums along the inner axis, until the synchronized backward."""
    REDUCING = "reducing"
    """A collective reads it."""

    # Faster than the `__hash__` of enums, which is written in Python.
    __hash__ = object.__hash__


GRAD_MOVES = {
    GradState.ABSENT: {GradState.ARRIVING, GradState.ACCUMULATED},
    GradState.ARRIVING: {GradState.REDUCING},
    GradState.ACCUMULATED: {GradState.ACCUMULATED, GradState.REDUCING},
    # The next inner sum may be issued before the outer reduction is waited for.
    GradState.REDUCING: {GradState.ABSENT, GradState.ACCUMULATED},
}
"""Legal moves of a gradient buffer. After a failure, every state moves to `ABSENT`."""
