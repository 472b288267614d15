"""The public entry: shard a module's own parameters and make it a unit."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.comm.backends import communicator_for
from megatron_fsdp_v2.comm.gather_groups import check_gather_group
from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.comm.rank_checks import CheckRanks
from megatron_fsdp_v2.dtensor.tp_params import tensor_shard_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.layout.buffer_layout import Granularity
from megatron_fsdp_v2.layout.flat_buffers import flat_buffers
from megatron_fsdp_v2.layout.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp_v2.layout.placement import resolve_placements
from megatron_fsdp_v2.memory.allocator import PlainAllocator
from megatron_fsdp_v2.memory.trace_pool import TracePoolAllocator
from megatron_fsdp_v2.params.buffer import ShardGrid
from megatron_fsdp_v2.params.group import GroupSpec, ParameterGroup
from megatron_fsdp_v2.params.parameter_hooks import tensor_hook_rejection
from megatron_fsdp_v2.params.registration import OwnedParameter, find_owner_slot
from megatron_fsdp_v2.runtime.context import Context, check_at_least_one
from megatron_fsdp_v2.runtime.fsdp2_arguments import (
    check_mesh_dims,
    check_offload_policy,
    check_shard_placement,
    default_mesh,
    reshards_after_forward,
)
from megatron_fsdp_v2.runtime.fsdp_module import FSDPModule, named_units, swap_class, unit_of
from megatron_fsdp_v2.runtime.hooks import install_hooks, watch_optimizers
from megatron_fsdp_v2.runtime.materialize import materialize
from megatron_fsdp_v2.runtime.other_wrappers import check_modules_inside
from megatron_fsdp_v2.runtime.unit import Unit
from megatron_fsdp_v2.runtime.unit_checks import buffer_of, parameter_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

    from torch.distributed.fsdp import MixedPrecisionPolicy as TheirPolicy
    from torch.distributed.fsdp import OffloadPolicy

    from megatron_fsdp_v2.dtensor.row_shards import TensorShard
    from megatron_fsdp_v2.memory.allocator import Allocator

__all__ = ["fully_shard"]


def fully_shard[ModuleT: nn.Module | Sequence[nn.Module]](
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    sharding_strategy: str = "optim_grads_params",
    outer_dp_sharding_strategy: str = "no_shard",
    mp_policy: MixedPrecisionPolicy | TheirPolicy | None = None,
    reshard_after_forward: bool | int | None = True,
    ignored_params: AbstractSet[nn.Parameter] | None = None,
    shard_granularity: str = "row",
    gradient_scaling_factor: float | None = None,
    on_missing_grad: str = "zero",
    enable_unshard_prefetch: bool = True,
    enable_async_reduce_grad: bool = True,
    unshard_prefetch_depth: int = 1,
    max_live_grad_buffers: int = 2,
    enable_trace_pool: bool = False,
    check_ranks: str = "once",
    tensor_shards: Mapping[nn.Parameter, TensorShard] | None = None,
    separate_params: AbstractSet[nn.Parameter] | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    offload_policy: OffloadPolicy | None = None,
    dp_mesh_dims: object = None,
    gather_group: dist.ProcessGroup | None = None,
) -> ModuleT:
    """Shard the parameters a module owns over a data-parallel mesh, in place.

    Call it bottom-up: on each unit that should be gathered on its own, then on the root. A unit
    owns the parameters below it that no unit inside it owns. Its parameters become DTensors with
    their names and global shapes; build the optimizer from `module.parameters()` afterwards.
    A parameter tied to one of another unit stays tied: it belongs to the unit wrapped first and is
    gathered for both. Parameters on the meta device are given values by `reset_parameters()` of
    their modules, the same on every rank; that is a collective, nothing else here is. Where a
    module has none, they have memory and no values, until a state dict is loaded.

    Gradients are `gradient_scaling_factor` times the sum over data-parallel ranks.

    Args:
        module: The unit; its class becomes a subclass of both its own and `FSDPModule`. Or
            several modules that are one unit: gathered before the forward of the first of them
            that runs, until the last one has run.
        mesh: 1-D (dp) or 2-D (outer dp, inner dp) device mesh that this rank is part of. Default:
            one axis over all ranks, on the accelerator if there is one.
        sharding_strategy: `no_shard` (DDP), `optim` (ZeRO-1), `optim_grads` (ZeRO-2) or
            `optim_grads_params` (ZeRO-3), along the inner axis.
        outer_dp_sharding_strategy: `no_shard` (HSDP) or `optim` (HFSDP), along the outer axis of
            a 2-D mesh.
        mp_policy: Dtypes of weights, gradients, inputs and outputs; default: as they are. The
            policy of torch's FSDP2 does as well, and means what it does there.
        reshard_after_forward: Drop gathered weights between forward and backward. The root keeps
            its own, since its backward follows at once. None is True; 1 is False and the number
            of ranks of the (inner) axis True, as with FSDP2.
        ignored_params: Parameters to leave alone.
        shard_granularity: What a shard boundary never cuts: `row`, `block:<rows>` or `tensor`.
        gradient_scaling_factor: Factor of the gradient sum; default `1 / dp_world_size`.
        on_missing_grad: `zero` or `error`: what a parameter without gradient means while others
            of its group have one.
        enable_unshard_prefetch: Gather the next unit while this one computes.
        enable_async_reduce_grad: Reduce gradients while the next unit computes.
        unshard_prefetch_depth: Units gathered ahead of the one at work, at least 1. Each costs the
            gathered weights of one more unit; more than one helps where a gather takes longer
            than a unit computes. What the root says holds for all its units.
        max_live_grad_buffers: Units that have full gradient buffers at a time, at least 1. With 1
            every reduction is waited for before the next unit has a gradient; each further one
            costs one more buffer. What the root says holds for all its units.
        enable_trace_pool: Put temporary buffers at planned addresses of one block of memory
            (`TracePoolAllocator`) instead of allocating them. The same for all units of a root.
        check_ranks: `once`: at the first use, ranks compare what they sharded and see that
            replicated weights start equal (a few integers over the mesh). `always`: before every
            gather and reduction as well, which turns a hang into an error that names the unit.
            `never`: trust. What the root says holds for all its units.
        tensor_shards: How tensor parallelism cut parameters, for those it did: they become
            DTensors over its axis as well, of the whole weight's shape. Looked up once they
            have values, by what was given, also where that was on the meta device. DTensors over a
            tensor-parallel mesh say it themselves; `tensor_parallel.tensor_shards` makes it for
            modules of plain tensors.
        separate_params: Parameters that get flat buffers of their own, so that how one is cut
            depends on its shape alone: what pipeline stages hold copies of, each stage beside
            other parameters, has to be cut alike.
        param_init_fn: Gives values to a module's own parameters and buffers that were on the meta
            device, in place of its `reset_parameters()`.
        shard_placement_fn: As with FSDP2, where it returns None or `Shard(0)`.
        offload_policy: As with FSDP2, where it offloads nothing: `OffloadPolicy()`.
        dp_mesh_dims: None; `mesh` has the data-parallel axes and no others.
        gather_group: A process group of the same ranks as the (inner) axis of the mesh, in the same
            order, that weights are gathered in. With NCCL, gathers and reductions then go side by
            side instead of one after the other. None: in that axis's own group.

    Returns:
        What was given as `module`.

    Raises:
        ValueError: An argument is bad, the module is sharded already, or a parameter of it is.
    """
    policy = MixedPrecisionPolicy.of(mp_policy)
    check_offload_policy(offload_policy)
    check_mesh_dims(dp_mesh_dims)
    mesh = default_mesh() if mesh is None else mesh
    modules = _outermost(module)
    _validate(modules, mesh, on_missing_grad, enable_trace_pool)
    check_gather_group(gather_group, mesh)
    reshards = reshards_after_forward(reshard_after_forward, mesh)
    _check_same_pool(modules, enable_trace_pool)
    check_at_least_one("unshard_prefetch_depth", unshard_prefetch_depth)
    check_at_least_one("max_live_grad_buffers", max_live_grad_buffers)
    checks = CheckRanks.parse(check_ranks)
    sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
    placements = resolve_placements(sharding_strategy, outer_dp_sharding_strategy, sizes)
    granularity = Granularity.parse(shard_granularity)
    scale = 1.0 / mesh.size() if gradient_scaling_factor is None else gradient_scaling_factor
    device = _device_of(mesh)

    def spec_of(param: nn.Parameter) -> GroupSpec:
        return GroupSpec(
            dtypes=policy.resolve(param.dtype),
            requires_grad=param.requires_grad,
            placements=placements,
            granularity=granularity,
            scale=scale,
            errors_on_missing_grad=on_missing_grad == "error",
            reduces=getattr(param, "requires_gradient_reduction", True),
        )

    owned, tied = _owned_parameters(modules, ignored_params or frozenset(), device)
    check_shard_placement(shard_placement_fn, owned)
    # Not `or`: a mapping that looks things up may take long to tell whether it is empty.
    shards = {} if tensor_shards is None else tensor_shards
    for parameter in owned:
        parameter.is_separate = parameter.param in (separate_params or frozenset())
        if not parameter.param.is_meta or isinstance(parameter.param, DTensor):
            _describe_tensor_shard(parameter, mesh, shards)
    tied_groups = _borrow(tied, spec_of, mesh)
    _check_is_idle(modules)
    axes = _axes_of(mesh, gather_group)
    unset = materialize(owned, list(_own_modules(modules)), device, axes, param_init_fn)
    for parameter in owned:
        # Modules may say how theirs are cut when they initialize them.
        if parameter.stood_in is not None and parameter.dtensor is None:
            _describe_tensor_shard(parameter, mesh, shards)
    context: Context[Unit] = Context(
        communicator_for(device),
        TracePoolAllocator() if enable_trace_pool else PlainAllocator(),
        unshard_prefetch_depth=unshard_prefetch_depth if enable_unshard_prefetch else 0,
        enable_async_reduce_grad=enable_async_reduce_grad,
        max_live_grad_buffers=max_live_grad_buffers,
        check_ranks=checks,
    )
    name = ", ".join(type(part).__name__ for part in modules)
    groups = _make_groups(name, owned, spec_of, mesh, axes, device, context)
    for parameter, group, index in tied:
        for below, attribute in parameter.sites:
            group.registrations.add(index, below, attribute)
        group.registrations.install(group.sharded_params)
    unit = Unit(modules, groups, tied_groups, context, policy, reshard_after_forward=reshards)
    unit.unset = _without_values(groups, *unset)
    for part in modules:
        swap_class(part)
        part._fsdp_unit = unit  # type: ignore[assignment]
        install_hooks(part)
    _join(modules, context)
    watch_optimizers(context)
    return module


def _make_groups(
    name: str,
    owned: Sequence[OwnedParameter],
    spec_of: Callable[[nn.Parameter], GroupSpec],
    mesh: DeviceMesh,
    axes: Sequence[Axis],
    device: torch.device,
    context: Context[Unit],
) -> list[ParameterGroup]:
    """The parameter groups of a unit: those that are alike, in flat buffers of little padding."""
    if not owned:
        return []
    # Placements and granularity are those of the whole unit.
    unit = spec_of(owned[0].param)
    buffers = flat_buffers(
        owned,
        lambda parameter: (spec_of(parameter.param), parameter.is_separate and parameter.name),
        lambda parameter: parameter.shape,
        lambda key: key[0].dtypes.smallest_itemsize,
        ShardGrid.of(axes, [p.main_weight for p in unit.placements]).num_slices,
        unit.granularity,
    )
    return [
        ParameterGroup(
            f"{name}/{number}",
            members,
            spec,
            layout,
            mesh,
            axes,
            device,
            context.communicator,
            context.allocator,
        )
        for number, ((spec, _), members, layout) in enumerate(buffers)
    ]


def _without_values(
    groups: Sequence[ParameterGroup],
    params: AbstractSet[str],
    buffers: Sequence[tuple[str, nn.Module, str]],
) -> list[tuple[str, Callable[[], torch.Tensor | None]]]:
    """What has no values yet: names, and how to look each one up."""
    found = [(name, buffer_of(module, attribute)) for name, module, attribute in buffers]
    for group in groups:
        for index, name in enumerate(group.names):
            if name in params:
                found.append((name, parameter_of(group, index)))
    return found


def _join(roots: Sequence[nn.Module], context: Context[Unit]) -> None:
    """Have all units below a new root share its context, and know their names under it."""
    names: dict[Unit, list[str]] = {}
    for prefix, root in _numbered(roots):
        for name, module in root.named_modules(prefix=prefix):
            if isinstance(module, FSDPModule):
                names.setdefault(unit_of(module), []).append(name)
    units = list(names)
    for unit in units:
        _share_pool(context.allocator, unit.context.allocator)
        unit.context, unit.is_root = context, unit is units[0]
        unit.fqns = [""] if unit.is_root else names[unit]
        unit.fqn = ", ".join(unit.fqns)
        for number, group in enumerate(unit.groups):
            group.watcher = weakref.ref(unit)
            group.rename(f"{unit.fqn or unit.class_name}/{number}")
    _note_empty_ranks([group for unit in units for group in unit.groups if group.grads])
    spread = any(axis.size > 1 for u in units for group in u.groups for axis in group.axes)
    may_differ = all(unit.skips_safely for unit in units)
    context.set_units(units, spread=spread, may_differ=may_differ)


def _numbered(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """What comes before names in each of several modules: its number; nothing where it is one."""
    return [("" if len(modules) == 1 else str(i), module) for i, module in enumerate(modules)]


def _share_pool(allocator: Allocator, other: Allocator) -> None:
    if isinstance(allocator, TracePoolAllocator) and isinstance(other, TracePoolAllocator):
        allocator.merge(other)


def _note_empty_ranks(trained: Sequence[ParameterGroup]) -> None:
    """Tell gradients which ranks hold none of the model: those take no part in a common norm."""
    by_mesh: dict[DeviceMesh, list[ParameterGroup]] = {}
    for group in trained:
        by_mesh.setdefault(group.mesh, []).append(group)
    for groups in by_mesh.values():
        empty = frozenset.intersection(*(frozenset(group.empty_ranks) for group in groups))
        for group in groups:
            group.holders.empty = empty


def _outermost(given: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules to shard, each once, without those that are inside another one of them."""
    modules: list[nn.Module] = []
    for module in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(module, nn.Module):
            raise ValueError(f"fully_shard needs an nn.Module, got {type(module).__name__}")
        modules.append(module)
    if not modules:
        raise ValueError("fully_shard needs an nn.Module or some of them, got an empty list")
    inside = {id(m) for module in modules for m in module.modules() if m is not module}
    return [m for m in dict.fromkeys(modules) if id(m) not in inside]


