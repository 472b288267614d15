"""Construction of a unit: check parameters, build buffers, then install them on the modules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.comm.rank_checks import Entry, compare_sharding, reporting_errors
from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from megatron_fsdp_v2.dtensor.sharded_rows import plain_of
from megatron_fsdp_v2.dtensor.tp_params import tensor_shard_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.layout.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp_v2.layout.split import flat_buffers, is_balanced
from megatron_fsdp_v2.memory.allocator import set_data
from megatron_fsdp_v2.memory.trace_pool import TracePoolAllocator
from megatron_fsdp_v2.params.buffer import GroupSpec
from megatron_fsdp_v2.params.extensions import (
    AllGatherExtensionFormat,
    extension_problem,
    probe,
)
from megatron_fsdp_v2.params.formats import DenseFormat, WeightFormat, format_of
from megatron_fsdp_v2.params.group import ParameterGroup, find_sharded
from megatron_fsdp_v2.params.parameters import (
    OwnedParameter,
    find_owner_slot,
    tensor_hook_rejection,
)
from megatron_fsdp_v2.runtime.context import Context
from megatron_fsdp_v2.runtime.fsdp2 import sharded_class, swap_class
from megatron_fsdp_v2.runtime.hooks import install_hooks, install_state_dict_hooks
from megatron_fsdp_v2.runtime.materialize import materialize
from megatron_fsdp_v2.runtime.meshes import DataMesh
from megatron_fsdp_v2.runtime.module import ShardedModule, named_units, unit_of
from megatron_fsdp_v2.runtime.optimizer_steps import OPTIMIZER_WATCH
from megatron_fsdp_v2.runtime.options import RuntimeOptions, UnitOptions
from megatron_fsdp_v2.runtime.unit import Sharding, Unit, class_names, unit_owning
from megatron_fsdp_v2.runtime.unit_checks import note_ignored

type TiedParameter = tuple[OwnedParameter, ParameterGroup, int]


# -- modules ----------------------------------------------------------------------------------


def outermost(given: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules to shard, without duplicates and without modules inside another one."""
    modules: list[nn.Module] = []
    for module in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(module, nn.Module):
            raise ValueError(f"fully_shard needs an nn.Module, got {type(module).__name__}")
        modules.append(module)
    if not modules:
        raise ValueError("fully_shard needs an nn.Module or some of them, got an empty list")
    inside = {id(m) for module in modules for m in module.modules() if m is not module}
    return [m for m in dict.fromkeys(modules) if id(m) not in inside]


def check_modules(modules: Sequence[nn.Module]) -> None:
    """Check that modules have a forward and that no other wrapper reduces their gradients.

    Raises:
        ValueError: A module cannot be sharded.
    """
    for module in modules:
        # The result of torch.compile() holds the module under this name.
        if any(isinstance(m, ShardedModule) for m in (module, getattr(module, "_orig_mod", None))):
            raise ValueError(f"fully_shard was already called on this {type(module).__name__}")
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_list and type(module).forward in (nn.ModuleList.forward, nn.ModuleDict.forward):
            raise ValueError(
                f"{type(module).__name__} has no forward to gather for; call fully_shard on its "
                "members"
            )
        for name, below in module.named_modules():
            theirs = isinstance(below, fsdp.FSDPModule) and not isinstance(below, ShardedModule)
            wrappers = (DataParallel, DistributedDataParallel, fsdp.FullyShardedDataParallel)
            if not theirs and not isinstance(below, wrappers):
                continue
            what = "torch.distributed.fsdp.fully_shard" if theirs else type(below).__name__
            unwrapped = "call this fully_shard instead" if theirs else "give the module inside it"
            raise ValueError(
                f"{name or 'the module'} ({type(below).__name__}) reduces its gradients through "
                f"{what} already, and only one wrapper can shard or replicate parameters; "
                f"{unwrapped}"
            )


