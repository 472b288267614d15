"""Megatron's process groups as device meshes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2.comm.groups import group_of_same_ranks


@dataclass(frozen=True, slots=True)
class Meshes:
    """The meshes of dense or of expert parameters.

    Attributes:
        data: Data-parallel axes: `(dp,)`, or `(dp_outer, dp)` for hybrid sharding.
        data_and_tensor: The data-parallel axes and the tensor-parallel axis; None if the size of
            the latter is 1.
    """

    data: DeviceMesh
    data_and_tensor: DeviceMesh | None


def dense_meshes(groups: Any, device_type: str, *, is_hybrid: bool) -> Meshes:
    """Return the meshes of dense parameters, which all data-parallel ranks share.

    Context-parallel ranks hold the same parameters and process different tokens. The reduction of
    gradients treats them as data-parallel ranks.

    Args:
        groups: A `ProcessGroupCollection`.
        device_type: Device type of the parameters.
        is_hybrid: Whether data parallelism has an outer axis, between optimizer instances.

    Raises:
        ValueError: A group is missing.
    """
    names = ("inter_dist_opt", "intra_dp_cp") if is_hybrid else ("dp_cp",)
    return _meshes(groups, names, "tp", device_type)


def expert_meshes(groups: Any, device_type: str, *, is_hybrid: bool) -> Meshes:
    """Return the meshes of expert parameters, which differ between expert-parallel ranks.

    Raises:
        ValueError: A group is missing.
    """
    names = ("inter_dist_opt", "intra_expt_dp") if is_hybrid else ("expt_dp",)
    return _meshes(groups, names, "expt_tp", device_type)


def gather_groups(
    groups: Any, dense: Meshes, expert: Meshes | None, *, creates: bool
) -> dict[DeviceMesh, Any]:
    """Return the dedicated process group for all-gathers of weights on each mesh. Collective.

    A collection may contain groups of all data-parallel ranks for this purpose (Megatron's
    `create_all_gather_groups` creates them). The function creates a group and stores it in the
    collection if the collection has none, or if weights are sharded over fewer ranks because there
    are several optimizer instances.

    Args:
        groups: A `ProcessGroupCollection`.
        dense: Meshes of dense parameters.
        expert: Meshes of expert parameters, if the model has experts.
        creates: Whether to create groups if the collection has none.
    """
    if not creates and getattr(groups, "dp_cp_ag", None) is None:
        return {}
    found = {}
    for meshes, name in ((dense, "dp_cp_ag"), (expert, "expt_dp_ag")):
        if meshes is None or meshes.data in found:
            continue
        group, inner = getattr(groups, name, None), meshes.data.get_group(meshes.data.ndim - 1)
        ranks = dist.get_process_group_ranks(inner)
        if group is None or dist.get_process_group_ranks(group) != ranks:
            group = group_of_same_ranks(inner)
            # Stored for the other chunks of this rank, which use the same group.
            setattr(groups, name, group)
        found[meshes.data] = group
    return found


def _meshes(groups: Any, data_names: Sequence[str], tensor_name: str, device_type: str) -> Meshes:
    data = [getattr(groups, name, None) for name in data_names]
    missing = [name for name, group in zip(data_names, data, strict=True) if group is None]
    if missing:
        raise ValueError(
            f"pg_collection has no group {' and no group '.join(missing)}, over which parameters "
            "are sharded; set it, or omit pg_collection to use Megatron's own groups"
        )
    names, tensor = ("dp_outer", "dp")[-len(data) :], getattr(groups, tensor_name)
    # torch treats None as the group of all ranks; here None means no tensor parallelism.
    if tensor is None or dist.get_world_size(tensor) == 1:
        return Meshes(_mesh(data, names, device_type), None)
    data_and_tensor = _mesh([*data, tensor], (*names, "tp"), device_type)
    return Meshes(data_and_tensor[names], data_and_tensor)


def _mesh(groups: Sequence[Any], names: tuple[str, ...], device_type: str) -> DeviceMesh:
    """Return a mesh whose axes are existing process groups of this rank, outermost first.

    A rank knows only its own groups. Megatron numbers ranks regularly, so that the offsets between
    members of a group are the same for all groups of an axis.
    """
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    me = dist.get_rank()
    steps = [[rank - me for rank in dist.get_process_group_ranks(group)] for group in groups]
    ranks = [me + sum(step) for step in itertools.product(*steps)]
    shape = [len(step) for step in steps]
    mesh = torch.tensor(ranks, dtype=torch.int).view(shape)
    return DeviceMesh.from_group(list(groups), device_type, mesh=mesh, mesh_dim_names=names)
