"""A second process group of the same ranks, so that gathers need not queue behind reductions.

A communicator of NCCL runs one collective at a time, whatever streams they are on. Collectives of
one kind pair by order among ranks; gathers in a group of their own pair apart from reductions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_fsdp_v2.comm.local_groups import new_local_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["check_gather_group", "group_of_same_ranks"]


def check_gather_group(group: object, mesh: DeviceMesh) -> None:
    """See that gathers along the innermost axis of a mesh can be made in a group.

    Args:
        group: What was given for it; None for the mesh's own.
        mesh: The data-parallel mesh.

    Raises:
        ValueError: It is no process group of this rank, or one of other ranks or another order.
    """
    if group is None:
        return
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "gather_group must be a process group that this rank is part of, got "
            f"{type(group).__name__}; make it with torch.distributed.new_group"
        )
    found = dist.get_process_group_ranks(group)
    needed = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    if found != needed:
        raise ValueError(
            f"gather_group has the ranks {found}, and the axis of the mesh that weights are "
            f"sharded along (the last one) {needed}; give a group of those, in that order"
        )


def group_of_same_ranks(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make another process group of the ranks of one. Collective over those ranks."""
    return new_local_group(dist.get_process_group_ranks(group), "gathers")
