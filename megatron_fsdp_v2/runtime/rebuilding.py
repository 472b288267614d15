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


def abort(context: Context[Unit]) -> None:
    """See `ShardedModule.abort`."""
    device = context.device
    if device is None or isinstance(context.communicator, AbortedCommunicator):
        return
    groups = context.groups()
    axes = [axis for group in groups for axis in group.axes if axis.size > 1]
    used = dict.fromkeys(each for axis in axes for each in (axis.group, axis.gather_group))
    abort_process_groups([each for each in used if each is not None], device)
    reductions.abandon(context.state)
    wait_for_all_streams(device)
    if isinstance(context.allocator, TracePoolAllocator):
        context.allocator.release()
    context.communicator = AbortedCommunicator(
        f"{context.units()[0].name} was aborted; call rebuild(mesh) on it first"
    )
    for group in groups:
        group.replace_communicator(context.communicator)


def rebuild(
    context: Context[Unit],
    mesh: DeviceMesh | None,
    optimizers: Sequence[Optimizer],
    *,
    keep: bool,
) -> bool:
    """See `ShardedModule.rebuild`."""
    units, before = context.units(), context.groups()
    if not before:
        return True
    mesh = DataMesh.of(mesh, None).mesh
    context.check_is_loaded()
    if not context.state.needs_repair:
        # Users may have frozen gathered parameters.
        weights.free_outdated(context.state)
    for unit in units:
        unit.sync()
    specs = {group: _spec_on(unit, group, mesh) for unit in units for group in unit.groups}
    _check(context, specs)
    new: Context[Unit] = Context(before[0].device, context.options, context.observer)
    members = {group: list(_made(group, specs[group], new)) for group in before}
    made = {group: [each for each, _ in found] for group, found in members.items()}
    holds_same_rows = keep and all(
        group.main_weight.rows(index) == each.main_weight.rows(number)
        for group, found in members.items()
        for each, indices in found
        for number, index in enumerate(indices)
    )
    copies = _checksums(specs, mesh.ndim)
    is_kept = _agree(mesh, context.state.weight_version, copies, holds_same_rows=holds_same_rows)
    # Nothing was changed until here.
    reductions.abandon(context.state)
    gathers = None
    for group, found in members.items():
        for each, indices in found:
            _take_over(each, group, indices, is_kept=is_kept)
            inner = each.axes[-1]
            if group.axes[-1].gather_group is not None and inner.size > 1:
                gathers = gathers or group_of_same_ranks(inner.group)
                each.set_gather_group(gathers)
    _move_states(optimizers, before, is_kept=is_kept)
    for unit in units:
        unit.own([each for group in unit.groups for each in made[group]])
    for unit in units:
        unit.hold([each for group in unit.tied_groups for each in made[group]])
        for each in unit.groups:
            unit.watch_gradients(each)
        _note_unset(unit, is_kept=is_kept)
        unit.sharding = unit.sharding._replace(spec=unit.sharding.on(DataMesh(mesh)))
        unit.context = new
    new.set_units(units)
    OPTIMIZER_WATCH.add(new)
    return is_kept


def _check(context: Context[Unit], specs: Mapping[ParameterGroup, GroupSpec]) -> None:
    name = context.units()[0].name
    if context.state.has_graph:
        raise RuntimeError(
            f"a step of {name} was captured in a CUDA graph, which has its process groups; build "
            "the model again"
        )
    meshes = {group.spec.mesh for group in specs}
    if len(meshes) > 1:
        raise ValueError(
            f"parameters of {name} are sharded over {len(meshes)} meshes, and rebuild() replaces "
            "one; build the model again"
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
                f"mesh is of device type {spec.mesh.device_type!r}, and {name} is on "
                f"{group.spec.mesh.device_type!r}"
            )


def _spec_on(unit: Unit, group: ParameterGroup, mesh: DeviceMesh) -> GroupSpec:
    """Return the properties of a group on another mesh."""
    old, given = group.spec, unit.sharding.spec
    new = unit.sharding.on(DataMesh(mesh, is_sharded=old.placements == given.placements))
    return dataclasses.replace(
        new,
        dtypes=old.dtypes,
        requires_grad=old.requires_grad,
        reduces=old.reduces,
        # A factor that was set since is no property of the mesh.
        scale=new.scale if old.scale == given.scale else old.scale,
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


def _checksums(specs: Mapping[ParameterGroup, GroupSpec], num_axes: int) -> list[int]:
    """Return, for each axis of the new mesh, a checksum of the main weights replicated along it."""
    sums = [0] * num_axes
    for group, spec in specs.items():
        for axis in spec.replicated_axes:
            # Not of whole buffers, whose padding differs between meshes.
            sums[axis] += sum(checksum(local_of(param)) for param in group.sharded_params)
    return [total % (1 << 62) for total in sums]


def _agree(
    mesh: DeviceMesh, weight_version: int, copies: Sequence[int], *, holds_same_rows: bool
) -> bool:
    """Return whether all ranks hold the rows of before, of the same step. Collective."""
    for axis, total in enumerate(copies):
        # If nothing is sharded, a rank that joins holds the same rows, but other values.
        smallest, negated_largest = _least(mesh, axis, [total, -total])
        holds_same_rows &= smallest == -negated_largest
    # A rank may have finished a step in which another one failed.
    table = [int(holds_same_rows), weight_version, -weight_version]
    for axis in range(mesh.ndim):
        table = _least(mesh, axis, table)
    all_hold, smallest, negated_largest = table
    return bool(all_hold) and smallest == -negated_largest


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


def _take_over(
    made: ParameterGroup, group: ParameterGroup, indices: Sequence[int], *, is_kept: bool
) -> None:
    """Move sharded parameters of a group to another group, with or without their values."""
    params = [group.sharded_params[index] for index in indices]
    with torch.no_grad():
        for view, param in zip(made.parameters.views, params, strict=True):
            if is_kept:
                view.copy_(local_of(param))
            else:
                mark_unset(view)
    made.parameters.take_over(params)
    made.grads.set_hook(*group.grads.hook)


def _note_unset(unit: Unit, *, is_kept: bool) -> None:
    """Note which parameters have no values, for the check before the first use."""
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