def _validate(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    on_missing_grad: str,
    enable_trace_pool: bool,
) -> None:
    for module in modules:
        # What torch.compile() made of a module holds it under this name.
        if any(isinstance(m, FSDPModule) for m in (module, getattr(module, "_orig_mod", None))):
            raise ValueError(f"fully_shard was already called on this {type(module).__name__}")
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and not _has_forward(module):
            raise ValueError(
                f"{type(module).__name__} has no forward to gather for; call fully_shard on its "
                "members"
            )
    check_modules_inside(modules, FSDPModule)
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if on_missing_grad not in ("zero", "error"):
        raise ValueError(f"on_missing_grad must be 'zero' or 'error', got {on_missing_grad!r}")
    if not isinstance(enable_trace_pool, bool):
        raise ValueError(f"enable_trace_pool must be True or False, got {enable_trace_pool!r}")


def _check_same_pool(modules: Sequence[nn.Module], enable_trace_pool: bool) -> None:
    for _, unit in itertools.chain.from_iterable(map(named_units, modules)):
        if isinstance(unit.context.allocator, TracePoolAllocator) is not enable_trace_pool:
            raise ValueError(
                f"enable_trace_pool={enable_trace_pool} here and {not enable_trace_pool} for unit "
                f"{unit.name} inside; units of one root share their temporary memory, so use the "
                "same for all"
            )


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward not in (nn.ModuleList.forward, nn.ModuleDict.forward)


