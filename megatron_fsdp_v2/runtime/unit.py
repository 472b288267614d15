"""A unit: its modules and parameter groups, and the commands of the machine that it executes.

What happens next in a step is decided in `runtime/machine`. Hooks call the methods of a unit, which
report events to the machine; the machine calls the commands.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_fsdp_v2._compiler import uncompiled
from megatron_fsdp_v2.dtensor.sharded_rows import plain_attributes, raw_grad
from megatron_fsdp_v2.layout.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.params.autograd import (
    Inputs,
    ReplacedTensors,
    cast_floats,
    next_node_number,
    tensors_within,
    to_device,
    watch_inputs,
    watch_outputs,
)
from megatron_fsdp_v2.params.buffer import GroupSpec
from megatron_fsdp_v2.params.group import ParameterGroup
from megatron_fsdp_v2.runtime.context import Context, live
from megatron_fsdp_v2.runtime.direct_use import begin_direct_use
from megatron_fsdp_v2.runtime.machine import events, reductions
from megatron_fsdp_v2.runtime.machine.state import Engine, Forward, Settings, UnitState
from megatron_fsdp_v2.runtime.meshes import DataMesh
from megatron_fsdp_v2.runtime.unit_checks import (
    check_is_gathered,
    check_outputs,
    check_owned,
    check_transform,
    compare_gather,
    compare_unit,
)
from megatron_fsdp_v2.runtime.unit_groups import UnitGroups, owner_of


def unit_owning(group: ParameterGroup) -> Unit | None:
    """Return the unit that owns a group; None before the unit is made and after its deletion."""
    unit = owner_of(group)
    return unit if isinstance(unit, Unit) else None


@dataclass(slots=True)
class ForwardTensors:
    """Tensors of a unit's forward under way.

    Attributes:
        replaced: Tensors replaced in its arguments.
        inputs: Its inputs that require gradients.
        forward: The forward, for hooks in its graph; None without gradients.
        since: Number of its first autograd node.
        is_called_again: Whether the module was called inside its own forward.
    """

    replaced: ReplacedTensors = field(default_factory=ReplacedTensors)
    inputs: Inputs = field(default_factory=Inputs)
    forward: Forward | None = None
    since: int = 0
    is_called_again: bool = False


class Sharding(NamedTuple):
    """Properties of a unit's groups, unless a parameter has others.

    Attributes:
        spec: The properties on the unit's mesh.
        on: Returns the properties on any mesh.
    """

    spec: GroupSpec
    on: Callable[[DataMesh], GroupSpec]


class Unit(UnitGroups):
    """Sharded parameters of one module or several: gathered, used, resharded and reduced together.

    Attributes:
        context: Shared by the units under its root.
        modules: Weak references to its modules.
        policy: Dtypes of inputs and outputs.
        sharding: Properties of its groups, on its mesh and on any mesh.
        running: Tensors of its forward under way, or of the next one.
    """

    def __init__(
        self,
        context: Context[Unit],
        modules: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        tied_groups: Sequence[ParameterGroup],
        policy: MixedPrecisionPolicy,
        sharding: Sharding,
        *,
        reshard_after_forward: bool,
        root_options: Mapping[str, Any],
    ) -> None:
        self.context = context
        self.modules = [weakref.ref(module) for module in modules]
        self.policy = policy
        self.sharding = sharding
        self.running = ForwardTensors()
        state = UnitState(
            weakref.proxy(self),
            [],
            Settings(reshard_after_forward),
            context.state,
            [id(module) for module in modules],
        )
        super().__init__(state, class_names(modules), groups, tied_groups, root_options)
        for group in self.groups:
            self.watch_gradients(group)

    def watch_gradients(self, group: ParameterGroup) -> None:
        """Register hooks that collect the gradients of gathered parameters."""
        # Weak: the cycle parameter -> hook -> unit -> parameter would outlive the model.
        collect = uncompiled(_collect)
        refs = weakref.ref(self), weakref.ref(group)
        group.info.begin_direct_use = functools.partial(begin_direct_use, refs[0])
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
    def settings(self) -> Settings:
        """Options that a user sets between passes."""
        return self.state.settings

    @property
    def is_unsharded(self) -> bool:
        """Whether gathered weights are installed, or a gather is under way."""
        return self.state.is_gathered

    # -- commands -----------------------------------------------------------------------------

    def gather(self, uses: WeightUse, *, adds: bool, async_op: bool) -> None:
        """Issue gathers; see `UnitCommands.gather`. Collective."""
        context, groups = self.context, self.held_groups
        state = context.state
        if adds:
            groups = [group for group in groups if group.lacks(uses)]
            if not groups:
                return
        with self.context.observer.phase(self.state.fqn, "unshard"):
            if state.compares_collectives and self.state.is_collective:
                compare_gather(context.units(), self, groups)
            if adds:
                for group in groups:
                    group.gather(uses, async_op=async_op)
                return
            version, refreshes = state.weight_version, state.refreshes
            for index, group in enumerate(groups):
                try:
                    group.unshard(uses, version, refreshes=refreshes, async_op=async_op)
                except Exception:
                    for held in groups[:index]:
                        held.reshard()
                    raise

    def wait(self) -> None:
        """Wait for the all-gathers and register the gathered parameters on the modules."""
        with self.context.observer.phase(self.state.fqn, "wait_for_unshard"):
            for group in self.held_groups:
                group.wait_for_unshard()

    def free(self, *, after_error: bool) -> None:
        """Register the sharded parameters and free gathered weights.

        Args:
            after_error: Whether an error was raised already, so that none is raised here.

        Raises:
            RuntimeError: A gathered weight was changed in place.
        """
        with self.context.observer.phase(self.state.fqn, "reshard"):
            written = [name for group in self.held_groups if (name := group.reshard())]
        if written and not after_error:
            raise RuntimeError(
                f"{written[0]} was changed in place while it was gathered, in the forward or "
                "backward of a module, in a hook, or between unshard() and reshard(). Where "
                "weights are sharded, that changes a temporary copy and is lost. Change the "
                "parameter between steps (under torch.no_grad(), after reshard()), compute with "
                "weight.clone(), or make a value that forwards change a buffer"
            )

    def settle(self) -> None:
        """Free weights that an exception in a command has left gathered."""
        for group in self.held_groups:
            group.settle()

    def abandon(self) -> None:
        """Drop collectives under way and gradients, and free everything temporary."""
        for group in self.held_groups:
            group.abandon()

    def check_pass(self) -> None:
        """Raise if no pass may begin with the unit.

        A unit that was sharded again below another root belongs to that root: a pass of its earlier
        root would gather the unit, and not reduce it.
        """
        context = self.context
        context.check_is_ready()
        for each in context.units():
            if each.context is not context and each.state.is_collective:
                root = each.context.units()[0]
                raise RuntimeError(
                    f"unit {each.name} is below two roots, {self.class_name} and "
                    f"{root.class_name}; with ZeRO-3 it belongs to the root that was sharded last. "
                    "Call fully_shard on one module that contains both, or use "
                    "sharding_strategy='optim_grads'"
                )
        check_transform(self)

    def check_owned(self) -> None:
        """Raise if a trained parameter below the unit was registered that no unit owns."""
        context = self.context
        if not context.state.owns_all:
            held = [group for unit in context.units() for group in unit.held_groups]
            context.state.owns_all = check_owned(held, live(self.modules))

    def check_is_gathered(self) -> None:
        """Raise if weights were absent in the part of the backward that just ran."""
        check_is_gathered(self, self.held_groups)

    def compare_reduction(self, *, along_all: bool) -> None:
        """Check that every rank is about to reduce this unit. Collective."""
        compare_unit(self.context.units(), self, "reduce", along_all=along_all)

    def collect_assigned(self) -> None:
        """Collect gradients that were assigned to gathered parameters, not computed by a backward.

        Zero-bubble schedules of torch's pipelining assign the results of `torch.autograd.grad`.
        """
        for group in self.groups:
            with plain_attributes():
                grads = list(map(raw_grad, group.unsharded_params))
            for index, grad in enumerate(grads):
                if grad is not None:
                    if not group.grads.is_arriving:
                        self._begin_gradients(group)
                    group.grads.collect(index, group.unsharded_params[index])

    def restore_inputs(self) -> None:
        """Put replaced arguments of an unfinished forward back."""
        self.running.replaced.restore()
        self.running = ForwardTensors()

    def end_backward(self, forward: Forward) -> None:
        """Handle the end of the backward of a forward that no hook reported."""
        events.last_gradient(forward, has_grad=torch.is_grad_enabled())

    # -- forward ------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather weights, cast inputs and add hooks, before the forward of one of its modules."""
        state = self.state
        begins = events.enter_module(
            state,
            id(module),
            has_grad=torch.is_grad_enabled(),
            is_packed=torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        )
        if begins:
            self.running = ForwardTensors()
        running = self.running
        args, kwargs = self.cast_inputs(args, kwargs)
        if begins and torch.is_grad_enabled():
            running.forward = forward = events.begin_graph(state)
            running.since = next_node_number()
            at_first = functools.partial(self.post_backward, forward)
            at_others = functools.partial(self.defer_end, forward)
            args, kwargs = watch_inputs(
                at_first, at_others, args, kwargs, running.inputs, running.replaced
            )
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Reshard and add hooks for the backward, after the forward of one of its modules."""
        state, has_grad = self.state, torch.is_grad_enabled()
        is_last = (
            len(self.modules) == 1
            or state.is_recomputing
            or events.leave_module(state, id(module), has_grad=has_grad)
        )
        if is_last:
            if state.is_root and not state.is_recomputing:
                self._end_pending_forwards()
            self._check_outputs(output)
            events.end_unit_forward(state, has_grad=has_grad)
            output = self.wrap_outputs(output)
            self.forget_forward()
            return output
        self._check_outputs(output)
        output = self.wrap_outputs(output)
        self.running.replaced.restore()
        return output

    def _check_outputs(self, output: Any) -> None:
        """Raise if a forward returns a view of weights that are freed at its end."""
        state = self.state
        if state.nbytes and state.reshards_after_forward(has_grad=torch.is_grad_enabled()):
            arguments = self.running.replaced.tensors()
            check_outputs(self, (*tensors_within(output), *arguments), self.context.units)

    def _end_pending_forwards(self) -> None:
        """End the forwards of units of which some modules did not run in this pass."""
        for unit in self.context.units():
            if unit.state.pending_modules:
                events.end_unit_forward(unit.state, has_grad=torch.is_grad_enabled())
                unit.forget_forward()

    def after_forward(self, module: nn.Module) -> None:
        """Return to IDLE after a forward of one of its modules raised."""
        state = self.state
        if (
            state.pending_modules
            and not state.is_recomputing
            and id(module) not in state.pending_modules
        ):
            # Other modules of the unit have not run yet.
            return
        self.restore_inputs()
        events.fail_forward(state)

    def forget_forward(self) -> None:
        """Put replaced tensors back, at the end of a forward."""
        self.running.replaced.restore()
        self.running = ForwardTensors()
        self.state.end_forward()

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return forward inputs on the device, in the dtypes of the policy, until `forget_forward`.

        As with FSDP2, a forward that begins a pass moves its inputs to the device.
        """
        replaced, device = self.running.replaced, self.context.device
        replaced.hold(args, kwargs)
        if (
            device is not None
            and device.type == "cuda"
            and (self.state.is_root or self.context.state.is_pass_of(self.state))
        ):
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
        if self.policy.output_dtype is not None:
            output = self.cast_outputs(output)
        if torch.is_grad_enabled():
            forward, since = running.forward, running.since
            if forward is None:
                # The forward enabled gradients for its caller.
                forward, since = events.begin_graph(self.state), next_node_number()
            else:
                forward.has_end_hook = not running.inputs.lacks_end_hook
            events.end_graph(forward)
            # The caller may use tensors that the forward wrote into its arguments, like outputs.
            written = running.replaced.written(since)
            watch_outputs(functools.partial(self.pre_backward, forward), (output, *written), since)
        return output

    # -- backward -----------------------------------------------------------------------------

    def pre_backward(self, forward: Forward) -> None:
        """Gather weights, when the first gradient reaches an output of a forward.

        Raises:
            RuntimeError: See `events.first_gradient`.
        """
        if self.state.is_gathered:
            for group in self.held_groups:
                if not group.has_copy:
                    group.note_values(group.parameters.versions())
        events.first_gradient(forward, has_grad=torch.is_grad_enabled())

    def post_backward(self, forward: Forward) -> None:
        """Reshard and reduce gradients, when the engine has run the last node of a forward."""
        events.last_gradient(forward, has_grad=torch.is_grad_enabled())

    def defer_end(self, forward: Forward) -> None:
        """Note that the engine has run the node of an input; other nodes of the unit may follow."""
        reductions.defer(forward)

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
        root = self.context.state
        if not (group.is_ready and (root.engine is Engine.RUNNING or root.is_scheduled)):
            if root.is_scheduled:
                raise RuntimeError(
                    f"a gradient of {self.name} arrived outside the uses that its schedule "
                    "reports, so its weights were not gathered and the result is wrong; report "
                    "each use with begin_backward and end_backward"
                )
            check_is_gathered(self, [group])
            events.expect_gradient(self.state)
        if not group.grads.is_arriving:
            self._begin_gradients(group)
        group.grads.collect(index, param)

    def _begin_gradients(self, group: ParameterGroup) -> None:
        reductions.make_room(self.state.root)
        group.grads.begin()


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
