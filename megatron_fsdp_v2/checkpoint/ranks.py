"""The ranks that save or load a model together, those of its meshes, and their process groups.

Models on disjoint ranks of a job (the actor and the critic of a trainer) are saved and loaded
independently, also at the same time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.checkpoint.entries import parameter_names
from megatron_fsdp_v2.checkpoint.errors import everyones
from megatron_fsdp_v2.comm.groups import default_store, new_local_group, ranks_of
from megatron_fsdp_v2.comm.rank_checks import checksum
from megatron_fsdp_v2.runtime.module import named_units, showing_sharded

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
    ranks = _ranks_of_meshes(model)
    if process_group is not None:
        _check_group(process_group, ranks)
        return process_group
    if len(ranks) in (0, dist.get_world_size()):
        return None
    return _group("checkpoints", ranks)


def check_names(model: nn.Module, group: Any, *, has_stages: bool = False) -> None:
    """Check that different parameters do not have one name. Collective.

    On a part of the ranks of another mesh, parameters are different ones (experts).

    Args:
        model: Sharded, or not at all.
        group: Its ranks; None for all.
        has_stages: Whether ranks have different models, whose parameters of one name are copies.

    Raises:
        ValueError: Ranks have different parameters of one name. Raised on every rank.
    """
    units = [unit for _, unit in named_units(model)]
    meshes = {g: g.spec.mesh.mesh.flatten().tolist() for unit in units for g in unit.groups}
    most = {*max(meshes.values(), key=len, default=[])}
    with showing_sharded(model):
        names, own = parameter_names(model), _ranks_of_meshes(model)
    # By name and place in the mesh: ranks that have the parameter, and its values if compared.
    mine: dict[tuple[str, int], tuple[list[int], Any]] = {}
    for g, ranks in meshes.items():
        for i, param in enumerate(g.sharded_params):
            tensor = g.parameters.row_shards[i].tensor
            if param not in names or (tensor is not None and tensor.mesh is not None):
                continue
            if {*ranks} < most:
                mine[names[param], 0] = ranks, ranks
            elif has_stages:
                place = ranks.index(dist.get_rank())
                mine[names[param], place] = own, checksum(g.main_weight.view(i))
    found: dict[tuple[str, int], tuple[list[int], Any]] = {}
    for theirs in everyones(mine, group):
        for key, (ranks, values) in theirs.items():
            others, other_values = found.setdefault(key, (ranks, values))
            if others != ranks and other_values != values:
                raise ValueError(
                    f"ranks {others[0]} and {ranks[0]} have different parameters named {key[0]}; "
                    "make it a DTensor over the axis along which it differs (experts), or rename "
                    "it (stages); if it is the same, shard it over a mesh that has both ranks"
                )


def background_group(group: Any) -> Any:
    """Return a process group of the same ranks for asynchronous saves. Collective over its ranks.

    Args:
        group: A process group; None is the default group.
    """
    return _group("asynchronous checkpoints", dist.get_process_group_ranks(group))


def drop_group(group: Any) -> None:
    """Destroy a broken process group that was made for saves; the next save makes another one.

    Ranks that wait in it for this rank get an error. It is not collective.
    """
    for known in _groups.values():
        for key in [key for key, value in known.items() if value is group]:
            del known[key]
            # It is already destroyed if the default process group is.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)


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


def _ranks_of_meshes(model: nn.Module) -> list[int]:
    groups = [group for _, unit in named_units(model) for group in unit.held_groups]
    # Parameters that are registered now may be the gathered ones.
    params = [*model.parameters(), *(param for group in groups for param in group.sharded_params)]
    meshes = {param.device_mesh for param in params if isinstance(param, DTensor)}
    return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})


def _check_group(group: Any, needed: Sequence[int]) -> None:
    ranks = ranks_of(group, "process_group")
    lacking = [str(rank) for rank in needed if rank not in set(ranks)]
    if lacking:
        raise ValueError(
            f"process_group has the ranks {listed(map(str, ranks), _MOST_RANKS)}, and the model is "
            f"sharded over ranks {listed(lacking, _MOST_RANKS)} as well; give a group with all of "
            "them, or none"
        )
