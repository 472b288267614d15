"""Process groups that only their own ranks create, and separate process groups for gathers.

An NCCL communicator runs one collective at a time, on any stream, and pairs collectives of
different ranks by order. With a separate process group, gathers run and pair independently of
reductions.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

# Per default process group: a rank that joins a restarted program has made none before.
_NUM_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def new_local_group(
    ranks: Sequence[int], purpose: str, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a process group. Collective over its ranks only.

    `new_group(use_local_synchronization=True)` names a group after its ranks and the number of
    groups of the process. Ranks find each other by this name, so ranks that have made different
    numbers of groups wait forever. Here, the name depends only on values that the group's ranks
    share.

    If the default group is bound to a device (`init_process_group(device_id=...)`), torch splits
    NCCL's communicator of all ranks, which requires all ranks, also those outside the group. Here,
    the default group is unbound temporarily, so that NCCL creates a new communicator at the
    first collective.

    Args:
        ranks: Global ranks, including this one, in the order of the group.
        purpose: Purpose of the group. All ranks must make groups of the same ranks and purpose in
            the same order.
        backend: Default: that of the default group.
    """
    core: Any = distributed_c10d
    world: Any = dist.group.WORLD
    default, store = core._world.pg_map[world]
    backend = default if backend is None else backend
    label = f"{purpose} of {'-'.join(map(str, ranks))}"
    num_made = _NUM_MADE.setdefault(world, Counter())
    name = f"megatron_fsdp_v2: {label}, number {num_made[label]}"
    num_made[label] += 1
    device, world.bound_device_id = world.bound_device_id, None
    try:
        group, _ = core._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            dist.Backend(backend),
            store,
            name,
            timeout=core._get_default_timeout(dist.Backend(backend)),
            group_desc=purpose,
        )
    finally:
        world.bound_device_id = device
    core._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    made: dist.ProcessGroup = group
    return made


def default_store() -> Any:
    """Return the key-value store of the default process group, which all ranks share."""
    core: Any = distributed_c10d
    return core._world.pg_map[dist.group.WORLD][1]


def ranks_of(group: object, argument: str) -> list[int]:
    """Return the global ranks of a process group that a caller passed.

    Args:
        group: The process group.
        argument: Name of the argument, for the error.

    Raises:
        ValueError: `group` is not a process group of this rank.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"{argument} must be a process group that this rank is part of, got "
            f"{type(group).__name__}; make it with torch.distributed.new_group"
        )
    return dist.get_process_group_ranks(group)


def check_gather_group(group: object, mesh: DeviceMesh) -> None:
    """Check that a process group can run the gathers along the innermost axis of a mesh.

    Args:
        group: Value of `gather_group`; None for the mesh's own group.
        mesh: The data-parallel mesh.

    Raises:
        ValueError: `group` is not a process group of this rank, or has other ranks or another order
            of ranks than the axis.
    """
    if group is None:
        return
    found = ranks_of(group, "gather_group")
    needed = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    if found != needed:
        raise ValueError(
            f"gather_group has the ranks {found}, and the axis of the mesh that weights are "
            f"sharded along (the last one) {needed}; give a group of these ranks in this order"
        )


def group_of_same_ranks(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make another process group with the ranks of a group. Collective over these ranks."""
    return new_local_group(dist.get_process_group_ranks(group), "gathers")
