"""Aborts a model after a failed collective, and puts it on other process groups.

Modules, sharded parameters, hooks and settings stay the same objects. Parameter groups, with their
buffers, and what the units of a root share are made again, so that nothing of the failed step is
left: a new state of the machine, new communicators, a new pool.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from megatron_fsdp_v2.comm.backends import (
    abort_process_groups,
    wait_for_all_streams,
)
from megatron_fsdp_v2.comm.groups import group_of_same_ranks
from megatron_fsdp_v2.comm.interface import AbortedCommunicator, collective_error
from megatron_fsdp_v2.comm.rank_checks import checksum
from megatron_fsdp_v2.dtensor.sharded_rows import (
    ShardedRows,
    local_of,
    plain_of,
    rows_like,
    rows_of,
)
from megatron_fsdp_v2.dtensor.uneven_dtensor import replicated
from megatron_fsdp_v2.layout.placement import Placement
from megatron_fsdp_v2.layout.split import flat_buffers
from megatron_fsdp_v2.memory.trace_pool import TracePoolAllocator
from megatron_fsdp_v2.params.buffer import GroupSpec
from megatron_fsdp_v2.params.extensions import AllGatherExtensionFormat
from megatron_fsdp_v2.params.group import ParameterGroup
from megatron_fsdp_v2.params.parameters import OwnedParameter
from megatron_fsdp_v2.runtime.context import Context
from megatron_fsdp_v2.runtime.machine import reductions, weights
from megatron_fsdp_v2.runtime.materialize import mark_unset
from megatron_fsdp_v2.runtime.meshes import DataMesh
from megatron_fsdp_v2.runtime.optimizer_steps import OPTIMIZER_WATCH
from megatron_fsdp_v2.runtime.unit import Unit

type Meshes = Mapping[DeviceMesh, DeviceMesh]
"""New meshes by the meshes that they replace."""
type Made = Mapping[ParameterGroup, Sequence[tuple[ParameterGroup, Sequence[int]]]]
"""New groups, each with the indices of its parameters in the group that it replaces."""


def abort(contexts: Iterable[Context[Unit]]) -> None:
    """See `ShardedModule.abort`."""
    aborted = [c for c in contexts if not isinstance(c.communicator, AbortedCommunicator)]
    by_device: dict[torch.device, dict[dist.ProcessGroup, None]] = {}
    for context in aborted:
        groups = context.groups()
        axes = [axis for group in groups for axis in group.axes if axis.size > 1]
        used = [each for axis in axes for each in (axis.group, axis.gather_group)]
        by_device.setdefault(groups[0].device, {}).update(dict.fromkeys(filter(None, used)))
    for device, process_groups in by_device.items():
        abort_process_groups(list(process_groups), device)
    for context in aborted:
        reductions.abandon(context.state)
    for device in by_device:
        wait_for_all_streams(device)
    for context in aborted:
        if isinstance(context.allocator, TracePoolAllocator):
            context.allocator.release()
        context.communicator = AbortedCommunicator(
            f"{context.units()[0].name} was aborted; call rebuild(mesh) on it first"
        )
        for group in context.groups():
            group.replace_communicator(context.communicator)


def rebuild(
    contexts: Sequence[Context[Unit]],
    mesh: DeviceMesh | Meshes | None,
    optimizers: Sequence[Optimizer],
    *,
    keep: bool,
) -> bool:
    """See `ShardedModule.rebuild`."""
    if not contexts:
        return True
    # Two roots may contain the same unit.
    owners = {unit: context for context in contexts for unit in context.units()}
    units = list(owners)
    for context in contexts:
        context.check_is_loaded()
        if not context.state.needs_repair:
            # Users may have frozen gathered parameters.
            weights.free_outdated(context.state)
    for unit in units:
        unit.sync()
    before = [group for unit in units for group in unit.groups]
    meshes = _checked_meshes(before, units[0], mesh)
    specs = {group: _spec_on(unit, group, meshes) for unit in units for group in unit.groups}
    _check(contexts, specs)
    new = {
        context: Context[Unit](context.groups()[0].device, context.options, context.observer)
        for context in contexts
    }
    made: Made = {
        group: list(_made(group, specs[group], new[owners[unit]]))
        for unit in units
        for group in unit.groups
    }
    versions = [context.state.weight_version for context in contexts]
    is_kept = _agree(specs, versions, holds_same_rows=keep and _holds_same_rows(made))
    # Nothing was changed until here.
    for context in contexts:
        reductions.abandon(context.state)
    _take_over(made, is_kept=is_kept)
    _move_states(optimizers, before, is_kept=is_kept)
    _replace_groups(units, made, is_kept=is_kept)
    for unit in units:
        there = meshes.get(unit.sharding.spec.mesh)
        if there is not None:
            unit.sharding = unit.sharding._replace(spec=unit.sharding.on(DataMesh(there)))
    for context, fresh in new.items():
        known = context.units()
        for unit in known:
            unit.context = fresh
        fresh.set_units(known)
        OPTIMIZER_WATCH.add(fresh)
    return is_kept


def _checked_meshes(
    groups: Iterable[ParameterGroup], root: Unit, mesh: DeviceMesh | Meshes | None
) -> Meshes:
    """Return the mesh that replaces each mesh of the parameters."""
    before = dict.fromkeys(group.spec.mesh for group in groups)
    if isinstance(mesh, Mapping):
        if missing := [each for each in before if each not in mesh]:
            raise ValueError(
                f"rebuild() of {root.name} was given no mesh in the place of {missing[0]}, over "
                "which parameters are sharded"
            )
        return {each: DataMesh.of(mesh[each], None).mesh for each in before}
    if len(before) > 1:
        raise ValueError(
            f"parameters of {root.name} are sharded over {len(before)} meshes, and rebuild() was "
            "given one; pass {mesh: new mesh, ...} with all of them"
        )
    return dict.fromkeys(before, DataMesh.of(mesh, None).mesh)


def _check(contexts: Iterable[Context[Unit]], specs: Mapping[ParameterGroup, GroupSpec]) -> None:
    for context in contexts:
        name = context.units()[0].name
        if context.state.has_graph:
            raise RuntimeError(
                f"a step of {name} was captured in a CUDA graph, which has its process groups; "
                "build the model again"
            )
    for group, spec in specs.items():
        of_tensors = (each.tensor for each in group.parameters.row_shards)
        if any(each is not None for each in (*of_tensors, *group.parameters.dtensors)):
            raise ValueError(
                f"parameters of {group.name} have a tensor-parallel split, whose mesh rebuild() "
                "cannot replace; build the model again"
            )
        if isinstance(group.format, AllGatherExtensionFormat):
            raise ValueError(
                f"weights of {group.name} are gathered by their fsdp_pre_all_gather, which "
                "rebuild() cannot bind again; build the model again"
            )
        if spec.mesh.device_type != group.spec.mesh.device_type:
            raise ValueError(
                f"mesh is of device type {spec.mesh.device_type!r}, and {group.name} is on "
                f"{group.spec.mesh.device_type!r}"
            )


def _spec_on(unit: Unit, group: ParameterGroup, meshes: Meshes) -> GroupSpec:
    """Return the properties of a parameter group on its new mesh."""
    old, given = group.spec, unit.sharding.spec
    # Axes of one rank shard main weights, too.
    is_sharded = old.placements[-1].main_weight is Placement.SHARD
    new = unit.sharding.on(DataMesh(meshes[old.mesh], is_sharded=is_sharded))
    is_mean = given.scale == 1.0 / given.mesh.size()
    scale = 1.0 / old.mesh.size() if is_mean else given.scale
    return dataclasses.replace(
        new,
        dtypes=old.dtypes,
        requires_grad=old.requires_grad,
        reduces=old.reduces,
        # A factor that was set since is no property of the mesh.
        scale=new.scale if old.scale == scale else old.scale,
    )


def _made(
    group: ParameterGroup, spec: GroupSpec, context: Context[Unit]
) -> Iterable[tuple[ParameterGroup, list[int]]]:
    """Yield new groups for the parameters of a group, each with their indices there."""
    sites: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for index, module, attribute in group.parameters.sites():
        sites.setdefault(index, []).append((module, attribute))
    slots, format_type = group.layout.slots, type(group.format)
    for _, indices, layout in flat_buffers(
        range(len(slots)),
        lambda index: None,
        lambda index: slots[index].shape,
        lambda key: format_type.smallest_itemsize(spec.dtypes),
        lambda key: spec.grid.num_slices,
        spec.granularity,
    ):
        owned = [
            OwnedParameter(
                group.names[index],
                group.unsharded_params[index],
                sites.get(index, []),
                # Replaced by `_take_over`.
                values=torch.zeros((), device=group.device).expand(slots[index].shape),
            )
            for index in indices
        ]
        made = ParameterGroup(
            group.name,
            owned,
            spec,
            format_type,
            layout,
            group.device,
            context.communicator,
            context.allocator,
        )
        yield made, indices


def _holds_same_rows(made: Made) -> bool:
    """Return whether this rank's shards have the same rows on the new meshes."""
    return all(
        group.main_weight.rows(index) == each.main_weight.rows(number)
        for group, replacements in made.items()
        for each, indices in replacements
        for number, index in enumerate(indices)
    )


