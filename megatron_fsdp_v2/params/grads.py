"""The gradients of a parameter group, from autograd into `param.grad`: who owns them when."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatron_fsdp_v2.comm.interface import (
    DONE,
    Axis,
    Collective,
    CollectiveKind,
    CommStream,
    Communicator,
    Work,
)
from megatron_fsdp_v2.layout.placement import Placement
from megatron_fsdp_v2.params.gathered_parameter import FusedGradient
from megatron_fsdp_v2.params.grad_buffers import GradBuffers
from megatron_fsdp_v2.params.main_gradient import MainGradient
from megatron_fsdp_v2.params.sharded_grads import ShardedGrads

if TYPE_CHECKING:
    from torch import nn

    from megatron_fsdp_v2.layout.placement import AxisPlacements
    from megatron_fsdp_v2.memory.allocator import Allocator, TemporaryBuffer
    from megatron_fsdp_v2.params.buffer import DataParallelBuffer, FlatSpec
    from megatron_fsdp_v2.params.members import Members

__all__ = ["GradState", "GroupGrads", "Reductions"]


class GradState(enum.Enum):
    """What is in a buffer of gradients: the full one, or the partial shard of an outer axis."""

    ABSENT = "absent"
    """Nothing."""
    ARRIVING = "arriving"
    """Gradients of this rank, as autograd brings them. Of the full buffer."""
    ACCUMULATED = "accumulated"
    """Sums along the inner axis, until the synchronized backward. Of the partial shard."""
    REDUCING = "reducing"
    """A collective reads it."""
    REDUCED = "reduced"
    """Nothing: its sum has gone on, into the partial shard or the main gradient."""

    # That of enums is a Python function.
    __hash__ = object.__hash__


_MOVES = {
    GradState.ABSENT: {GradState.ARRIVING, GradState.ACCUMULATED},
    GradState.ARRIVING: {GradState.REDUCING},
    GradState.ACCUMULATED: {GradState.ACCUMULATED, GradState.REDUCING},
    # The next inner sum may follow the outer collective before who waits for that gets to run.
    GradState.REDUCING: {GradState.REDUCED, GradState.ACCUMULATED},
    GradState.REDUCED: {GradState.ARRIVING, GradState.ACCUMULATED},
}
"""Legal moves; to `ABSENT` one may go from everywhere, after a failure."""


class Reductions(Protocol):
    """The queue of reductions under way, which bounds how many buffers are alive."""

    def reserve(self, grads: GroupGrads) -> None:
        """Wait until another full buffer fits, and until this group's own is free."""
        ...


