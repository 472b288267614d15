"""A unit in a training step: unshard, forward, reshard, unshard, backward, reduce, reshard."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2._compiler import reject_compiled_autograd, uncompiled
from megatron_fsdp_v2.layout.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp_v2.params.autograd import (
    cast_floats,
    in_backward,
    next_node_number,
    to_device,
    watch_inputs,
    watch_outputs,
)
from megatron_fsdp_v2.params.formats import WeightUse
from megatron_fsdp_v2.params.gradients import GroupGrads
from megatron_fsdp_v2.params.group import ParameterGroup, write_stale_weights
from megatron_fsdp_v2.runtime.backward import ForwardRecord
from megatron_fsdp_v2.runtime.context import Context
from megatron_fsdp_v2.runtime.direct_use import begin_direct_use
from megatron_fsdp_v2.runtime.phases import LEGAL_MOVES, Phase, RunningForward, UnitSettings
from megatron_fsdp_v2.runtime.schedule import FORWARD_NUMBERS, live
from megatron_fsdp_v2.runtime.unit_checks import (
    REGISTRATIONS,
    check_capture,
    check_captured_pass,
    check_is_gathered,
    check_outputs,
    check_owned,
    check_pass,
    check_units,
    compare_gather,
)

# The unit of each group, which reduces its gradients.
_OWNERS: weakref.WeakKeyDictionary[ParameterGroup, weakref.ref[Unit]] = weakref.WeakKeyDictionary()


def unit_owning(group: ParameterGroup) -> Unit | None:
    """Return the unit that owns a group; None if it is not made yet or was deleted."""
    ref = _OWNERS.get(group)
    return None if ref is None else ref()


class Unit:
    """Sharded parameters of one module or several: gathered, used, resharded and reduced together.

    Attributes:
        context: Shared by the units under its root.
        fqn: Names of all its modules under the root, separated by commas; empty for the root.
        class_name: Class names of its modules before sharding.
        modules: Weak references to its modules.
        groups: Its own parameter groups, which it gathers and reduces.
        tied_groups: Groups of other units that have a parameter tied to one of its own; gathered by
            this unit too, reduced by their owner.
        held_groups: The groups it gathers: `groups` and `tied_groups`.
        reduced_with: References to this unit and to the owners of its tied groups.
        policy: Dtypes of inputs and outputs.
        root_options: Root options passed to this unit; all others come from the root.
        settings: Options that a user sets between passes.
        phase: Current phase.
        is_root: Whether its module is the outermost one.
        running: Its forward under way, or the next one.
        unset: Names of tensors without values when the unit was made, and functions that find them.
        num_users: Forwards and backwards of a schedule that use the unit now.
        single_payload: Whether weights gathered for one use serve every use.
        is_recomputed: Whether its forward was recomputed in the latest backward.
        num_pending_backwards: Number of forwards whose backward is expected; it may never run.
        is_unsharded: Whether gathered weights are installed, or a gather is under way.
    """

    def __init__(
        self,
        context: Context,
        modules: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        tied_groups: Sequence[ParameterGroup],
        policy: MixedPrecisionPolicy,
        *,
        reshard_after_forward: bool,
        root_options: Mapping[str, Any],
    ) -> None:
        self.context = context
        self.fqn = ""
        self.class_name = class_names(modules)
        self.modules = [weakref.ref(module) for module in modules]
        self.groups = list(groups)
        self.tied_groups = list(tied_groups)
        self.held_groups = [*self.groups, *self.tied_groups]
        owners = [unit for unit in map(unit_owning, self.tied_groups) if unit is not None]
        self.reduced_with = [weakref.ref(unit) for unit in (self, *owners)]
        self.policy = policy
        self.root_options = dict(root_options)
        self.settings = UnitSettings(reshard_after_forward)
        self.phase = Phase.IDLE
        self.is_root = True
        self.running = RunningForward()
        self.unset: Sequence[tuple[str, Callable[[], torch.Tensor | None]]] = ()
        self.num_users = 0
        self.single_payload = all(group.single_payload for group in self.held_groups)
        self.is_recomputed = False
        self._was_recomputed = False
        # Number of the forward whose backward is under way.
        self._backward_number = 0
        self.num_pending_backwards = 0
        self.is_unsharded = False
        for group in self.groups:
            _OWNERS[group] = weakref.ref(self)
            self._watch_gradients(group)

    def _watch_gradients(self, group: ParameterGroup) -> None:
        """Register hooks that collect the gradients of gathered parameters."""
        # Weak: the cycle parameter -> hook -> unit -> parameter would outlive the model.
        collect = uncompiled(_collect)
        refs = weakref.ref(self), weakref.ref(group)
        group.info.begin_direct_use = functools.partial(begin_direct_use, *refs)
        for index, param in enumerate(group.unsharded_params):
            if not param.is_floating_point():
                continue
            was_trained = param.requires_grad
            param.requires_grad_(True)  # torch rejects the hook otherwise
            param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(collect, *refs, index)
            )
            param.requires_grad_(was_trained)

    # -- properties ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name and class of the module, for error messages."""
        return f"{self.fqn or 'the root'} ({self.class_name})"

    def grads(self) -> list[GroupGrads]:
        """Return the gradients of its groups."""
        return [group.grads for group in self.groups]

    @functools.cached_property
    def gathered_nbytes(self) -> int:
        """Bytes of gathered weights per use; 0 if no use needs a gather."""
        return sum(group.gathered_nbytes for group in self.held_groups)

    @property
    def is_idle(self) -> bool:
        """Whether the unit runs neither its forward nor its backward."""
        return self.phase is Phase.IDLE

    @property
    def is_in_backward(self) -> bool:
        """Whether its backward is under way."""
        return self.phase is Phase.BACKWARD

    @property
    def is_recomputing(self) -> bool:
        """Whether its running forward is a recomputation."""
        return self.running.is_recomputation

    @property
    def expects_backward(self) -> bool:
        """Whether a backward is under way or expected after a forward."""
        return self.num_pending_backwards > 0 or self.phase is Phase.BACKWARD

    @property
    def will_reshard_after_forward(self) -> bool:
        """Whether a forward that ends now reshards."""
        if self.is_recomputing:
            return False
        # The root stays gathered: its backward follows its forward at once.
        stays = self.is_root or not self.settings.reshard_after_forward
        return not (torch.is_grad_enabled() and stays)

    @property
    def recomputes(self) -> bool:
        """Whether a forward that begins now is a recomputation.

        A recomputation repeats a forward of the pass whose backward is under way, and uses the
        weights of that forward. Any other forward inside a backward, such as one in a tensor hook,
        is a pass of its own; `Context.refreshes` tells whether that pass refreshes stale weights.
        """
        context = self.context
        if not context.belongs_to_backward:
            return False
        return weakref.ref(self) in context.backward.passed.recomputable

    @property
    def needs_no_collective(self) -> bool:
        """Whether no use of the unit is a collective, so that a rank may skip it."""
        return not any(group.gathers_for_use for group in self.held_groups)

    @property
    def syncs_gradients(self) -> bool:
        """Whether this backward reduces gradients into `param.grad`."""
        settings = self.settings
        is_last = settings.is_last_backward and not settings.is_finalized_manually
        return is_last and self.syncs_when_finalized

    @property
    def syncs_when_finalized(self) -> bool:
        """Whether `finalize_backward` reduces gradients into `param.grad`."""
        settings = self.settings
        if not settings.requires_all_reduce and any(len(g.axes) > 1 for g in self.groups):
            return False
        return settings.requires_gradient_sync

    def is_inside(self, other: Unit) -> bool:
        """Whether its module is below another unit's."""
        return self is not other and any(
            f"{mine}.".startswith(f"{theirs}." if theirs else "")
            for mine in self.fqn.split(", ")
            for theirs in other.fqn.split(", ")
        )

    def observed_phase(self, phase: str) -> AbstractContextManager[Any]:
        """Return a context manager that reports a phase of the unit to the observer."""
        return self.context.observer.phase(self.fqn, phase)

    def move(self, phase: Phase) -> None:
        """Change phase.

        Raises:
            RuntimeError: `LEGAL_MOVES` does not allow it.
        """
        if phase not in LEGAL_MOVES[self.phase]:
            raise RuntimeError(
                f"unit {self.name} cannot go from {self.phase.value} to {phase.value}; "
                "a module must not be run inside its own forward"
            )
        self.phase = phase

    # -- weights ------------------------------------------------------------------------------

    def unshard(self, uses: WeightUse, *, async_op: bool) -> None:
        """Gather weights. Unless for a backward, refresh stale model weights first. Collective.

        Args:
            uses: Uses to gather for.
            async_op: Whether to return before the gathers are done.
        """
        context, groups = self.context, self.held_groups
        if self.is_unsharded:
            # Gather the payloads this use needs that are not gathered yet.
            groups = [] if self.single_payload else [g for g in groups if g.lacks(uses)]
            if not groups:
                return
        with self.observed_phase("unshard"):
            if not context.is_checked:
                check_units(context)
            if context.compares_collectives and not self.needs_no_collective:
                compare_gather(self, groups)
            if self.is_unsharded:
                for group in groups:
                    group.gather(uses, async_op=async_op)
                return
            for index, group in enumerate(groups):
                try:
                    group.unshard(
                        uses,
                        context.weight_version,
                        refreshes=context.refreshes,
                        async_op=async_op,
                    )
                except Exception:
                    for held in groups[:index]:
                        held.reshard()
                    raise
            self.is_unsharded = True

    def prefetch(self) -> None:
        """Start gathering ahead of use. Collective."""
        uses = WeightUse.FORWARD
        if self.context.belongs_to_backward:
            # A recomputed unit runs its forward first, then its backward.
            uses = WeightUse.BOTH if self.is_recomputed else WeightUse.BACKWARD
        self.unshard(uses, async_op=True)

    def wait_for_unshard(self) -> None:
        """Wait for the all-gathers and register the gathered parameters on the modules."""
        with self.observed_phase("wait_for_unshard"):
            try:
                for group in self.held_groups:
                    group.wait_for_unshard()
            except RuntimeError:
                self.reshard(after_error=True)
                raise

    def unshard_for(self, uses: WeightUse) -> None:
        """Gather weights at the beginning of a use and wait for them. Collective."""
        self.unshard(uses, async_op=False)
        self.wait_for_unshard()

    def reshard(self, *, after_error: bool = False) -> None:
        """Register the sharded parameters and free gathered weights, if weights are gathered.

        Args:
            after_error: Whether an error was raised already, so that none is raised here.

        Raises:
            RuntimeError: A gathered weight was changed in place.
        """
        if not self.is_unsharded:
            return
        with self.observed_phase("reshard"):
            self.is_unsharded = False
            written = [name for group in self.held_groups if (name := group.reshard())]
        if written and not after_error:
            raise RuntimeError(
                f"{written[0]} was changed in place while it was gathered, in the forward or "
                "backward of a module, in a hook, or between unshard() and reshard(). Where "
                "weights are sharded, that changes a temporary copy and is lost. Change the "
                "parameter between steps (under torch.no_grad(), after reshard()), compute with "
                "weight.clone(), or make a value that forwards change a buffer"
            )

    def reshard_if_stale(self) -> None:
        """Reshard if gathered weights are stale or changed, or if some were frozen or unfrozen."""
        groups, version = self.held_groups, self.context.weight_version
        if self.is_unsharded and any(
            g.is_stale(version)
            or g.parameters.has_changed_requires_grad()
            or g.parameters.find_written()
            for g in groups
        ):
            self.reshard()

    def reshard_if_replaced(self) -> None:
        """Sync parameters that were assigned while weights were gathered, and reshard."""
        if self.is_unsharded and any(g.parameters.is_replaced() for g in self.held_groups):
            self.sync()
            self.reshard()

    def sync(self) -> None:
        """Apply changes that user code made to parameters."""
        for group in self.held_groups:
            group.parameters.sync()

    # -- forward ------------------------------------------------------------------------------

    def pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather weights, cast inputs and add post-backward hooks, before the module's forward."""
        context = self.context
        if self.running.has_begun:
            # The last forward did not end, such as after KeyboardInterrupt, which runs no hooks.
            self.running = RunningForward()
        running = self.running
        running.has_begun = True
        with self.observed_phase("pre_forward"):
            inside = context.backward.is_running
            recomputes = running.is_recomputation = inside and self.recomputes
            running.is_gathered_around = inside and self.is_unsharded
            if inside and not (recomputes or context.is_nested):
                context.begin_nested_pass(self, has_grad=torch.is_grad_enabled())
            elif not inside and (self.is_root or not context.is_in_forward):
                self._begin_pass()
                # A repair has ended the forwards of all units, this one too.
                self.running = running
            elif context.is_capturing:
                check_captured_pass(context, self.name)
            self.note_if_recomputable()
            if self.phase is not Phase.BACKWARD:
                self.move(Phase.FORWARD)
            context.gathers.before_use(self)
            if recomputes:
                self.is_recomputed = self._was_recomputed = True
                if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
                    # A reentrant one, whose graph replaces that of the forward.
                    context.forget_casts()
                context.backward.prepare_recomputation(self)
            elif not running.is_gathered_around:
                self.reshard_if_replaced()
            self.unshard_for(WeightUse.FORWARD)
            if not recomputes:
                context.gathers.in_forward(self, self.settings.forward_prefetch)
                if context.pass_has_grad or torch.is_grad_enabled():
                    context.root_pass.begin_forward(self.reduced_with)
        args, kwargs = self.cast_inputs(args, kwargs)
        if torch.is_grad_enabled():
            record = running.record = ForwardRecord(self, is_recomputed=recomputes)
            running.since = next_node_number()
            at_first, at_others = record.post_backward, record.defer_post_backward
            args, kwargs = watch_inputs(
                at_first, at_others, args, kwargs, running.inputs, running.replaced
            )
        return args, kwargs

    def post_forward(self, output: Any) -> Any:
        """Reshard and add pre-backward hooks, after the module's forward."""
        check_outputs(self, output)
        self.end_forward()
        output = self.wrap_outputs(output)
        self.forget_forward()
        return output

    def forget_forward(self) -> None:
        """Put replaced tensors back, at the end of a forward."""
        self.running.replaced.restore()
        self.running = RunningForward()

    def end_forward(self) -> None:
        """End a forward: reshard, and count a pending backward if gradients are enabled."""
        context, running = self.context, self.running
        with self.observed_phase("post_forward"):
            if running.is_recomputation:
                self._end_recomputation()
                return
            running.pending_modules.clear()
            is_nested = context.is_nested
            if not is_nested or self.phase is Phase.FORWARD:
                self.move(Phase.IDLE)
            has_grad, ends_pass = torch.is_grad_enabled(), context.is_pass_of(self)
            pass_has_grad = context.pass_has_grad
            if ends_pass:
                # Prefetched weights would be stale if an optimizer stepped next.
                context.gathers.drop_prefetched()
                if context.ranks_may_differ:
                    # Of units that the pass skipped: a capture cannot wait for earlier refreshes,
                    # and has to wait for its own.
                    for group in context.groups():
                        group.wait_for_refresh()
                context.end_forward()
            # A unit to be recomputed runs its first forward without grad, in a pass with grad.
            if has_grad or pass_has_grad:
                context.gathers.expect_backward(self)
                self.num_pending_backwards += 1
                context.root_pass.add_use(self.reduced_with)
            if self.will_reshard_after_forward and not running.is_gathered_around:
                self.reshard()
            if ends_pass and not (has_grad or is_nested):
                context.end_pass("")
                context.wait_for_host_memory()

    def after_forward(self) -> None:
        """Return to IDLE after a forward that raised."""
        is_recomputation = self.is_recomputing
        self.forget_forward()
        if is_recomputation:
            # A recomputation may stop early by an exception, once all saved tensors are recomputed.
            self._end_recomputation()
            return
        if self.phase is Phase.FORWARD:
            self.move(Phase.IDLE)
        if self.context.is_pass_of(self):
            self.context.end_forward(failed=True)

    def _end_recomputation(self) -> None:
        """Return to IDLE after a recomputation, and stay gathered for the backward."""
        if self.phase is Phase.FORWARD:
            self.move(Phase.IDLE)
            self.context.backward.keep_recomputed(self)

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return forward inputs on the device, in the dtypes of the policy, until `forget_forward`.

        As with FSDP2, a forward that begins a pass moves its inputs to the device.
        """
        replaced, device = self.running.replaced, self.context.device
        replaced.hold(args, kwargs)
        is_outermost = self.is_root or self.context.is_pass_of(self)
        if is_outermost and device is not None and device.type == "cuda":
            args, kwargs = to_device((args, kwargs), device, replaced)
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = cast_floats((args, kwargs), dtype, replaced)
        return args, kwargs

    def cast_outputs(self, output: Any) -> Any:
        """Return forward outputs in the dtype of the policy."""
        dtype = self.policy.output_dtype
        return output if dtype is None else cast_floats(output, dtype)

    def wrap_outputs(self, output: Any) -> Any:
        """Return forward outputs in the dtype of the policy, with hooks for the backward."""
        running = self.running
        output = self.cast_outputs(output)
        if torch.is_grad_enabled():
            record, since = running.record, running.since
            if record is None:
                # The forward enabled gradients for its caller.
                record, since = ForwardRecord(self, is_recomputed=False), next_node_number()
            else:
                record.has_post_backward_hook = not running.inputs.lacks_end_hook
            if not record.is_recomputed:
                record.ends = next(FORWARD_NUMBERS)
            # The caller may use what the forward wrote into its arguments, as it uses outputs.
            written = running.replaced.written(since)
            watch_outputs(record.pre_backward, (output, *written), since)
        return output

    def note_if_recomputable(self) -> None:
        """Record whether the backward of the pass may have to repeat a forward that begins now.

        A forward to be repeated records no graph (reentrant checkpoints), or saves its tensors
        through hooks (non-reentrant ones).
        """
        if not self.context.pass_has_grad or self.is_recomputing:
            return
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None or not torch.is_grad_enabled():
            self.context.root_pass.recomputable.add(weakref.ref(self))

    def _begin_pass(self) -> None:
        """Start a new pass, at a forward of the root or of a unit outside the root's forward.

        Repairs the state that an exception left, and refreshes stale weights.
        """
        context = self.context
        check_pass(self)
        units = context.units()
        is_capturing = context.is_capturing
        if is_capturing:
            check_capture(context)
            context.begin_capture()
        context.is_captured = is_capturing
        context.note_replays()
        context.note_draws()
        for unit in units:
            # Before a reshard overwrites assigned parameters with the sharded ones.
            unit.reshard_if_replaced()
        if context.needs_repair:
            context.repair()
        has_grad = torch.is_grad_enabled()
        if has_grad and self.is_root and context.num_registrations != REGISTRATIONS.num:
            check_owned(context, live(self.modules))
        for unit in units:
            unit.reshard_if_stale()
            if has_grad:
                for group in unit.groups:
                    group.parameters.check_hooks()
        if has_grad and context.is_after_backward:
            context.forget_casts()
        context.begin_forward(self, has_grad=has_grad)
        self._refresh_all()

    def _refresh_all(self) -> None:
        """Refresh what is refreshed when a pass begins, not at a unit's use. Collective."""
        context = self.context
        if in_backward() and (
            not (context.ranks_may_differ and context.is_checked)
            or any(group.is_stale(context.weight_version) for group in context.groups())
        ):
            context.backward.finish_others()
        if not (context.ranks_may_differ or context.has_formats):
            return
        if not context.is_checked:
            check_units(context)
        if context.has_formats:
            write_stale_weights(context.groups(), context.weight_version)
        if not context.ranks_may_differ:
            return
        # Ranks may run different units, so every rank refreshes all groups here, not
        # at a unit's use: a rank that skips a unit still reduces with the others.
        is_async = not context.gathers.limit.is_none
        for group in context.groups():
            if not group.is_refreshed_locally and not group.is_held:
                group.parameters.sync()
                group.refresh(context.weight_version, async_op=is_async)

    def begin_schedule(self) -> None:
        """Start a new pass for a schedule that runs modules part by part."""
        self._begin_pass()
        self.context.end_forward()
        self.context.gathers.begin_schedule()

    # -- backward -----------------------------------------------------------------------------

    def pre_backward(self, record: ForwardRecord) -> None:
        """Gather weights and queue the end-of-backward callback, before the module's backward.

        Args:
            record: The forward that this backward belongs to.

        Raises:
            RuntimeError: The backward runs with `create_graph=True` and the weights are resharded
                before a second differentiation; or the backward is compiled.
        """
        context = self.context
        reject_compiled_autograd(self.name)
        backward = context.backward
        if backward.has_failed:
            context.repair()
        backward.finish_deferred(record.number)
        if self.phase is Phase.BACKWARD:
            return
        if torch.is_grad_enabled() and not self.needs_no_collective:
            raise RuntimeError(
                f"{self.name} is in a backward with create_graph=True, and its weights are dropped "
                "after it (ZeRO-3); use sharding_strategy='optim_grads' to differentiate twice"
            )
        with self.observed_phase("pre_backward"):
            backward.join(record.passed, self, record.ends)
            self.move(Phase.BACKWARD)
            self._backward_number = record.number
            if not record.has_post_backward_hook:
                record.defer_post_backward()
            self.is_recomputed, self._was_recomputed = self._was_recomputed, False
            backward.begin_unit(self)
            context.gathers.before_use(self)
            self.unshard_for(WeightUse.BACKWARD)
            context.gathers.in_backward(self, self.settings.backward_prefetch)
            # Here too: fused kernels write gradients before a hook of theirs runs.
            backward.make_room()

    def post_backward(self, record: ForwardRecord) -> None:
        """Reshard and reduce gradients, after the module's backward.

        Args:
            record: The forward that this backward belongs to.

        Raises:
            RuntimeError: The backward ran without gathered weights.
        """
        backward = self.context.backward
        if self.phase is not Phase.BACKWARD:
            check_is_gathered(self, self.held_groups)
            self.pre_backward(record)
        backward.deferred.pop(record.number, None)
        with self.observed_phase("post_backward"):
            self.num_pending_backwards = max(0, self.num_pending_backwards - 1)
            if record.is_nested and record.number > self._backward_number:
                # The backward of an earlier forward, in which this one is nested, goes on.
                return
            if self.settings.reshard_after_backward:
                # First: a reduction may allocate memory, and wait for earlier reductions.
                self.reshard()
            backward.end_use(self.reduced_with, record.begins)
            self.move(Phase.IDLE)

    def end_backward(self) -> None:
        """Return to IDLE after a backward."""
        if self.phase is Phase.BACKWARD:
            # Its inputs need no gradients, so no hook marked the end of its backward.
            self.num_pending_backwards = max(0, self.num_pending_backwards - 1)
        self.phase = Phase.IDLE
        self.running.pending_modules.clear()

    def reset_after_error(self) -> None:
        """Reshard and return to IDLE after an error."""
        self.phase = Phase.IDLE
        self.num_pending_backwards = 0
        self.num_users = 0
        self.forget_forward()
        self.reshard(after_error=True)

    def collect(self, group: ParameterGroup, index: int, param: nn.Parameter) -> None:
        """Collect the gradient of a gathered parameter.

        Args:
            group: One of the unit's own groups.
            index: Index of the parameter in the group.
            param: The parameter.

        Raises:
            RuntimeError: The gradient was computed while the weights were not gathered.
        """
        if param.grad is None:
            return
        context = self.context
        backward = context.backward
        if not (group.is_ready and (backward.is_running or context.is_scheduled)):
            if context.is_scheduled:
                raise RuntimeError(
                    f"a gradient of {self.name} arrived outside the uses that its schedule "
                    "reports, so its weights were not gathered and the result is wrong; report "
                    "each use with begin_backward and end_backward"
                )
            check_is_gathered(self, [group])
            backward.join(context.root_pass, self)
        if not group.grads.is_arriving:
            backward.make_room()
        group.grads.collect(index, param)


def class_names(modules: Sequence[nn.Module]) -> str:
    """Return the class names of modules, which name a unit that has no fqn yet."""
    return ", ".join(type(module).__name__ for module in modules)


def _collect(
    unit_ref: weakref.ref[Unit],
    group_ref: weakref.ref[ParameterGroup],
    index: int,
    param: nn.Parameter,
) -> None:
    """Hook after a gradient of a gathered parameter was accumulated."""
    unit, group = unit_ref(), group_ref()
    # Megatron and Transformer Engine set this attribute if a separate call computes the gradient
    # after the backward; autograd's gradient may be uninitialized memory.
    if group is None or getattr(param, "skip_backward_post_hook", False):
        return
    if unit is None:
        raise RuntimeError(f"a gradient arrived for {group.name}, whose module is gone")
    unit.collect(group, index, param)