def _agree(
    specs: Mapping[ParameterGroup, GroupSpec], versions: Sequence[int], *, holds_same_rows: bool
) -> bool:
    """Return whether all ranks keep their rows and are in the same step. Collective.

    Args:
        specs: Properties of each group on its new mesh.
        versions: Versions of the weights of each root.
        holds_same_rows: Whether this rank holds the same rows as before.
    """
    by_mesh: dict[DeviceMesh, list[int]] = {}
    for group, spec in specs.items():
        # Along each axis, a checksum of the main weights that are replicated along it.
        sums = by_mesh.setdefault(spec.mesh, [0] * spec.mesh.ndim)
        for axis in spec.replicated_axes:
            # Not of whole buffers, whose padding differs between meshes.
            sums[axis] += sum(checksum(local_of(param)) for param in group.sharded_params)
    for mesh, sums in by_mesh.items():
        for axis, total in enumerate(sums):
            # If nothing is sharded, a rank that joins holds the same rows, but other values.
            kept = total % (1 << 62)
            least, negated_most = _least(mesh, axis, [kept, -kept])
            holds_same_rows &= least == -negated_most
    # A rank may have finished a step in which another one failed.
    table = [int(holds_same_rows), *versions, *(-version for version in versions)]
    # A rank may belong to several meshes, and each mesh reduces the values of its own ranks.
    for mesh in (*by_mesh,) * len(by_mesh):
        for axis in range(mesh.ndim):
            table = _least(mesh, axis, table)
    is_kept, *bounds = table
    smallest, negated = bounds[: len(versions)], bounds[len(versions) :]
    return bool(is_kept) and smallest == [-largest for largest in negated]


