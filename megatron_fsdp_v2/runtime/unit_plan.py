"""A unit as it was decided on, and what is done then: built beside what is there, put in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.comm.backends import communicator_for
from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.layout.buffer_layout import Granularity
from megatron_fsdp_v2.layout.flat_buffers import flat_buffers
from megatron_fsdp_v2.layout.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp_v2.layout.placement import AxisPlacements
from megatron_fsdp_v2.memory.allocator import PlainAllocator
from megatron_fsdp_v2.memory.trace_pool import TracePoolAllocator
from megatron_fsdp_v2.params.buffer import Offload, ShardGrid
from megatron_fsdp_v2.params.formats import DenseFormat, format_of
from megatron_fsdp_v2.params.group import GroupSpec, ParameterGroup
from megatron_fsdp_v2.params.registration import OwnedParameter
from megatron_fsdp_v2.runtime.context import Context
from megatron_fsdp_v2.runtime.fsdp_module import FSDPModule, swap_class, unit_of
from megatron_fsdp_v2.runtime.hooks import install_hooks
from megatron_fsdp_v2.runtime.materialize import materialize
from megatron_fsdp_v2.runtime.optimizer_steps import watch_optimizers
from megatron_fsdp_v2.runtime.options import RuntimeOptions
from megatron_fsdp_v2.runtime.owned_parameters import (
    TiedParameter,
    describe_tensor_shard,
    numbered,
    own_modules,
    register_tied,
    tied_groups_of,
)
from megatron_fsdp_v2.runtime.undo import keep_attributes, keep_module
from megatron_fsdp_v2.runtime.unit import Unit
from megatron_fsdp_v2.runtime.unit_base import class_names
from megatron_fsdp_v2.runtime.unit_checks import without_values

if TYPE_CHECKING:
    from megatron_fsdp_v2.memory.allocator import Allocator, TemporaryBuffer
    from megatron_fsdp_v2.params.grads import GroupGrads
    from megatron_fsdp_v2.params.weights import GroupWeights

__all__ = ["UnitPlan", "make_unit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """What a call of `fully_shard` comes to, before anything is changed.

    Attributes:
        modules: The unit's, each once.
        given: Options of the root that this unit was given.
        options: Those of the root that it is.
        policy: Dtypes of its weights, gradients, inputs and outputs.
        placements: Of its groups; see `GroupSpec` for this and the following ones.
        granularity: What a shard boundary must not cut.
        scale: Factor of gradients.
        errors_on_missing_grad: Whether a missing gradient is an error.
        offload: Where main weights and gradients are instead of on the device.
        reshard_after_forward: Whether gathered weights are dropped between forward and backward.
        mesh: The data-parallel mesh.
        axes: Its axes as this rank sees them, outermost first.
        device: Where the buffers are.
        owned: Its parameters.
        tied: Parameters in it that other units have sharded.
        tensor_shards: How tensor parallelism cut parameters, where the caller says it.
        param_init_fn: Gives values to what is on the meta device.
    """

    modules: Sequence[nn.Module]
    given: Mapping[str, Any]
    options: RuntimeOptions
    policy: MixedPrecisionPolicy
    placements: tuple[AxisPlacements, ...]
    granularity: Granularity
    scale: float
    errors_on_missing_grad: bool
    offload: Offload | None
    reshard_after_forward: bool
    mesh: DeviceMesh
    axes: Sequence[Axis]
    device: torch.device
    owned: Sequence[OwnedParameter]
    tied: Sequence[TiedParameter]
    tensor_shards: Mapping[nn.Parameter, TensorShard]
    param_init_fn: Callable[[nn.Module], None] | None

    def spec_of(self, param: nn.Parameter) -> GroupSpec:
        """What the group of a parameter has in common."""
        format_type = DenseFormat if isinstance(param, UnevenDTensor) else format_of(param)
        assert format_type is not None
        return GroupSpec(
            dtypes=self.policy.resolve(param.dtype),
            requires_grad=param.requires_grad,
            placements=self.placements,
            granularity=self.granularity,
            scale=self.scale,
            errors_on_missing_grad=self.errors_on_missing_grad,
            reduces=getattr(param, "requires_gradient_reduction", True),
            format_type=format_type,
            offload=self.offload,
        )


def make_unit(plan: UnitPlan) -> None:
    """Do what was planned; an error leaves everything as it was.

    Raises:
        ValueError: It cannot be done with a parameter.
        RuntimeError: There is no memory, or what a parameter is tied to is in use.
    """
    modules, owned = plan.modules, plan.owned
    for parameter in owned:
        if not parameter.param.is_meta or isinstance(parameter.param, DTensor):
            describe_tensor_shard(parameter, plan.mesh, plan.tensor_shards)
    tied_groups = tied_groups_of(plan.tied, plan.spec_of, plan.mesh)
    with ExitStack() as undo:
        own = list(own_modules(numbered(modules)))
        for _, part in own:
            keep_module(part, undo)
        unset = materialize(owned, own, plan.device, plan.axes, plan.param_init_fn, undo)
        for parameter in owned:
            # Modules may say how theirs are cut when they initialize them.
            if parameter.stood_in is not None and parameter.dtensor is None:
                describe_tensor_shard(parameter, plan.mesh, plan.tensor_shards)
        allocator = TracePoolAllocator() if plan.options.enable_trace_pool else PlainAllocator()
        context: Context = Context(communicator_for(plan.device), allocator, plan.options)
        made = _make_groups(plan, context)
        groups = [group for group, _ in made]
        unit = Unit(
            modules,
            groups,
            tied_groups,
            plan.policy,
            reshard_after_forward=plan.reshard_after_forward,
            given=plan.given,
        )
        unit.context = context
        unit.unset = without_values(groups, *unset)
        # So far only what was on the meta device has changed.
        for group, members in made:
            group.members.take_over(group, members, undo)
        register_tied(plan.tied, undo)
        for part in modules:
            swap_class(part)
            part._fsdp_unit = unit  # type: ignore[assignment]
            install_hooks(part)
        _join(modules, context, undo)
        watch_optimizers(context, undo)
        undo.pop_all()


def _make_groups(
    plan: UnitPlan, context: Context
) -> list[tuple[ParameterGroup, list[OwnedParameter]]]:
    """The parameter groups of a unit: those that are alike, in flat buffers of little padding."""
    buffers = flat_buffers(
        plan.owned,
        lambda parameter: (plan.spec_of(parameter.param), parameter.is_separate and parameter.name),
        lambda parameter: parameter.shape,
        lambda key: key[0].smallest_itemsize,
        ShardGrid.of(plan.axes, [p.main_weight for p in plan.placements]).num_slices,
        plan.granularity,
    )
    made = []
    for number, ((spec, _), members, layout) in enumerate(buffers):
        problem = spec.format_type.problem(spec.dtypes, spec.placements)
        if problem is not None:
            raise ValueError(f"parameter {members[0].name}: {problem}")
        group = ParameterGroup(
            f"{class_names(plan.modules)}/{number}",
            members,
            spec,
            layout,
            plan.mesh,
            plan.axes,
            plan.device,
            context.communicator,
            context.allocator,
        )
        made.append((group, members))
    return made


def _join(roots: Sequence[nn.Module], context: Context, undo: ExitStack) -> None:
    """Have all units below a new root share its context, and know their names under it.

    Args:
        roots: Modules of the new root's unit.
        context: Of that unit.
        undo: Has units below be as they were.
    """
    names: dict[Unit, list[str]] = {}
    for prefix, root in numbered(roots):
        for name, module in root.named_modules(prefix=prefix):
            if isinstance(module, FSDPModule):
                names.setdefault(unit_of(module), []).append(name)
    units = list(names)
    for unit in units:
        _share_pool(context.allocator, unit, undo)
        keep_attributes(unit, ("context", "is_root", "fqns", "fqn"), undo)
        undo.callback(unit.report_to, unit.observer)
        unit.report_to(context.observer)
        unit.context, unit.is_root = context, unit is units[0]
        unit.fqns = [""] if unit.is_root else names[unit]
        unit.fqn = ", ".join(unit.fqns)
        for number, group in enumerate(unit.groups):
            keep_attributes(group, ("watcher",), undo)
            group.watcher = weakref.ref(unit)
            undo.callback(group.rename, group.name)
            group.rename(f"{unit.fqn or unit.class_name}/{number}")
    _note_empty_ranks([group for unit in units for group in unit.groups if group.grads], undo)
    context.set_units(units)


def _share_pool(allocator: Allocator, unit: Unit, undo: ExitStack) -> None:
    """Have a unit's temporary buffers in the root's pool, if it has one."""
    other = unit.context.allocator
    if not isinstance(allocator, TracePoolAllocator):
        return
    if isinstance(other, TracePoolAllocator):
        allocator.merge(other, undo)
        return
    assert isinstance(other, PlainAllocator)
    keep_attributes(other, ("successor",), undo)
    other.successor = allocator
    for group in unit.groups:
        for holder in (group.weights, group.grads):
            if holder is not None:
                _adopt(allocator, holder, undo)


def _adopt(pool: TracePoolAllocator, holder: GroupWeights | GroupGrads, undo: ExitStack) -> None:
    before: dict[TemporaryBuffer, TemporaryBuffer] = {}
    undo.callback(holder.replace_buffers, lambda buffer: before.get(buffer, buffer))

    def adopt(buffer: TemporaryBuffer) -> TemporaryBuffer:
        adopted = pool.adopt(buffer)
        before[adopted] = buffer
        return adopted

    holder.replace_buffers(adopt)


def _note_empty_ranks(trained: Sequence[ParameterGroup], undo: ExitStack) -> None:
    """Tell gradients which ranks hold none of the model: those take no part in a common norm."""
    by_mesh: dict[DeviceMesh, list[ParameterGroup]] = {}
    for group in trained:
        by_mesh.setdefault(group.mesh, []).append(group)
    for groups in by_mesh.values():
        empty = frozenset.intersection(*(frozenset(group.empty_ranks) for group in groups))
        for group in groups:
            keep_attributes(group.holders, ("empty",), undo)
            group.holders.empty = empty