class GroupGrads:
    """The life of a group's gradients: full buffer -> (partial shard) -> main gradient.

    The inner reduction puts or adds this rank's slice of the full buffer, scaled, into the main
    gradient, or, where the reduction along an outer axis is pending, into a partial shard that
    waits for the synchronized backward and is scaled then. Where unsynchronized gradients are not
    sharded (DDP, ZeRO-1), the full buffer keeps collecting until then. `param.grad` is a view of
    the main gradient.

    The two buffers have a state each, of one enum, and move by one table; nothing else says what
    is in them. The queue of reductions is not known here, it is handed in where it has to wait.

    Attributes:
        name: Of the group.
        buffers: Full buffer and partial shard.
        param_grads: `param.grad` of the sharded parameters.
        accumulates_unreduced: Whether the full buffer collects until the synchronized backward.
        reduces: Whether gradients are summed over ranks. Otherwise the main gradient is this
            rank's own, unscaled, of the rows it holds.
        scale: Factor of the sum over data-parallel ranks.
    """

    def __init__(
        self,
        flat: FlatSpec,
        members: Members,
        communicator: Communicator,
        allocator: Allocator,
        scale: float,
        *,
        reduces: bool,
        errors_on_missing: bool,
    ) -> None:
        self.name = flat.name
        self.reduces = reduces
        self.scale = scale
        self._flat = flat
        self._members = members
        self._errors_on_missing = errors_on_missing
        placements = flat.placements
        self._inner: Axis = flat.grid.axes[-1]
        self._inner_kind = _sum_kind(placements[-1])
        self._outer: Axis = flat.grid.axes[0]
        self._outer_kind = _sum_kind(placements[0])
        self.accumulates_unreduced = placements[-1].unreduced_grad is Placement.PARTIAL
        self.buffers = GradBuffers(
            flat, communicator, allocator, keeps_collecting=self.accumulates_unreduced
        )
        self._main = MainGradient(flat, self.buffers)
        self.param_grads = ShardedGrads(members.sharded, self._main)
        self._full_state = self._partial_state = GradState.ABSENT
        # The last that reads the partial shard, or that writes the main gradient.
        self._last_work: Work | None = None

    # -- what is there ------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Whether the full buffer has memory."""
        return self.buffers.full.is_live

    @property
    def full_nbytes(self) -> int:
        """Bytes of the full buffer when it has memory."""
        return self.buffers.full.tensor.nbytes

    @property
    def has_outer_axis(self) -> bool:
        """Whether a second reduction follows, along an outer axis."""
        return self.buffers.partial is not None and self.reduces

    @property
    def has_partial(self) -> bool:
        """Whether a shard still waits for the outer reduction."""
        return self._partial_state is GradState.ACCUMULATED

    @property
    def main(self) -> DataParallelBuffer | None:
        """The main gradient; None where it has no memory, since every `param.grad` is None."""
        return self._main.buffer

    def missing_names(self) -> list[str]:
        """Names of trained parameters that no gradient arrived for since the last reduction."""
        members = self._members
        rows = zip(members.names, self.buffers.filled, members.sharded, strict=True)
        return [name for name, filled, param in rows if not filled and param.requires_grad]

    # -- arriving -----------------------------------------------------------------------------

    def fresh(self, index: int, param: nn.Parameter) -> torch.Tensor | None:
        """Take a gradient away from a gathered parameter.

        Returns:
            What `buffers.add` is to be given after `begin`; None where there is none, or a kernel
            has written it.
        """
        grad = param.grad
        if grad is None:
            return None
        param.grad = None
        dtensor = self._members.dtensors[index]
        if dtensor is not None:
            grad = dtensor.part_of_gradient(grad)
        elif isinstance(param, FusedGradient) and param.grad_added_to_main_grad:
            # A kernel has written it already; what autograd brings is a placeholder, unless that
            # is zeros, added to what other uses of a tied parameter bring.
            param.grad_added_to_main_grad = False
            if not getattr(param, "zero_out_wgrad", False):
                return None
        # Of a backward that is differentiated again it has a history of its own.
        return grad.detach() if grad.requires_grad else grad

    def begin(self, queue: Reductions) -> None:
        """Let gradients arrive: give the full buffer memory, once an earlier reduction is over.

        Args:
            queue: Where that reduction is, and others that may have to be waited for.
        """
        if self._full_state is not GradState.ARRIVING:
            queue.reserve(self)
            self.buffers.take(self.buffers.full)
            self._full_state = self._moved(self._full_state, GradState.ARRIVING)

    # -- reducing -----------------------------------------------------------------------------

    def reduce(self, queue: Reductions, *, async_op: bool) -> Work:
        """Issue the reduction along the inner axis. Collective.

        Args:
            queue: See `begin`; this rank may have no gradient.
            async_op: Whether to return before it is done.

        Raises:
            RuntimeError: A gradient is missing where that is an error.
        """
        has_gradient = self.buffers.has_gradient
        missing = self.missing_names() if self._errors_on_missing and has_gradient else []
        if missing:
            raise RuntimeError(
                f"no gradient arrived for {', '.join(missing)} of unit {self.name}; freeze what "
                "is not trained, or wrap with on_missing_grad='zero'"
            )
        buffers, is_final = self.buffers, not self.has_outer_axis
        if self._full_state is not GradState.ARRIVING:
            self.begin(queue)
        buffers.wait_for_writers()
        buffers.fill_missing()
        if self._last_work is not None:
            # An earlier reduction of this backward may still be reading the partial shard.
            self._wait_for_last()
        accumulate = self.param_grads.settle() if is_final else False
        self._main.contributed |= has_gradient
        self._full_state = self._moved(self._full_state, GradState.REDUCING)
        buffers.forget_filled()
        work = self._sum_inner(accumulate=accumulate, async_op=async_op)
        if is_final:
            self._last_work = work
            self.param_grads.install(accumulated=accumulate)
        return work

    def _wait_for_last(self) -> None:
        if self._last_work is not None:
            self._last_work.wait()
            self._last_work = None

    def before_direct_gradient(self) -> None:
        """Order what autograd adds to a `param.grad` next after the reduction that writes there."""
        self._wait_for_last()
        if self._main.is_offloaded:
            self.buffers.comm.synchronize()
        if not all(self._main.has_rows):
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.param_grads.hide_empty)

    def _sum_inner(self, *, accumulate: bool, async_op: bool) -> Work:
        buffers = self.buffers
        if not self.reduces:
            alone = Axis(self._inner.group, 1, 0)
            own = buffers.whole.piece(self._main.span)
            collective = self._into_main(
                self._inner_kind, own, alone, CommStream.REDUCE, 1.0, accumulate
            )
            return buffers.comm.issue(collective, async_op=False)
        before, after = self._factors()
        partial = None if buffers.partial is None else buffers.take(buffers.partial)
        if before != 1.0:
            buffers.full.tensor.mul_(before)
        terms = buffers.full.tensor
        if buffers.grad_comm is not None:
            terms = buffers.in_comm_dtype(buffers.full, buffers.grad_comm)
        where = terms, self._inner, CommStream.REDUCE
        if partial is None:
            collective = self._into_main(self._inner_kind, *where, after, accumulate)
        else:
            accumulate = self.has_partial
            self._partial_state = self._moved(self._partial_state, GradState.ACCUMULATED)
            is_of_one = self._inner.size == 2 and self._inner_kind is CollectiveKind.REDUCE_SCATTER
            arrival = partial if is_of_one and terms.dtype == partial.dtype else None
            collective = Collective(
                self._inner_kind,
                partial,
                *where,
                accumulate=accumulate,
                arrival=arrival,
                sums_in_fp32=self._flat.dtypes.sums_in_fp32,
            )
        return self.buffers.comm.issue(collective, async_op=async_op)

    def _into_main(
        self,
        kind: CollectiveKind,
        terms: torch.Tensor,
        axis: Axis,
        stream: CommStream,
        scale: float,
        accumulate: bool,
    ) -> Collective:
        """A sum that ends in the main gradient: by way of the device where that is offloaded."""
        memory, offloading = self._main.memory, self.buffers.offloading
        assert memory is not None, self.name
        main, arrival, in_fp32 = memory.flat, memory.arrival, self._flat.dtypes.sums_in_fp32
        if offloading is None:
            where = terms, axis, stream
            return Collective(
                kind, main, *where, scale, accumulate, arrival=arrival, sums_in_fp32=in_fp32
            )
        here = self.buffers.take(offloading)
        load = functools.partial(here.copy_, main, non_blocking=True) if accumulate else None
        store = functools.partial(main.copy_, here, non_blocking=True)
        sum_here = Collective(kind, here, terms, axis, stream, scale, accumulate)
        return sum_here._replace(before=load, after=store, sums_in_fp32=in_fp32)

    def end_inner(self) -> None:
        """The reduction along the inner axis has been waited for: drop the full buffer."""
        self._full_state = self._moved(self._full_state, GradState.REDUCED)
        self.buffers.drop(self.buffers.full, self.buffers.grad_comm)
        if self.buffers.offloading is not None and not self.has_outer_axis:
            self.buffers.drop(self.buffers.offloading)

    def reduce_outer(self, *, async_op: bool) -> Work:
        """Issue the reduction of the partial shard along the outer mesh axis. Collective."""
        if not self.has_partial:
            return DONE
        accumulate = self.param_grads.settle()
        self._last_work = self._sum_outer(accumulate=accumulate, async_op=async_op)
        self.param_grads.install(accumulated=accumulate)
        return self._last_work

    def _sum_outer(self, *, accumulate: bool, async_op: bool) -> Work:
        buffers = self.buffers
        assert buffers.partial is not None
        self._partial_state = self._moved(self._partial_state, GradState.REDUCING)
        terms = buffers.partial.tensor
        if buffers.outer_grad_comm is not None:
            terms = buffers.in_comm_dtype(buffers.partial, buffers.outer_grad_comm)
        scale = self._factors()[1]
        collective = self._into_main(
            self._outer_kind, terms, self._outer, CommStream.OUTER, scale, accumulate
        )
        return self.buffers.comm.issue(collective, async_op=async_op)

    def end_outer(self) -> None:
        """The reduction along the outer axis has been waited for: drop the partial shard."""
        if self._partial_state is GradState.REDUCING:
            self._partial_state = self._moved(self._partial_state, GradState.REDUCED)
            self.buffers.drop(self.buffers.partial)
        self.buffers.drop(self.buffers.outer_grad_comm, self.buffers.offloading)

    def settle(self) -> None:
        """All reductions have been waited for: have the host see what they brought, too."""
        self._last_work = None
        if self._main.is_offloaded:
            self.buffers.comm.synchronize()
        self.param_grads.drop_unused()
        self._main.end()

    def _factors(self) -> tuple[float, float]:
        """What is applied to the terms, and what to their sum; `scale` is the product.

        All of it to the sum, which is a shard where the terms are whole buffers, except for fp16:
        a sum of gradients is soon beyond its 65504. There the terms get the power of two of a
        factor below 1, which changes no bit of what does not fall below fp16's range.
        """
        if torch.float16 not in (self._flat.dtypes.grad_comm, self._flat.dtypes.main_grad):
            return 1.0, self.scale
        before = min(1.0, 2.0 ** (math.frexp(self.scale)[1] - 1))
        return before, self.scale / before

    def _moved(self, state: GradState, to: GradState) -> GradState:
        if to not in _MOVES[state]:
            raise RuntimeError(
                f"gradients of {self.name} cannot go from {state.value} to {to.value}"
            )
        return to

    def abandon(self) -> None:
        """Forget gradients that are not reduced yet, after a failed backward."""
        buffers = self.buffers
        buffers.wait_for_writers()
        buffers.forget_filled()
        self._main.contributed = False
        self._full_state = self._partial_state = GradState.ABSENT
        self._last_work = None
        self._main.end()
        buffers.drop(*buffers.temporaries().values())

    # -- what others put in its place ---------------------------------------------------------

    def temporaries(self) -> dict[str, TemporaryBuffer]:
        """Its temporary buffers by what they hold."""
        return self.buffers.temporaries()

    def replace_buffers(self, replacement: Callable[[TemporaryBuffer], TemporaryBuffer]) -> None:
        """Put another temporary buffer in the place of each one."""
        self.buffers.replace_buffers(replacement)

    def replace_communicator(self, communicator: Communicator) -> Communicator:
        """Communicate by another one from now on; return the one until now."""
        before, self.buffers.comm = self.buffers.comm, communicator
        return before


def _sum_kind(placements: AxisPlacements) -> CollectiveKind:
    """How gradients are summed along an axis: every rank gets its shard of the sum, or all."""
    is_cut = placements.main_grad is Placement.SHARD
    return CollectiveKind.REDUCE_SCATTER if is_cut else CollectiveKind.ALL_REDUCE