def _least(mesh: DeviceMesh, axis: int, values: list[int]) -> list[int]:
    """Return the smallest values of the ranks along an axis. Collective."""
    if mesh.size(axis) == 1:
        return values
    least = torch.tensor(values, device=mesh.device_type)
    group = mesh.get_group(axis)
    try:
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    except RuntimeError as error:
        raise collective_error("rebuild", group, error) from error
    return least.tolist()


def _take_over(made: Made, *, is_kept: bool) -> None:
    """Move sharded parameters to the new groups, with or without their values."""
    gather_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
    for group, replacements in made.items():
        for each, indices in replacements:
            params = [group.sharded_params[index] for index in indices]
            with torch.no_grad():
                for view, param in zip(each.parameters.views, params, strict=True):
                    if is_kept:
                        view.copy_(local_of(param))
                    else:
                        mark_unset(view)
            each.parameters.take_over(params)
            each.grads.set_hook(*group.grads.hook)
            inner = each.axes[-1]
            if group.axes[-1].gather_group is not None and inner.size > 1:
                if inner.group not in gather_groups:
                    gather_groups[inner.group] = group_of_same_ranks(inner.group)
                each.set_gather_group(gather_groups[inner.group])


def _replace_groups(units: Iterable[Unit], made: Made, *, is_kept: bool) -> None:
    """Give the new groups to the units that own or hold those of before."""
    new = {group: [each for each, _ in replacements] for group, replacements in made.items()}
    for unit in units:
        unit.own([each for group in unit.groups for each in new[group]])
    for unit in units:
        unit.hold([each for group in unit.tied_groups for each in new[group]])
        for each in unit.groups:
            unit.watch_gradients(each)
        _note_unset(unit, is_kept=is_kept)


def _note_unset(unit: Unit, *, is_kept: bool) -> None:
    """Record the parameters without values; the first use of the unit checks them."""
    unset = dict(unit.unset)
    for group in unit.groups:
        for index, name in enumerate(group.names):
            if name in unset or not is_kept:
                unset[name] = functools.partial(group.main_weight.view, index)
    unit.unset = list(unset.items())


def _move_states(
    optimizers: Iterable[Optimizer], groups: Iterable[ParameterGroup], *, is_kept: bool
) -> None:
    """Move states of optimizers to the new mesh of their parameters, or drop them."""
    own = {param for group in groups for param in group.sharded_params}
    for optimizer in optimizers:
        for param in [param for param in optimizer.state if param in own]:
            if not is_kept:
                del optimizer.state[param]
                continue
            move = functools.partial(_moved, param=param)
            optimizer.state[param] = tree_map(move, optimizer.state[param])


def _moved(value: Any, param: Any) -> Any:
    if isinstance(value, ShardedRows):
        return rows_like(rows_of(value), param)
    return replicated(plain_of(value), param.device_mesh) if isinstance(value, DTensor) else value