def _axes_of(mesh: DeviceMesh, gather_group: dist.ProcessGroup | None) -> list[Axis]:
    groups = [*[None] * (mesh.ndim - 1), gather_group]
    return [
        Axis(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis), group)
        for axis, group in enumerate(groups)
    ]


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("mesh is of device type 'cuda', and there is no CUDA device here")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _check_is_idle(modules: Sequence[nn.Module]) -> None:
    for _, unit in itertools.chain.from_iterable(map(named_units, modules)):
        if unit.is_unsharded or len(unit.context.reductions):
            raise RuntimeError(
                f"unit {unit.name} is gathered or has a reduction under way; call reshard() on "
                "it, or wrap its parent before the first step"
            )


def _own_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules and everything below them up to the next unit, with names."""
    for prefix, module in _numbered(modules):
        yield from _modules_below(prefix, module)


def _modules_below(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield prefix, module
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _modules_below(f"{prefix}.{name}" if prefix else name, child)


type _Tied = tuple[OwnedParameter, ParameterGroup, int]


def _owned_parameters(
    modules: Sequence[nn.Module], ignored: AbstractSet[nn.Parameter], device: torch.device
) -> tuple[list[OwnedParameter], list[_Tied]]:
    """The parameters below some modules that no unit inside has, each once, with all its places.

    Returns:
        Those it owns, and those tied to one that another unit has sharded, with where.
    """
    ignored_ids = {id(param) for param in ignored}
    found: dict[int, OwnedParameter] = {}
    for prefix, below in _own_modules(modules):
        for attribute, param in below._parameters.items():
            if param is None or id(param) in ignored_ids:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            if id(param) not in found:
                found[id(param)] = OwnedParameter(name, param)
            found[id(param)].sites.append((below, attribute))
    owned, tied = [], []
    for parameter in found.values():
        slot = find_owner_slot(parameter.param)
        shared = _owner_of(parameter.param, modules)
        if slot is not None:
            tied.append((parameter, slot[0], slot[1].index))
        elif shared is not None:
            tied.append((parameter, *shared))
        else:
            _check_parameter(parameter.name, parameter.param, device)
            owned.append(parameter)
    return owned, tied


def _owner_of(
    param: nn.Parameter, modules: Sequence[nn.Module]
) -> tuple[ParameterGroup, int] | None:
    """Who sharded a parameter that modules share with a unit beside them, and its index there.

    None for one that is not sharded, or by a unit that contains a module: that is a mistake.
    """
    if not isinstance(param, UnevenDTensor):
        return None
    group = param.row_shards.holders.group()
    unit = None if group is None else group.watcher()
    owners = [owner for ref in (() if unit is None else unit.modules) if (owner := ref())]
    below = {id(part) for owner in owners for part in owner.modules()}
    if not owners or any(id(module) in below for module in modules):
        return None
    return group, next(i for i, known in enumerate(group.sharded_params) if known is param)


def _check_parameter(name: str, param: nn.Parameter, device: torch.device) -> None:
    if isinstance(param, UnevenDTensor):
        raise ValueError(
            f"parameter {name} is sharded already, by a unit that contains it; wrap inner units "
            "before outer ones"
        )
    if param.numel() == 0 and param.shape[:1] != (0,):
        raise ValueError(
            f"parameter {name} of shape {tuple(param.shape)} has rows without elements, which "
            "cannot be sharded; leave it out with ignored_params, or make it of shape (0,)"
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
    refusal = tensor_hook_rejection(f"parameter {name}", param)
    if refusal:
        raise ValueError(refusal)
    if not param.is_leaf:
        raise ValueError(
            f"parameter {name} is not a leaf tensor: it was computed from others, and its gradient "
            "would go there; register an nn.Parameter"
        )
    if not param.is_meta and param.device.type not in ("cpu", device.type):
        raise ValueError(
            f"parameter {name} is on {param.device}, the mesh on {device.type!r}; move the module "
            "or make the mesh of the module's device type"
        )


def _describe_tensor_shard(
    parameter: OwnedParameter, mesh: DeviceMesh, shards: Mapping[nn.Parameter, TensorShard]
) -> None:
    """Note how tensor parallelism cut a parameter: as a DTensor says it, or the caller."""
    given = parameter.param if parameter.stood_in is None else parameter.stood_in
    tensor = parameter.tensor = shards.get(given)
    if isinstance(parameter.param, DTensor):
        if tensor is not None:
            raise ValueError(
                f"parameter {parameter.name} is a DTensor, which says how it is cut; leave it out "
                "of tensor_shards"
            )
        parameter.tensor, parameter.dtensor = tensor_shard_of(parameter.name, parameter.param, mesh)
    elif tensor is not None:
        _check_tensor_shard(parameter, tensor, mesh)


def _check_tensor_shard(parameter: OwnedParameter, tensor: TensorShard, mesh: DeviceMesh) -> None:
    leading = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    if tensor.mesh is not None and (
        tensor.mesh.ndim != mesh.ndim + 1
        or leading
        != [dist.get_process_group_ranks(tensor.mesh.get_group(a)) for a in range(mesh.ndim)]
    ):
        raise ValueError(
            f"the mesh of the tensor shard of parameter {parameter.name} must have the axes of "
            f"the data-parallel mesh and one more, got {tensor.mesh}"
        )
    shape = tuple(parameter.param.shape)
    if tensor.dim is not None and not 0 <= tensor.dim < len(shape):
        raise ValueError(
            f"parameter {parameter.name} of shape {shape} has no dimension {tensor.dim} to be cut"
        )
    if tensor.pieces and sum(tensor.pieces) != shape[tensor.dim or 0]:
        raise ValueError(
            f"the pieces {tensor.pieces} of parameter {parameter.name} must add up to the "
            f"{shape[tensor.dim or 0]} rows or columns of this rank's part"
        )


def _borrow(
    tied: Sequence[_Tied], spec_of: Callable[[nn.Parameter], GroupSpec], mesh: DeviceMesh
) -> list[ParameterGroup]:
    """The groups of other units that hold parameters tied to some here."""
    tied_groups: list[ParameterGroup] = []
    for parameter, group, index in tied:
        where = f"parameter {parameter.name} is tied to {group.names[index]} of {group.name}"
        spec = spec_of(parameter.param)
        if isinstance(parameter.param, UnevenDTensor):
            # Sharded already, it has the dtype of its main weights.
            spec = dataclasses.replace(spec, dtypes=group.spec.dtypes)
        if group.mesh != mesh or group.spec != spec:
            raise ValueError(
                f"{where}, which was sharded with another mesh, strategy, granularity, scaling or "
                "precision; use the same for both"
            )
        if group.is_held:
            raise RuntimeError(f"{where}, which is gathered; call reshard() on its module first")
        if group not in tied_groups:
            tied_groups.append(group)
    return tied_groups
