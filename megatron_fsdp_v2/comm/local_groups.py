"""Process groups that only their own ranks make, whatever groups each of them has made before."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["new_local_group"]

_num_made: Counter[str] = Counter()


def new_local_group(ranks: Sequence[int], purpose: str) -> dist.ProcessGroup:
    """Make a process group of some ranks. Collective over those.

    `new_group(use_local_synchronization=True)` names a group after its ranks and how many groups
    the process has. Ranks find one another by that name: where they have made different numbers
    of groups, they wait for ever. Here the name is of what its own ranks have in common.

    Under a default group that is bound to a device (`init_process_group(device_id=...)`), torch
    would split NCCL's communicator of all ranks, in which every rank has to take part, also those
    that are not in the group. Here NCCL makes a communicator of its own at the first collective.

    Args:
        ranks: Global ranks, of which this one is one, in the order of the group.
        purpose: What it is for. Groups of the same ranks and purpose are made in the same order.
    """
    core: Any = distributed_c10d
    world: Any = dist.group.WORLD
    backend, store = core._world.pg_map[world]
    label = f"{purpose} of {'-'.join(map(str, ranks))}"
    name = f"megatron_fsdp_v2: {label}, number {_num_made[label]}"
    _num_made[label] += 1
    with _unbound(world):
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
    core._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    made: dist.ProcessGroup = group
    return made


@contextlib.contextmanager
def _unbound(world: Any) -> Iterator[None]:
    """Have torch take the default group for one that is bound to no device."""
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device