def with_number_prefixes(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return each module with the prefix of its names: its position, or "" for a single module."""
    return [("" if len(modules) == 1 else str(i), module) for i, module in enumerate(modules)]


def own_modules(named: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules and their descendants outside other units, with names, parents first."""
    for prefix, module in named:
        yield prefix, module
        for name, child in module.named_children():
            if not isinstance(child, ShardedModule):
                yield from own_modules([(f"{prefix}.{name}" if prefix else name, child)])


# -- parameters -------------------------------------------------------------------------------


def owned_parameters(
    modules: Sequence[nn.Module], ignored: AbstractSet[nn.Parameter], device: torch.device
) -> tuple[list[OwnedParameter], list[TiedParameter]]:
    """Return the parameters of a unit's modules, each with all modules that register it.

    Parameters of units inside are left out.

    Returns:
        The parameters the unit owns; and the parameters tied to one that another unit owns, each
        with its group and its index there.

    Raises:
        ValueError: A parameter cannot be sharded.
    """
    ignored_ids = {id(param) for param in ignored}
    found: dict[int, OwnedParameter] = {}
    for prefix, below in own_modules(with_number_prefixes(modules)):
        for attribute, param in below._parameters.items():
            if param is None or id(param) in ignored_ids:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            known = found.setdefault(id(param), OwnedParameter(name, param))
            known.sites.append((below, attribute))
    owned, tied = [], []
    for parameter in found.values():
        slot = find_owner_slot(parameter.param)
        shared = _owner_of(parameter.param, modules)
        if slot is not None:
            tied.append((parameter, cast("ParameterGroup", slot.info.owner()), slot.index))
        elif shared is not None:
            tied.append((parameter, *shared))
        else:
            _check_parameter(parameter.name, parameter.param, device)
            owned.append(parameter)
    return owned, tied


def used_parameters(
    modules: Sequence[nn.Module], used: AbstractSet[nn.Parameter]
) -> list[TiedParameter]:
    """Return the parameters of other units that forwards of these modules read, as tied ones.

    Raises:
        ValueError: A parameter is not sharded, or belongs to a unit that contains a module.
    """
    tied: list[TiedParameter] = []
    for param in used:
        owner = _owner_of(param, modules)
        if owner is None:
            raise ValueError(
                f"used_params has a parameter of shape {tuple(param.shape)} that no other unit has "
                "sharded; call fully_shard on its module first, and pass the parameter that the "
                "module has afterwards"
            )
        group, index = owner
        tied.append((OwnedParameter(group.names[index], param), group, index))
    return tied


def _owner_of(
    param: nn.Parameter, modules: Sequence[nn.Module]
) -> tuple[ParameterGroup, int] | None:
    """Return the group of a parameter that another unit owns, and its index there.

    None if the parameter is not sharded, or if its unit contains one of the modules (an error).
    """
    found = find_sharded(param)
    unit = None if found is None else unit_owning(found[0])
    owners = [owner for ref in (() if unit is None else unit.modules) if (owner := ref())]
    below = {id(part) for owner in owners for part in owner.modules()}
    return found if owners and all(id(module) not in below for module in modules) else None


def _check_parameter(name: str, param: nn.Parameter, device: torch.device) -> None:
    if isinstance(param, UnevenDTensor):
        raise ValueError(
            f"parameter {name} is sharded already, by a unit that contains it; wrap inner units "
            "before outer ones"
        )
    local = plain_of(param)
    known = format_of(param)
    if known is None and hasattr(local, "fsdp_pre_all_gather"):
        raise ValueError(
            f"parameter {name} is a {type(local).__name__}, which no registered weight format "
            f"supports, and its fsdp_pre_all_gather cannot be called: {extension_problem(param)}. "
            "Make it a plain tensor, or exclude it with ignored_params"
        )
    if known is None or (known is DenseFormat and not _has_memory(local)):
        raise ValueError(
            f"parameter {name} is a {type(local).__name__}, which is made of other tensors, and no "
            "registered weight format supports it. Make it a plain tensor and set its compute "
            "dtype with mp_policy, or exclude it with ignored_params"
        )
    if param.dim() == 0:
        raise ValueError(
            f"parameter {name} is 0-dim and has no rows to shard; make it of shape (1,)"
        )
    if param.requires_grad and (param.is_complex() or param.dtype.itemsize == 1):
        kind = "complex" if param.is_complex() else "of 8 bits"
        raise ValueError(
            f"parameter {name} is {kind} ({param.dtype}) and trained, which cannot be reduced over "
            "ranks and stepped; train a real one and convert it in the forward (torch.view_as_"
            "complex for complex numbers), freeze it, or leave it out with ignored_params"
        )
    rejection = tensor_hook_rejection(f"parameter {name}", param)
    if rejection:
        raise ValueError(rejection)
    if not param.is_leaf:
        raise ValueError(
            f"parameter {name} is not a leaf tensor: it was computed from other tensors, which "
            "would receive its gradient; register an nn.Parameter"
        )
    if not param.is_meta and param.device.type not in ("cpu", device.type):
        raise ValueError(
            f"parameter {name} is on {param.device}, the mesh on {device.type!r}; move the module "
            "or make the mesh of the module's device type"
        )


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory, unlike a wrapper around other tensors."""
    # Torch's own classes without memory, such as fake tensors, are accepted.
    is_torchs = type(tensor).__module__.partition(".")[0] == "torch"
    if is_torchs or tensor.is_meta or not tensor.numel():
        return True
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:
        # Torch raises for a tensor without storage.
        return False


def _describe_tensor_shard(
    parameter: OwnedParameter, spec: GroupSpec, shards: Mapping[nn.Parameter, TensorShard]
) -> None:
    """Set a parameter's tensor-parallel split from its DTensor placement or from `shards`."""
    mesh = (parameter.spec or spec).mesh
    given = parameter.param if parameter.meta_original is None else parameter.meta_original
    tensor = parameter.tensor = shards.get(given)
    if isinstance(parameter.param, DTensor):
        if tensor is not None:
            raise ValueError(
                f"parameter {parameter.name} is a DTensor, whose placement defines its split; "
                "leave it out of tensor_shards"
            )
        parameter.tensor, parameter.dtensor = tensor_shard_of(
            parameter.name, parameter.param, mesh, parameter.data_axes
        )
        return
    if tensor is None:
        return
    if tensor.mesh is not None and (
        tensor.mesh.ndim != mesh.ndim + 1
        or _ranks_along(tensor.mesh, mesh.ndim) != _ranks_along(mesh, mesh.ndim)
    ):
        raise ValueError(
            f"the mesh of the tensor shard of parameter {parameter.name} must have the axes of "
            f"the data-parallel mesh and one more, got {tensor.mesh}"
        )
    shape = tuple(parameter.param.shape)
    if tensor.dim is not None and not 0 <= tensor.dim < len(shape):
        raise ValueError(
            f"parameter {parameter.name} of shape {shape} has no dimension {tensor.dim} to split"
        )
    if tensor.pieces and sum(tensor.pieces) != shape[tensor.dim or 0]:
        raise ValueError(
            f"the pieces {tensor.pieces} of parameter {parameter.name} must add up to the "
            f"{shape[tensor.dim or 0]} rows or columns of this rank's part"
        )


def _ranks_along(mesh: DeviceMesh, num_axes: int) -> list[list[int]]:
    return [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in range(num_axes)]


# -- the unit ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """Validated arguments of a `fully_shard` call, before any object is changed.

    Attributes:
        modules: Modules of the unit, without duplicates.
        root_options: Root options passed to this unit.
        options: Options of the root, merged from all units.
        policy: Dtypes of weights, gradients, inputs and outputs.
        spec: Properties of the unit's groups, unless a parameter has others; see `spec_of`.
        spec_on: Returns the properties of the unit's groups on any mesh.
        reshard_after_forward: Whether to reshard between forward and backward.
        device: Device of the buffers.
        owned: Parameters that the unit owns.
        tied: Parameters of its modules that other units own.
        selects_meshes: Whether parameters may have other meshes than the unit.
        unit_options: Rarely used options of the unit.
        compared_axes: Axes of the unit's mesh along which ranks compare the unit; empty: no check.
    """

    modules: Sequence[nn.Module]
    root_options: Mapping[str, Any]
    options: RuntimeOptions
    policy: MixedPrecisionPolicy
    spec: GroupSpec
    spec_on: Callable[[DataMesh], GroupSpec]
    reshard_after_forward: bool
    device: torch.device
    owned: Sequence[OwnedParameter]
    tied: Sequence[TiedParameter]
    selects_meshes: bool
    unit_options: UnitOptions
    compared_axes: Sequence[Axis]

    def spec_of(self, parameter: OwnedParameter) -> GroupSpec:
        """Return the properties of the group that a parameter belongs to."""
        param = parameter.param
        given = param if parameter.meta_original is None else parameter.meta_original
        grad_dtype = None if given.grad_dtype == given.dtype else given.grad_dtype
        return dataclasses.replace(
            parameter.spec or self.spec,
            dtypes=self.policy.resolve(param.dtype, grad_dtype),
            requires_grad=param.requires_grad,
            reduces=getattr(param, "requires_gradient_reduction", True),
        )


def _format_type(parameter: OwnedParameter) -> type[WeightFormat]:
    """Return the format of the group that a parameter belongs to."""
    if parameter.format_type is not None:
        return parameter.format_type
    param = parameter.param
    format_type = DenseFormat if isinstance(param, UnevenDTensor) else format_of(param)
    assert format_type is not None
    return format_type


def make_unit(plan: UnitPlan) -> None:
    """Build the unit, then install it on its modules. An error leaves everything unchanged.

    Whatever may fail comes before the installation: checks, initializations, allocations.

    Raises:
        ValueError: A parameter cannot be sharded as planned.
        RuntimeError: Memory is exhausted, or a tied parameter is gathered.
    """
    modules, owned, given = plan.modules, plan.owned, plan.unit_options
    axes = plan.spec.grid.axes
    with reporting_errors(class_names(modules), plan.compared_axes, plan.device):
        for parameter in owned:
            if not parameter.param.is_meta or isinstance(parameter.param, DTensor):
                _describe_tensor_shard(parameter, plan.spec, given.tensor_shards)
        tied_groups = _tied_groups(plan)
    own = list(own_modules(with_number_prefixes(modules)))
    holders = _compare_ranks(plan, own) if plan.compared_axes else {}
    with ExitStack() as undo:
        for _, part in own:
            for table in (part._parameters, part._buffers):
                undo.callback(_put_back, table, dict(table))
        _move_buffers(own, plan.device, undo)
        unset_names, unset = materialize(
            owned, modules, own, plan.device, axes, holders, given.param_init_fn, undo
        )
        for parameter in owned:
            # An initialization may set the tensor-parallel attributes of its parameters.
            if parameter.meta_original is not None and parameter.dtensor is None:
                _describe_tensor_shard(parameter, plan.spec, given.tensor_shards)
        for parameter in owned:
            if _format_type(parameter) is AllGatherExtensionFormat:
                spec, (module, _) = plan.spec_of(parameter), parameter.sites[0]
                parameter.format_type = probe(
                    parameter.name, parameter.param, spec, module, plan.device
                )
        context: Context[Unit] = Context(plan.device, plan.options)
        allocator = context.allocator
        made = _make_groups(plan, context)
        groups = [group for group, _ in made]
        unit = Unit(
            context,
            modules,
            groups,
            tied_groups,
            plan.policy,
            Sharding(plan.spec, plan.spec_on),
            reshard_after_forward=plan.reshard_after_forward,
            root_options=plan.root_options,
        )
        for group in groups:
            for index, name in enumerate(group.names):
                if name in unset_names:
                    unset.append((name, functools.partial(group.main_weight.view, index)))
        unit.unset = unset
        for part in modules:
            sharded_class(part)  # a class may reject subclasses
        if isinstance(allocator, TracePoolAllocator):
            allocator.check_joins(
                memory
                for part in modules
                for _, inside in named_units(part)
                for group in inside.groups
                for memory in group.temporaries().values()
            )
        undo.pop_all()
    _install(plan, unit, made, [part for _, part in own])


def _put_back(table: dict[str, Any], content: dict[str, Any]) -> None:
    table.clear()
    table.update(content)


def _install(
    plan: UnitPlan,
    unit: Unit,
    made: Sequence[tuple[ParameterGroup, Sequence[OwnedParameter]]],
    own: Sequence[nn.Module],
) -> None:
    """Install a unit on its modules, and make it the root of the units inside."""
    for group, members in made:
        group.parameters.replace_originals(members)
    for parameter, group, index in plan.tied:
        for below, attribute in parameter.sites:
            group.parameters.add_site(index, below, attribute)
    for part in dict.fromkeys(own):
        install_state_dict_hooks(part)
        note_ignored(part)
        if isinstance(part, nn.RNNBase):
            # This assignment bypasses `__setattr__`, which a class may override.
            vars(part)["flatten_parameters"] = _leave_in_place
    for part in plan.modules:
        swap_class(part)
        vars(part)["_fsdp_unit"] = unit
        install_hooks(part)
    _join(plan.modules, unit.context)
    OPTIMIZER_WATCH.add(unit.context)


def _compare_ranks(plan: UnitPlan, own: Sequence[tuple[str, nn.Module]]) -> dict[str, torch.Tensor]:
    """Compare a unit that is about to be made over its ranks. Collective.

    Args:
        plan: Validated arguments.
        own: The unit's own modules with names.

    Returns:
        Of each parameter and buffer that is on the meta device on some ranks only, which ranks of
        its mesh have values.

    Raises:
        RuntimeError: Ranks differ. Raised on every rank; names the first parameter that differs.
    """
    unit = f"unit {class_names(plan.modules)!r}"
    names = ", ".join(parameter.name for parameter in plan.owned)
    entries: list[Entry] = [(unit, f"the parameters {names or '(none)'}")]
    for parameter, group, index in plan.tied:
        entries.append((f"{parameter.name} of {unit}", f"a tie to {group.names[index]}"))
    specs = {parameter.name: plan.spec_of(parameter) for parameter in plan.owned}
    formats = {parameter.name: _format_type(parameter) for parameter in plan.owned}
    for parameter in plan.owned:
        param, spec = parameter.param, specs[parameter.name]
        is_trained = "trained" if param.requires_grad else "frozen"
        kind = formats[parameter.name].__qualname__
        properties = f"shape {parameter.shape}, {param.dtype}, {is_trained}, {kind}, {spec}"
        entries.append((f"{parameter.name} of {unit}", properties))
    tensors: dict[DeviceMesh, dict[str, torch.Tensor]] = {plan.spec.mesh: {}}
    for parameter in plan.owned:
        there = tensors.setdefault(specs[parameter.name].mesh, {})
        there[parameter.name] = parameter.param
    for prefix, module in own:
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                tensors[plan.spec.mesh][f"{prefix}.{attribute}".removeprefix(".")] = buffer
    grids = {spec.mesh: spec.grid for spec in (plan.spec, *specs.values())}
    holders: dict[str, torch.Tensor] = {}
    for mesh, named in tensors.items():
        unset = [name for name, tensor in named.items() if tensor.is_meta]
        axes = grids[mesh].axes
        holders |= compare_sharding(entries, unset, list(named), axes, plan.device)
    for name in holders:
        if formats.get(name, DenseFormat) is not DenseFormat:
            raise RuntimeError(
                f"{name} of {unit} is quantized, and on the meta device on some data-parallel "
                "ranks only; build it on the meta device on all ranks or on none"
            )
    return holders


def _move_buffers(
    named: Iterable[tuple[str, nn.Module]], device: torch.device, undo: ExitStack
) -> None:
    """Move buffers to the device, in place: other objects may refer to the same tensors.

    Those of a plan, on the meta device, keep their values.

    Raises:
        ValueError: A buffer is a DTensor on another device.
    """
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for name, module in named:
        for attribute, buffer in module._buffers.items():
            if buffer is None or buffer.is_meta or device.type in ("meta", buffer.device.type):
                continue
            if isinstance(buffer, DTensor):
                label = f"{name}.{attribute}" if name else attribute
                raise ValueError(
                    f"buffer {label} is a DTensor on {buffer.device}, and the mesh is on "
                    f"{device.type!r}; make it on a mesh of that device type"
                )
            if is_traceable_wrapper_subclass(buffer):
                # Made of other tensors, which cannot be assigned to `data`.
                module._buffers[attribute] = moved.setdefault(buffer, buffer.to(device))
                continue
            undo.callback(set_data, buffer, buffer.data)
            set_data(buffer, buffer.data.to(device))


def _leave_in_place() -> None:
    """Stand in for `flatten_parameters` of an RNN, which moves weights to memory of cuDNN.

    Later gathers would not reach the weights there.
    """


def _tied_groups(plan: UnitPlan) -> list[ParameterGroup]:
    """Return the groups of other units that own parameters tied to the plan's."""
    tied_groups: list[ParameterGroup] = []
    for parameter, group, index in plan.tied:
        where = f"parameter {parameter.name} is tied to {group.names[index]} of {group.name}"
        if plan.selects_meshes:
            # The function knows the parameter as it was before it was sharded.
            theirs = group.spec
            parameter.spec = dataclasses.replace(
                plan.spec, mesh=theirs.mesh, placements=theirs.placements, scale=theirs.scale
            )
        spec = plan.spec_of(parameter)
        if isinstance(parameter.param, UnevenDTensor):
            # A sharded parameter has the dtype of its main weight, not its original dtype.
            spec = dataclasses.replace(spec, dtypes=group.spec.dtypes)
        group.check_tie(where, spec, _format_type(parameter))
        if group.is_held:
            raise RuntimeError(f"{where}, which is gathered; call reshard() on its module first")
        if group not in tied_groups:
            tied_groups.append(group)
    return tied_groups


def _make_groups(
    plan: UnitPlan, context: Context[Unit]
) -> list[tuple[ParameterGroup, list[OwnedParameter]]]:
    """Build the parameter groups of a unit, each with parameters of one spec and little padding."""
    buffers = flat_buffers(
        plan.owned,
        lambda parameter: (
            *(plan.spec_of(parameter), _format_type(parameter)),
            parameter.is_separate and parameter.name,
        ),
        lambda parameter: parameter.shape,
        lambda key: key[1].smallest_itemsize(key[0].dtypes),
        lambda key: key[0].grid.num_slices,
        plan.spec.granularity,
    )
    made = []
    for number, ((spec, format_type, _), members, layout) in enumerate(buffers):
        problem = format_type.problem(spec.dtypes, spec.placements)
        if problem is not None:
            raise ValueError(f"parameter {members[0].name}: {problem}")
        for parameter in members:
            if parameter.has_equal_shares and not is_balanced(layout):
                raise ValueError(
                    f"shard_placement_fn returns a Shard along another dimension than 0 for "
                    f"parameter {parameter.name} of shape {parameter.shape}, whose rows are not "
                    f"split: some of the {layout.num_shards} ranks would hold {layout.shard_numel} "
                    f"elements, where {layout.param_numel // layout.num_shards} would be equal "
                    "shares. Return None to accept that, or shard it over fewer ranks"
                )
        group = ParameterGroup(
            f"{class_names(plan.modules)}/{number}",
            members,
            spec,
            format_type,
            layout,
            plan.device,
            context.communicator,
            context.allocator,
        )
        gather_group = plan.unit_options.gather_group
        if gather_group is not None and spec.mesh == plan.spec.mesh:
            group.set_gather_group(gather_group)
        made.append((group, members))
    return made


def _join(roots: Sequence[nn.Module], context: Context[Unit]) -> None:
    """Make a new root: set the context and the names of all units below it."""
    names: dict[Unit, list[str]] = {}
    for prefix, root in with_number_prefixes(roots):
        for name, module in root.named_modules(prefix=prefix):
            if isinstance(module, ShardedModule):
                names.setdefault(unit_of(module), []).append(name)
    units = list(names)
    pool = context.allocator
    if isinstance(pool, TracePoolAllocator):
        for other in dict.fromkeys(unit.context.allocator for unit in units):
            if isinstance(other, TracePoolAllocator) and other is not pool:
                pool.merge(other)
    for unit in units:
        unit.context = context
        unit.state.fqn = "" if unit is units[0] else ", ".join(names[unit])
    context.set_units(units)
