"""The ranks that save or load a model together, those of its meshes, and their process groups.

Models on disjoint ranks of a job (the actor and the critic of a trainer) are saved and loaded
independently, also at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.errors import everyones
from megatron_fsdp_v2.comm.groups import default_store, new_local_group, ranks_of
from megatron_fsdp_v2.comm.rank_checks import checksum
from megatron_fsdp_v2.runtime.module import named_units

_groups: WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], Any]] = WeakKeyDictionary()
"""Process groups by purpose and ranks, for each default process group."""


def group_of(model: nn.Module, process_group: Any = None) -> Any:
    """Return the process group of the ranks of a model's meshes. Collective over these ranks.

    Args:
        model: Sharded, or not at all.
        process_group: A process group to use instead; it contains these ranks.

    Returns:
        None for the default group: if the meshes have all ranks, or the model is not sharded.

    Raises:
        ValueError: `process_group` is not a process group of this rank, or lacks ranks.
    """
    if not dist.is_initialized():
        return None
    groups = [group for _, unit in named_units(model) for group in unit.held_groups]
    # Parameters that are registered now may be the gathered ones.
    params = [*model.parameters(), *(param for group in groups for param in group.sharded_params)]
    meshes = {param.device_mesh for param in params if isinstance(param, DTensor)}
    ranks = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    if process_group is not None:
        _check_group(process_group, ranks)
        return process_group
    if len(ranks) in (0, dist.get_world_size()):
        return None
    return _group("checkpoints", ranks)


def check_names(model: nn.Module, group: Any) -> None:
    """Check that parameters of one name on different ranks have the same values. Collective.

    Args:
        model: Sharded, or not at all.
        group: Its ranks; None for all.

    Raises:
        ValueError: A parameter is on a part of the ranks of another mesh (experts), and ranks of
            another part have other values of that name. Raised on every rank.
    """
    groups = [group for _, unit in named_units(model) for group in unit.groups]
    ranks = {g: g.spec.mesh.mesh.flatten().tolist() for g in groups}
    most = {*max(ranks.values(), key=len, default=[])}
    # By name and place in the mesh: ranks at one place hold the same rows.
    mine = {
        (f"{name} of {g.name}", ranks[g].index(dist.get_rank())): checksum(g.main_weight.view(i))
        for g in groups
        if {*ranks[g]} < most
        for i, (name, shards) in enumerate(zip(g.names, g.parameters.row_shards, strict=True))
        if shards.tensor is None or shards.tensor.mesh is None
    }
    found: dict[tuple[str, int], int] = {}
    for theirs in everyones(mine, group):
        for place, value in theirs.items():
            if found.setdefault(place, value) != value:
                raise ValueError(
                    f"{place[0]} is on a part of the model's ranks, and other ranks have another "
                    "parameter of that name, where a checkpoint has one value of a name; make it a "
                    "DTensor over the expert-parallel axis, or give it names that differ"
                )


def background_group(group: Any) -> Any:
    """Return a process group of the same ranks for asynchronous saves. Collective over its ranks.

    Args:
        group: A process group; None is the default group.
    """
    return _group("asynchronous checkpoints", dist.get_process_group_ranks(group))


def forget_group(group: Any) -> None:
    """Drop a broken process group, so that the next save makes another one."""
    for known in _groups.values():
        for key in [key for key, value in known.items() if value is group]:
            del known[key]


def check_same_path(path: str | os.PathLike[str], group: Any) -> None:
    """Check that all ranks of a process group name one path. Collective over them.

    Raises:
        ValueError: Ranks name different paths. Raised on every rank.
    """
    paths = everyones(os.fspath(path), group)
    other = next((index for index, name in enumerate(paths) if name != paths[0]), None)
    if other is not None:
        ranks = dist.get_process_group_ranks(group)
        raise ValueError(
            f"ranks name different paths for one model: rank {ranks[0]} {paths[0]}, rank "
            f"{ranks[other]} {paths[other]}; name the same path on all {len(ranks)} ranks"
        )


def reserve_path(path: str | os.PathLike[str], group: Any) -> None:
    """Reserve a path for the ranks of a process group, on the first of them.

    Otherwise parts of a job that save to one path would replace each other's checkpoints.

    Raises:
        ValueError: Other ranks of this job save to it.
    """
    if group is None or dist.get_world_size(group) == dist.get_world_size():
        return
    ranks = dist.get_process_group_ranks(group)
    key, first = f"megatron_fsdp_v2: checkpoint {os.fspath(path)}", str(ranks[0])
    owner = default_store().compare_set(key, "", first).decode()
    if owner != first:
        raise ValueError(
            f"{path} is where other ranks of this job save another model: the first of them is "
            f"rank {owner}, and these are ranks {listed(map(str, ranks), _MOST_RANKS)}; name "
            "another path, or give process_group= with all ranks whose models belong in one "
            "checkpoint"
        )


_MOST_RANKS = 8


def _group(purpose: str, ranks: Sequence[int]) -> Any:
    """Return the process group of some ranks, with gloo. Collective at the first call."""
    known = _groups.setdefault(dist.group.WORLD, {})
    key = purpose, tuple(ranks)
    if key not in known:
        known[key] = new_local_group(ranks, purpose, backend="gloo")
    return known[key]


def _check_group(group: Any, needed: Sequence[int]) -> None:
    ranks = ranks_of(group, "process_group")
    lacking = [str(rank) for rank in needed if rank not in set(ranks)]
    if lacking:
        raise ValueError(
            f"process_group has the ranks {listed(map(str, ranks), _MOST_RANKS)}, and the model is "
            f"sharded over ranks {listed(lacking, _MOST_RANKS)} as well; give a group with all of "
            "them, or none"
        )
