"""The life of a unit: unshard, forward, reshard, unshard, backward, reduce, reshard."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast, override

import torch

from megatron_fsdp_v2._compiler import check_engine, uncompiled
from megatron_fsdp_v2.comm.rank_checks import CheckRanks
from megatron_fsdp_v2.params.autograd import (
    Inputs,
    in_backward,
    next_node_number,
    watch_inputs,
    watch_outputs,
)
from megatron_fsdp_v2.params.formats import WeightUse
from megatron_fsdp_v2.params.group import write_stale
from megatron_fsdp_v2.runtime.end_of_backward import (
    finish_backward,
    finish_ordered_reductions,
    needs_repair,
    reduce_in_order,
    repair,
)
from megatron_fsdp_v2.runtime.gather_rules import buckets
from megatron_fsdp_v2.runtime.reduction_queue import ReductionQueue
from megatron_fsdp_v2.runtime.reduction_rules import RootPass
from megatron_fsdp_v2.runtime.unit_base import Phase, UnitBase
from megatron_fsdp_v2.runtime.unit_checks import (
    check_capture,
    check_captured_pass,
    check_outputs,
    check_unchanged,
    check_units,
    compare_after_step,
    compare_unit,
)

if TYPE_CHECKING:
    from megatron_fsdp_v2.params.group import ParameterGroup
    from megatron_fsdp_v2.runtime.context import Context

__all__ = ["Unit"]


class Unit(UnitBase):
    """The sharded parameters of one module and what happens to them in a step.

    Attributes:
        context: What it shares with the other units under its root, which says so.
    """

    context: Context
    # Of the forward that runs now.
    _running: tuple[_Use, Inputs, int] | None = None

    # -- weights ------------------------------------------------------------------------------

    @override
    def unshard(self, uses: WeightUse, *, async_op: bool) -> None:
        """See `UnitBase.unshard`."""
        if self.is_unsharded:
            if not self.has_one_form:
                self._unshard_more(uses, async_op=async_op)
            return
        with self.in_range("unshard"):
            if not self.context.is_checked:
                check_units(self.context)
            if self.context.options.check_ranks is CheckRanks.ALWAYS and not self.skips_safely:
                compare_unit(self.context, self, "gather")
            weight_version, in_forward = self.context.weight_version, not in_backward()
            for index, group in enumerate(self.held_groups):
                try:
                    group.unshard(uses, weight_version, in_forward=in_forward, async_op=async_op)
                except Exception:
                    for held in self.held_groups[:index]:
                        held.reshard()
                    raise
            self.is_unsharded = True

    def _unshard_more(self, uses: WeightUse, *, async_op: bool) -> None:
        """Gather what lacks for these uses of a unit that is gathered for others."""
        lacking = [group for group in self.held_groups if group.weights.lacks(uses)]
        if not lacking:
            return
        with self.in_range("unshard"):
            if self.context.options.check_ranks is CheckRanks.ALWAYS:
                compare_unit(self.context, self, "gather")
            for group in lacking:
                group.weights.gather(uses, async_op=async_op)

    # -- forward ------------------------------------------------------------------------------

    def pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before the module's forward: gather, cast inputs, watch for the end of the backward."""
        self.is_under_way = True
        with self.in_range("pre_forward"):
            recomputes = in_backward()
            if not recomputes and (self.is_root or not self.context.is_in_forward):
                self._begin_pass()
            elif self.context.is_capturing:
                check_captured_pass(self.context, self.name)
            if self.phase is not Phase.BACKWARD:
                self.move(Phase.FORWARD)
            self.context.gathers.before_use(self)
            if recomputes:
                self.is_recomputed = self._was_recomputed = True
                self.context.recompute(self)
            elif self.is_unsharded:
                self.reshard_if_replaced()
            self.unshard(WeightUse.FORWARD, async_op=False)
            self.wait_for_unshard()
            if self.is_gathered_after_step:
                compare_after_step(self.context, self)
                check_unchanged(self.context)
            if not recomputes:
                self.context.gathers.in_forward(self, self.forward_prefetch)
        args, kwargs = self.cast_inputs(args, kwargs)
        self._running = None
        if torch.is_grad_enabled():
            use, since = self._use(), next_node_number()
            args, kwargs, inputs = watch_inputs(use, args, kwargs)
            self._running = use, inputs, since
        return args, kwargs

    def post_forward(self, output: Any) -> Any:
        """After the module's forward: reshard, watch for the start of the backward."""
        check_outputs(self, output, self.context)
        self.end_forward()
        output = self.hand_on(output)
        self._running = None
        self.is_under_way = False
        return output

    @override
    def end_forward(self) -> None:
        """Reshard, and expect a backward, after a forward."""
        with self.in_range("post_forward"):
            has_grad = torch.is_grad_enabled()
            if in_backward():
                if self.phase is Phase.FORWARD:
                    self.move(Phase.IDLE)
                    self.context.keep_recomputed(self)
            else:
                context = self.context
                self.move(Phase.IDLE)
                ends_pass = context.is_pass_of(self)
                if ends_pass:
                    # An optimizer may write the weights next.
                    context.gathers.drop_prefetched()
                    context.end_forward()
                # A unit recomputed in the backward runs without grad now, inside a pass with it.
                if has_grad or context.pass_has_grad:
                    context.gathers.expect_backward(self)
                    self.num_awaited += 1
                    self.note_use()
                if self.drops_after_forward:
                    self.reshard()
                if ends_pass and not has_grad:
                    context.end_pass("")

    def hand_on(self, output: Any) -> Any:
        """Forward outputs in the dtypes of the policy, watched for the start of the backward."""
        output = self.cast_outputs(output)
        if torch.is_grad_enabled():
            # A forward may switch gradients on, for whoever called it as well.
            use, inputs, since = self._running or (self._use(), Inputs(), next_node_number())
            use.tells_its_end = not inputs.tell_nothing
            watch_outputs(use, output, since)
        return output

    def after_forward(self) -> None:
        """After a forward that raised: it is not under way any more."""
        self._running = None
        self.is_under_way = False
        # A recomputation is left as it is: it may have stopped with all it needs.
        if in_backward():
            return
        if self.phase is Phase.FORWARD:
            self.move(Phase.IDLE)
        if self.context.is_pass_of(self):
            self.context.end_forward(failed=True)

    def _use(self) -> _Use:
        """What the graph of a forward that runs now tells about its backward."""
        context = self.context
        return _Use(self, context.backward_pass if in_backward() else context.root_pass)

    def note_use(self) -> None:
        """Have reductions of what this forward computed with wait for its backward."""
        if self.context.ordered_reductions is not None:
            self.context.root_pass.add_use(*self._reduced())

    def _reduced(self) -> list[Unit]:
        """Itself, and the owner of every group of other units that it computes with."""
        owners = [group.watcher() for group in self.tied_groups]
        return [self, *[cast("Unit", owner) for owner in owners if owner is not None]]

    def _begin_pass(self) -> None:
        """At a forward of the root, or of a unit outside of that: start a new pass.

        What an exception left behind is repaired, and weights are brought up to date.
        """
        context = self.context
        units = context.units()
        is_capturing = context.is_capturing
        if is_capturing:
            check_capture(context)
            context.has_graph = True
        context.is_captured = is_capturing
        context.note_replays()
        for unit in units:
            # Before anything puts sharded parameters in the place of what was assigned.
            unit.reshard_if_replaced()
        if needs_repair(context):
            repair(context)
        if context.late_flags:
            check_unchanged(context)
        for unit in units:
            unit.reshard_if_stale(context.weight_version)
            if torch.is_grad_enabled():
                for group in unit.groups:
                    group.members.check_hooks()
        context.begin_forward(self, has_grad=torch.is_grad_enabled())
        if not (context.ranks_may_differ or context.has_formats):
            return
        if not context.is_checked:
            check_units(self.context)
        if context.has_formats:
            write_stale(context.groups(), context.weight_version)
        if not context.ranks_may_differ:
            return
        # Ranks may run different units, so bringing weights up to date belongs to no unit's use,
        # nor does being ready for gradients: a rank without any still reduces with the others.
        due = []
        for unit in units:
            for group in unit.groups:
                group.unfreeze_if_trained()
                if not group.weights.is_refreshed_locally and not group.weights.is_held:
                    group.changes.sync()
                    due.append(group)
        limit = context.gathers.limit
        # A unit that the pass leaves out would not wait for its own before the end of a capture.
        is_async = not (limit.is_none or is_capturing)
        for bucket in buckets(due, lambda group: group.weights.model_nbytes, limit.bucket_nbytes):
            with context.gathers.together():
                for group in bucket:
                    group.refresh(context.weight_version, async_op=is_async)

    def begin_schedule(self) -> None:
        """Where a schedule begins to run parts of modules below the root: start a new pass."""
        self._begin_pass()
        self.context.end_forward()
        self.context.gathers.begin_schedule()

    def check_is_used(self) -> None:
        """See that a module that a schedule runs, or a part of it, has weights to compute with.

        Raises:
            RuntimeError: They are not gathered.
        """
        if not self.is_unsharded:
            raise RuntimeError(
                f"{self.name} runs where its schedule does not use it, so its weights are not "
                "gathered; tell the uses of the unit, from begin_forward to end_forward"
            )

    # -- backward -----------------------------------------------------------------------------

    def pre_backward(self, use: _Use) -> None:
        """Before the module's backward: gather, and see to it that the backward is finished.

        Args:
            use: The run of the module that it is of.

        Raises:
            RuntimeError: The backward is to be differentiated again (`create_graph=True`), where
                weights are dropped before that could happen; or it was compiled.
        """
        context = self.context
        check_engine(self)
        if context.backward_failed:
            repair(context)
        context.finish_later_than(use.number)
        if self.phase is Phase.BACKWARD:
            return
        if torch.is_grad_enabled() and not self.skips_safely:
            raise RuntimeError(
                f"{self.name} is in a backward with create_graph=True, and its weights are dropped "
                "after it (ZeRO-3); use sharding_strategy='optim_grads' to differentiate twice"
            )
        with self.in_range("pre_backward"):
            self._join_backward(use.passed)
            self.move(Phase.BACKWARD)
            if not use.tells_its_end:
                context.note_nearly_over(use.number, use.finish)
            self.has_pending_reduction = True
            self.is_recomputed, self._was_recomputed = self._was_recomputed, False
            context.forget_recomputed(self)
            context.gathers.before_use(self)
            self.unshard(WeightUse.BACKWARD, async_op=False)
            self.wait_for_unshard()
            context.gathers.in_backward(self, self.backward_prefetch)

    def _join_backward(self, passed: RootPass[UnitBase]) -> None:
        """Have the end of the running backward taken care of, and reductions in turn."""
        context = self.context
        if context.backward_failed:
            repair(context)
        if not context.is_in_backward:
            check_captured_pass(context, f"the backward of {self.name}")
            # Nobody but the engine holds it, so it goes when its backward does, finished or not.
            end = functools.partial(uncompiled(finish_backward), context)
            context.begin_backward(passed, end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        elif passed is not context.backward_pass:
            # One backward of several forwards of the root: each has a round of its own.
            finish_ordered_reductions(context)
            context.begin_turns(passed)

    def post_backward(self, use: _Use) -> None:
        """After the module's backward: reduce what arrived, reshard.

        Args:
            use: The run of the module that it is of.

        Raises:
            RuntimeError: Its backward ran without its weights being gathered.
        """
        if self.phase is not Phase.BACKWARD:
            self._check_is_gathered(self.held_groups)
            self.pre_backward(use)
        self.context.forget_nearly_over(use.number)
        with self.in_range("post_backward"):
            self.num_awaited = max(0, self.num_awaited - 1)
            if self.reshard_after_backward:
                # First, since a reduction may take memory, and wait for others.
                self.reshard()
            turns = self.context.ordered_reductions
            reduce_in_order(self.context, [self] if turns is None else turns.done(*self._reduced()))
            self.move(Phase.IDLE)

    def before_gradient(self, group: ParameterGroup) -> ReductionQueue:
        """A gradient arrives: its backward has to be one that is finished, with weights in place.

        Returns:
            The queue that its reduction will be in.

        Raises:
            RuntimeError: The weights it was computed with were not gathered.
        """
        context = self.context
        if not (group.weights.is_ready and (context.runs_backward or context.is_scheduled)):
            self._admit_gradient(group)
        context.has_gradient = True
        return context.reductions

    def _admit_gradient(self, group: ParameterGroup) -> None:
        """A gradient of a group arrives, and either its weights or its backward are not there."""
        if self.context.is_scheduled:
            # Its schedule finishes it.
            raise RuntimeError(
                f"a gradient of {self.name} arrived where its schedule does not use it, so its "
                "weights were not gathered and what was computed is wrong; tell the uses of "
                "the unit, from begin_backward to end_backward"
            )
        self._check_is_gathered([group])
        self._join_backward(self.context.root_pass)

    def _check_is_gathered(self, groups: Sequence[ParameterGroup]) -> None:
        """See that what was just computed in a backward had weights to compute with."""
        if all(group.weights.is_ready for group in groups):
            return
        raise RuntimeError(
            f"the backward of {self.name} ran before a gradient reached one of its outputs, so its "
            "weights were not gathered and what was computed is wrong: it returns tensors inside "
            "something that is not searched (containers, dataclasses and attributes of objects "
            "are), or leaves some behind that are used outside of it. Return them, or use "
            "sharding_strategy='optim_grads'"
        )


class _Use:
    """One run of a unit, as the graph it left knows it.

    Attributes:
        passed: The forward of the root that it was part of.
        number: Larger than that of every run that began before it.
        tells_its_end: Whether the graph tells when its backward is over.
    """

    __slots__ = ("_unit", "number", "passed", "tells_its_end")

    def __init__(self, unit: Unit, passed: RootPass[UnitBase]) -> None:
        self._unit = unit
        self.passed = passed
        self.number = next(unit.context.use_numbers)
        self.tells_its_end = True

    def pre_backward(self) -> None:
        """The first gradient reached an output."""
        self._unit.pre_backward(self)

    def post_backward(self) -> None:
        """The last gradient left for an input."""
        self._unit.post_backward(self)

    def nearly_over(self) -> None:
        """A gradient left for an input, and it may be the last one."""
        self._unit.context.note_nearly_over(self.number, self.finish)

    def finish(self) -> None:
        """What comes next in the backward is not part of it."""
        if self._unit.phase is Phase.BACKWARD:
            self._unit.post_backward(self)
