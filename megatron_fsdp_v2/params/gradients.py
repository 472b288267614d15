"""Gradients of a parameter group, from autograd to `param.grad`.

See [Note: the buffers of a group] in `params/buffer.py`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.comm.interface import DONE, Work
from megatron_fsdp_v2.dtensor.sharded_rows import (
    local_of,
    plain_attributes,
    raw_grad,
    raw_post_hooks,
    raw_requires_grad,
    rows_like,
    rows_of,
    set_raw_grad,
    sharded_grad,
)
from megatron_fsdp_v2.dtensor.tp_params import part_of_gradient, summed_gradient
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.layout.placement import Placement
from megatron_fsdp_v2.memory.allocator import BufferUse
from megatron_fsdp_v2.memory.observer import MainGradientAllocated
from megatron_fsdp_v2.params.autograd import InternalHook
from megatron_fsdp_v2.params.buffer import (
    GRAD_MOVES,
    BufferContext,
    DataParallelBuffer,
    GradState,
    place_in,
)
from megatron_fsdp_v2.params.gathered import FusedGradient
from megatron_fsdp_v2.params.parameters import GroupParameters


class GroupGrads:
    """Gradients of a group: full buffer -> (partial buffer) -> main gradient.

    Autograd's gradients are written to views of the full buffer. Its dtype is the communication
    dtype or, if it accumulates over micro-batches (DDP, ZeRO-1), the main gradient's dtype. A
    reduction stores the scaled sum in the main gradient or adds it. With an outer axis, the sum
    along the inner axis stays in the partial buffer until the synchronized backward.

    A main gradient is allocated for the reduction that writes it. Every `param.grad` is a DTensor
    over a view of the main gradient and holds its memory (`UnevenDTensor.main_grad_slot`); the
    group holds it only while reductions are under way. So the memory is freed when the last
    gradient is set to None, and a gradient that a user keeps is not written again. A new value of
    `param.grad` (None, zeros, another tensor) is copied into the main gradient before a reduction
    adds to it.

    A gradient arrives on the stream that used its parameter in the forward, which may differ from
    the compute stream. The engine synchronizes these streams only at the end of a backward;
    `_order_write` and `wait_for_writers` order the writes until then.

    Attributes:
        context: Context of the buffers.
        full: Buffer that gradients arrive in.
        partial: Buffer for the reduction along an outer axis, for sums in a wider dtype than the
            main gradient's, or for the hook; else None.
        accumulates_unreduced: Whether the full buffer accumulates until the synchronized backward.
        on_missing_grad: `none`, `zero` or `error`; see `fully_shard`.
        is_written: Whether a reduction of this backward wrote the main gradient.
        contributed: Per parameter, whether this rank had a gradient in that reduction, or in an
            earlier backward that left the gradient to that reduction.
    """

    def __init__(self, parameters: GroupParameters, context: BufferContext) -> None:
        self.context = context
        self._parameters = parameters
        self._params = parameters.sharded
        layout, spec = context.layout, context.spec
        placements, dtypes = spec.placements, spec.dtypes
        self._placements = [p.main_weight for p in placements]
        self.on_missing_grad = spec.on_missing_grad
        self.accumulates_unreduced = placements[-1].unreduced_grad is Placement.PARTIAL
        # The dtype of sums that later backwards add to, which are rounded once, at the end.
        wide = torch.promote_types(dtypes.main_grad, dtypes.grad_comm)
        dtype = wide if self.accumulates_unreduced else dtypes.grad_comm
        unreduced = [Placement.PARTIAL] * len(placements)
        self.full = self._gradient_buffer("full_grad", unreduced, dtype, "grad_comm")
        self._own_partial: DataParallelBuffer | None = None
        if len(placements) == 2 or (wide != dtypes.main_grad and not self.accumulates_unreduced):
            reduced = [*unreduced[1:], self._placements[-1]]
            self._own_partial = self._gradient_buffer(
                "partial_grad", reduced, wide, "outer_grad_comm"
            )
        self.partial = self._own_partial
        self._hook: Callable[[torch.Tensor], object] | None = None
        self._hook_stream: Any = None
        # The hook receives the reduced gradient of one backward: on a 1-D mesh, `partial`.
        self._hooked: DataParallelBuffer | None = None
        self._staging: DataParallelBuffer | None = None
        if spec.offload is not None:
            self._staging = context.temporary(
                "offloading", BufferUse.COMMUNICATION, self._placements, dtypes.main_grad
            )
        num_params = len(layout.slots)
        self._views = [self.full.view(index) for index in range(num_params)]
        assert self.full.memory is not None
        self._gaps = [self.full.memory.alias(start, (end - start,)) for start, end in layout.gaps()]
        self._main_span = spec.grid.span(self._placements)
        places = [place_in(layout, self._main_span, index) for index in range(num_params)]
        self._places = [
            (shape, torch.empty(shape, device="meta").stride(), offset) for offset, shape in places
        ]
        # With many ranks, most gradients are empty: they are not made again in every backward.
        is_in_host_memory = spec.offload is not None and context.device.type != "meta"
        device = torch.device("cpu") if is_in_host_memory else context.device
        self._empty = {
            index: torch.empty(shape, dtype=dtypes.main_grad, device=device)
            for index, (_, shape) in enumerate(places)
            if 0 in shape
        }
        self._full_state = self._partial_state = GradState.ABSENT
        # Per parameter, whether a gradient arrived since the last reduction.
        self._filled = [False] * num_params
        # Per parameter, whether it was trained in a backward that left its gradient to a later one.
        # It may be frozen by then, and ranks without a gradient of it publish it too.
        self._owed = [False] * num_params
        # The side stream that wrote a parameter's gradient to the full buffer.
        self._written_aside: dict[int, Any] = {}
        # The main gradient: a weak reference, and a strong one while reductions are under way.
        self._main: Callable[[], torch.Tensor | None] = lambda: None
        self._held: torch.Tensor | None = None
        # `_inner_work` is the last reduction along the inner axis, `_last_work` the last one that
        # reads the partial buffer or writes the main gradient.
        self._inner_work = self._last_work = DONE
        self.is_written = False
        self.contributed = [False] * num_params
        # Per parameter, whether a reduction of this backward set `param.grad`, which was None.
        self._was_none = [False] * num_params
        # Per parameter, whether any rank had a gradient of it since users' hooks ran.
        self._is_new = [False] * num_params

    def _gradient_buffer(
        self, kind: str, placements: Sequence[Placement], dtype: torch.dtype, copied_as: str
    ) -> DataParallelBuffer:
        context = self.context
        buffer = context.temporary(kind, BufferUse.GRADIENT, placements, dtype)
        comm_dtype = context.spec.dtypes.grad_comm
        if dtype != comm_dtype:
            buffer.comm_copy = context.temporary(
                copied_as, BufferUse.COMMUNICATION, placements, comm_dtype
            )
        return buffer

    # -- properties ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the group."""
        return self.context.info.name

    @property
    def is_arriving(self) -> bool:
        """Whether the full buffer has memory for gradients that arrive."""
        return self._full_state is GradState.ARRIVING

    @property
    def has_gradient(self) -> bool:
        """Whether any gradient arrived since the last reduction."""
        return any(self._filled)

    @property
    def reduced_over(self) -> tuple[dist.ProcessGroup, ...]:
        """Process groups of several ranks over which gradients are summed."""
        spec = self.context.spec
        axes = spec.grid.axes if spec.reduces else ()
        return tuple([axis.group for axis in axes if axis.size > 1])

    @property
    def depends_on_ranks(self) -> bool:
        """Whether this rank has to know which parameters other ranks had gradients of.

        It has to if it had no gradient of a parameter whose gradient was None before, or that has
        a hook of the user.
        """
        rows = zip(self.contributed, self._was_none, self._user_hooks(), strict=True)
        return any(
            not contributed and (was_none or (hooks and self._is_due(index)))
            for index, (contributed, was_none, hooks) in enumerate(rows)
        )

    @property
    def is_owed(self) -> bool:
        """Whether an earlier backward left gradients to the next synchronized one."""
        return any(self._owed)

    @property
    def is_trained(self) -> bool:
        """Whether any parameter requires a gradient now."""
        with plain_attributes():
            return any(map(raw_requires_grad, self._params))

    @property
    def reduces_partial(self) -> bool:
        """Whether a second reduction moves sums from `partial` to the main gradient."""
        return self.partial is not None and self.context.spec.reduces

    @property
    def queues_partial(self) -> bool:
        """Whether a second reduction may be queued before the first one is waited for.

        Without streams, the host would wait. A cast of the sum, a hook and a staging buffer are on
        the compute stream.
        """
        partial = self.partial
        return (
            partial is not None
            and self.context.spec.reduces
            and self.context.comm.has_streams
            and partial.comm_copy is None
            and self._hook is None
            and self._staging is None
        )

    @property
    def has_partial(self) -> bool:
        """Whether the partial buffer holds sums for the outer reduction."""
        return self._partial_state is GradState.ACCUMULATED

    @property
    def main(self) -> DataParallelBuffer | None:
        """The main gradient; None if it has no memory, since every `param.grad` is None."""
        flat = self._main()
        if flat is None:
            return None
        return DataParallelBuffer(
            self.context, self._placements, flat, staging=self._staging, span=self._main_span
        )

    def buffers(self) -> Iterator[DataParallelBuffer]:
        """Yield all buffers with temporary memory."""
        # On a 1-D mesh, the buffer for the hook may be the partial buffer.
        for buffer in dict.fromkeys((self.full, self.partial, self._hooked, self._staging)):
            if buffer is not None:
                yield buffer
                if buffer.comm_copy is not None:
                    yield buffer.comm_copy

    @property
    def hook(self) -> tuple[Callable[[torch.Tensor], object] | None, Any]:
        """The function that receives reduced gradients, and its stream; see `set_hook`."""
        return self._hook, self._hook_stream

    def set_hook(self, hook: Callable[[torch.Tensor], object] | None, stream: Any) -> None:
        """Set a function that receives reduced gradients before they reach the main gradient.

        Args:
            hook: Called with the flat gradient that this rank holds, scaled; None for none.
            stream: Stream to call the hook in; None for that of reductions along an outer axis.
        """
        self._hook, self._hook_stream, self._hooked = hook, stream, None
        if hook is not None:
            self._hooked = self.context.temporary(
                "hooked_grad",
                BufferUse.GRADIENT,
                self._placements,
                self.context.spec.dtypes.main_grad,
            )
        if self._own_partial is None:
            self.partial = self._hooked

    # -- collection ---------------------------------------------------------------------------

    def collect(self, index: int, param: nn.Parameter) -> None:
        """Move the new gradient of a gathered parameter into the full buffer, which has memory."""
        grad = param.grad
        assert grad is not None
        param.grad = None
        dtensor = self._parameters.dtensors[index]
        tensor = self._parameters.row_shards[index].tensor
        if dtensor is not None:
            grad = part_of_gradient(grad, dtensor, self._views[index].dtype)
        elif tensor is not None and tensor.sums_gradients:
            if isinstance(param, FusedGradient) and param.grad_added_to_main_grad:
                raise RuntimeError(
                    f"a fused kernel wrote the gradient of {self._parameters.names[index]}, which "
                    "sums_gradients adds up over ranks; leave one of them out"
                )
            grad = summed_gradient(grad, tensor, self._views[index].dtype)
        elif isinstance(param, FusedGradient) and param.grad_added_to_main_grad:
            # A fused kernel has written the gradient already, and autograd's is a placeholder. With
            # `zero_out_wgrad` (tied parameters) it is zeros plus the gradients of other uses.
            param.grad_added_to_main_grad = False
            if not getattr(param, "zero_out_wgrad", False):
                return
        # With `create_graph=True` the gradient has a grad_fn.
        self.add(index, grad.detach() if grad.requires_grad else grad)

    def kernel_grad(self, index: int) -> torch.Tensor:
        """Return a parameter's view of the full buffer, for a fused kernel that adds to it."""
        self.begin()
        return self._zeroed_view(index)

    def begin(self) -> None:
        """Allocate the full buffer for new gradients, after waiting for its earlier reduction."""
        if self._full_state is not GradState.ARRIVING:
            self.end_inner()
            self.full.take()
            self._full_state = self._moved(self._full_state, GradState.ARRIVING)

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Write a parameter's first gradient to the full buffer, and add later ones.

        A sparse gradient, for example of `nn.Embedding(sparse=True)`, becomes dense.
        """
        if self._filled[index] or grad.layout is not torch.strided:
            self._zeroed_view(index).add_(grad)
            return
        self._order_write(index)
        self._views[index].copy_(grad)
        self._filled[index] = True

    def add_direct(self, index: int, grad: torch.Tensor, rows: tuple[int, int] | None) -> None:
        """Add the gradient of a loss of the sharded parameter itself; see `CollectGradient`.

        The result of the reduction is the mean over the ranks that hold these rows.
        """
        self.begin()
        shards = self._parameters.row_shards[index]
        if rows is None and shards.tensor is None:
            self.add(index, grad)
            return
        view = self._zeroed_view(index)
        if rows is not None:
            spec = self.context.spec
            alpha = 1.0 / (spec.num_replicas * spec.scale) if spec.reduces else 1.0
            view[slice(*rows)].add_(grad, alpha=alpha)
            return
        for chunk in shards.chunks((0, view.shape[0]), view.shape):
            view[chunk.local].add_(grad[chunk.block])

    def _zeroed_view(self, index: int) -> torch.Tensor:
        """Return a parameter's view to add a gradient to; zero the view the first time."""
        self._order_write(index)
        if not self._filled[index]:
            self._views[index].zero_()
            self._filled[index] = True
        return self._views[index]

    def _order_write(self, index: int) -> None:
        """Order the current stream's write of a gradient after writes of other streams."""
        comm, aside = self.context.comm, self._written_aside
        side, writer = comm.side_stream(), aside.get(index)
        if side == writer:
            return
        # A side stream waits for the compute stream before its first write, and before it adds to
        # a gradient that the compute stream may have written.
        after_compute = side is not None and (side not in aside.values() or self._filled[index])
        comm.wait_for([] if writer is None else [writer], and_compute=after_compute)
        if side is None:
            del aside[index]
        else:
            aside[index] = side

    def wait_for_writers(self) -> None:
        """Order the caller's next operations after all writes to the full buffer."""
        comm = self.context.comm
        if self._written_aside or comm.side_stream() is not None:
            comm.wait_for(set(self._written_aside.values()), and_compute=True)
            self._written_aside.clear()

    # -- reduction ----------------------------------------------------------------------------

    def reduce(self, *, async_op: bool) -> None:
        """Issue the reduction along the inner axis. Collective.

        Args:
            async_op: Whether to return before the reduction is done.

        Raises:
            RuntimeError: A gradient is missing and `on_missing_grad` is `error`.
        """
        if self.on_missing_grad == "error" and self.has_gradient:
            rows = zip(self._parameters.names, self._filled, self._params, strict=True)
            missing = [name for name, filled, param in rows if not filled and param.requires_grad]
            if missing:
                raise RuntimeError(
                    f"no gradient arrived for {', '.join(missing)} of unit {self.name}; freeze "
                    "what is not trained, or wrap with on_missing_grad='none'"
                )
        self.begin()
        self.wait_for_writers()
        pairs = zip(self._views, self._filled, strict=True)
        unset = self._gaps + [view for view, is_filled in pairs if not is_filled]
        if unset:
            torch._foreach_zero_(unset)
        # An earlier reduction of this backward may still be reading the partial buffer.
        self._wait_for_last()
        filled, size = self._filled, len(self._filled)
        # A hook may add gradients of ranks outside the mesh to every parameter.
        if self._hook is not None or (self.on_missing_grad == "zero" and any(filled)):
            filled = [True] * size
        self.contributed = list(map(operator.or_, self.contributed, filled))
        self._filled = [False] * size
        before, after = self.context.spec.grad_factors
        reduces = self.context.spec.reduces
        if reduces and before != 1.0:
            self.full.tensor.mul_(before)
        self._full_state = self._moved(self._full_state, GradState.REDUCING)
        if self.reduces_partial:
            assert self.partial is not None
            accumulate = self.has_partial
            self._partial_state = self._moved(self._partial_state, GradState.ACCUMULATED)
            self._inner_work = self.full.redistribute(
                self.partial, accumulate=accumulate, async_op=async_op
            )
        elif reduces:
            self._inner_work = self._into_main(self.full, after, async_op=async_op)
        else:
            own = self.full.part(self._placements)
            self._inner_work = self._into_main(own, 1.0, async_op=False)

    def end_inner(self) -> None:
        """Wait for the reduction along the inner axis, if any, and free the full buffer."""
        if self._full_state is not GradState.REDUCING:
            return
        self._inner_work.wait()
        self._full_state = self._moved(self._full_state, GradState.ABSENT)
        self.full.drop()
        if self._staging is not None and not self.reduces_partial:
            self._staging.drop()

    def reduce_outer(self, *, async_op: bool) -> None:
        """Start reducing the partial buffer, along the outer axis or by the hook. Collective."""
        assert self.partial is not None
        if not self.has_partial:
            # This rank discarded its sums, and others have theirs.
            self._partial_state = self._moved(self._partial_state, GradState.ACCUMULATED)
            self.partial.take()
            self.partial.tensor.zero_()
        self._partial_state = self._moved(self._partial_state, GradState.REDUCING)
        self._into_main(self.partial, self.context.spec.grad_factors[1], async_op=async_op)

    def end_outer(self) -> None:
        """Wait for the reduction along the outer axis, and free the partial buffer."""
        assert self.partial is not None
        self._wait_for_last()
        if self._partial_state is GradState.REDUCING:
            self._partial_state = self._moved(self._partial_state, GradState.ABSENT)
            self.partial.drop()
            if self._hooked is not None:
                self._hooked.drop()
        elif self.partial.comm_copy is not None:
            self.partial.comm_copy.drop()
        if self._staging is not None:
            self._staging.drop()

    @property
    def under_way(self) -> tuple[Work, Work]:
        """Reductions to wait for, along the inner axis and along the outer one."""
        return self._inner_work, self._last_work

    def wait(self) -> None:
        """Wait for all reductions."""
        self._inner_work.wait()
        self._wait_for_last()

    def end_reductions(self) -> None:
        """Finish a backward, after the caller waited for all reductions."""
        self._inner_work = self._last_work = DONE
        if self.context.spec.offload is not None:
            self.context.comm.synchronize()
        if self.is_written:
            none = [False] * len(self._owed)
            self.contributed, self._owed, self._was_none = none, none.copy(), none.copy()
        self.is_written = False
        self._held = None

    def owe(self) -> None:
        """Record the parameters that are trained in a backward without synchronization."""
        if self.accumulates_unreduced or self.partial is not None:
            self._owed = list(map(self._is_due, range(len(self._owed))))

    def _is_due(self, index: int) -> bool:
        """Return whether a reduction sets the gradient of a parameter."""
        with plain_attributes():
            return self._owed[index] or raw_requires_grad(self._params[index])

    def before_grad_accumulation(self) -> None:
        """Order autograd's next accumulation into `param.grad` after its reduction."""
        self._wait_for_last()
        if self.context.spec.offload is not None:
            self.context.comm.synchronize()

    def _wait_for_last(self) -> None:
        self._last_work.wait()
        self._last_work = DONE

    def _into_main(self, source: DataParallelBuffer, scale: float, *, async_op: bool) -> Work:
        """Reduce a buffer into the main gradient, and set `param.grad`."""
        accumulate, main = self._open_main(), self.main
        assert main is not None, self.name
        hooked = self._hooked if source is self.partial else None
        if hooked is None:
            self._last_work = source.redistribute(
                main, scale=scale, accumulate=accumulate, async_op=async_op
            )
        else:
            hooked.take()

            def run() -> None:
                assert self._hook is not None
                source.redistribute(hooked, scale=scale)
                self._hook(hooked.tensor)
                hooked.redistribute(main, accumulate=accumulate)

            self._last_work = self.context.comm.run(run, self._hook_stream, async_op=async_op)
        self._publish(accumulated=accumulate)
        return self._last_work

    def _moved(self, state: GradState, to: GradState) -> GradState:
        if to not in GRAD_MOVES[state]:
            raise RuntimeError(
                f"gradients of {self.name} cannot go from {state.value} to {to.value}"
            )
        return to

    # -- main gradient and param.grad ---------------------------------------------------------

    def _open_main(self) -> bool:
        """Update the main gradient from `param.grad`, and allocate it if needed.

        Unless every `param.grad` is the published view, gradients are copied to a new main
        gradient, so that tensors that a user keeps are not written, as with torch's gradients.

        Returns:
            True if the reduction adds to the main gradient, since some `param.grad` is set; False
            if it overwrites it.
        """
        grads = self.param_grads()
        if all([grad is None for grad in grads]):
            self._held = self._new_main(is_overwritten=True)
            return False
        flat = self._main()
        if flat is None or not all(
            self._is_published(index, grad, flat) or not self._is_due(index)
            for index, grad in enumerate(grads)
        ):
            flat = self._new_main(is_overwritten=False)
            for place, grad in zip(self._places, grads, strict=True):
                if grad is not None:
                    flat.as_strided(*place).copy_(local_of(grad))
        self._held = flat
        return True

    def _new_main(self, *, is_overwritten: bool) -> torch.Tensor:
        context = self.context
        with context.comm.allocation_context():
            flat = context.main_memory(
                self._main_span, context.spec.dtypes.main_grad, is_overwritten=is_overwritten
            )
        self._main = weakref.ref(flat)
        if context.observer.subscribers and self.full.memory is not None:
            context.observer.emit(MainGradientAllocated(self.full.memory, flat))
        return flat

    def _is_published(
        self, index: int, grad: torch.Tensor | None, flat: torch.Tensor | None
    ) -> bool:
        """Return whether `grad` is the published view of this main gradient."""
        slot = getattr(grad, "main_grad_slot", None)
        return slot is not None and slot[0] is flat and slot[1] == index

    def _publish(self, *, accumulated: bool) -> None:
        """Set `param.grad` of every trained parameter. Without rows on this rank, it is empty.

        Args:
            accumulated: Whether the reduction added to existing gradients.
        """
        self.is_written = True
        flat = self._held
        assert flat is not None
        with plain_attributes():
            for index, param in enumerate(cast("list[UnevenDTensor]", self._params)):
                grad = raw_grad(param) if accumulated else None
                if accumulated and self._is_published(index, grad, flat):
                    continue
                if self._owed[index] or raw_requires_grad(param):
                    # A backward may reduce several times: the first one finds None.
                    self._was_none[index] |= grad is None
                    rows = self._empty.get(index)
                    if rows is None:
                        # `data` is a view with its own version counter; see `alias_of`.
                        rows = flat.as_strided(*self._places[index]).data
                    made = rows_like(rows, param)
                    made.main_grad_slot = (flat, index)
                    set_raw_grad(param, made)

    def param_grads(self) -> list[torch.Tensor | None]:
        """Return every `param.grad`."""
        with plain_attributes():
            grads = [raw_grad(param) for param in self._params]
        if {UnevenDTensor, type(None)}.issuperset(map(type, grads)):
            return grads
        # A plain DTensor without row ranges comes from a loss of the sharded parameter itself.
        return [sharded_grad(param) for param in self._params]

    def param_grads_and_main(
        self,
    ) -> tuple[list[torch.Tensor | None], torch.Tensor | None, list[torch.Tensor]]:
        """Return every `param.grad`, and the main gradient that they are views of.

        Returns:
            Every `param.grad`; the flat main gradient if any of them is a view of it, perhaps with
            stale values of gradients that are unset; and the rows of gradients that a user
            assigned.
        """
        grads, flat = self.param_grads(), self._main()
        found = [(index, grad) for index, grad in enumerate(grads) if grad is not None]
        others = [rows_of(grad) for i, grad in found if not self._is_published(i, grad, flat)]
        return grads, flat if len(others) < len(found) else None, others

    def end_missing(self, has_gradient: Sequence[bool]) -> None:
        """Set gradients that no rank had to None again, where they were None before.

        Args:
            has_gradient: Per parameter, whether a rank had a gradient in this backward; this rank's
                `contributed` if nothing depends on other ranks (`depends_on_ranks`).
        """
        self._is_new = list(map(operator.or_, self._is_new, has_gradient))
        for param, has, was_none in zip(self._params, has_gradient, self._was_none, strict=True):
            if was_none and not has:
                param.grad = None

    def _user_hooks(self) -> list[list[Any]]:
        """Return the post-accumulate hooks of users, per parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            tables = list(map(raw_post_hooks, self._params))
        return [
            [hook for hook in table.values() if not isinstance(hook, InternalHook)] if table else []
            for table in tables
        ]

    def run_hooks(self) -> None:
        """Call users' post-accumulate hooks of parameters that any rank had a new gradient of.

        Hooks run on all ranks, since they may communicate. Autograd does not call hooks of sharded
        parameters.
        """
        is_new, self._is_new = self._is_new, [False] * len(self._is_new)
        if not any(is_new):
            return
        for param, hooks, new in zip(self._params, self._user_hooks(), is_new, strict=True):
            if new and hooks and param.requires_grad and param.grad is not None:
                for hook in hooks:
                    hook(param)

    # -- after a failed backward --------------------------------------------------------------

    def restore(self, before: Sequence[torch.Tensor | None]) -> None:
        """Undo the writes of a failed backward to gradients. Its reductions must be done.

        A published gradient becomes zeros, and a gradient that was None becomes None, as after
        `zero_grad`. Tensors that a user assigned are unchanged.

        Args:
            before: Result of `param_grads()` before the last reduction of the backward.
        """
        self._is_new = [False] * len(self._is_new)
        flat = self._main()
        for index, (param, grad) in enumerate(zip(self._params, before, strict=True)):
            if grad is not None and self._is_published(index, grad, flat):
                local_of(grad).zero_()
            elif self._is_published(index, param.grad, flat):
                # The reduction copied this gradient and left it unchanged.
                param.grad = grad

    def abandon(self) -> None:
        """Discard gradients that are not reduced yet, after a failed backward."""
        self.wait_for_writers()
        size = len(self._filled)
        self._filled, self._owed = [False] * size, [False] * size
        self.contributed, self._was_none = [False] * size, [False] * size
        self.is_written = False
        self._full_state = self._partial_state = GradState.ABSENT
        self._inner_work = self._last_work = DONE
        self._held = None
        for param in self._parameters.gathered:
            # An exception may have been raised before the gradient was collected.
            param.grad = None
            if isinstance(param, FusedGradient):
                param.grad_added_to_main_grad = False
        for buffer in self.buffers():
            buffer.drop()
