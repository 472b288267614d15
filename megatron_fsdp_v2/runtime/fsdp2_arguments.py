"""What arguments of PyTorch's FSDP2 mean here, where that is not the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from megatron_fsdp_v2.params.buffer import Offload
from megatron_fsdp_v2.params.formats import format_of

if TYPE_CHECKING:
    from megatron_fsdp_v2.params.registration import OwnedParameter

__all__ = [
    "check_can_offload",
    "check_mesh_dims",
    "check_shard_placement",
    "default_mesh",
    "offload_of",
    "reshards_after_forward",
]

# By process group: it may be ended, and another one started.
_MESHES: weakref.WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = weakref.WeakKeyDictionary()


def default_mesh() -> DeviceMesh:
    """One axis over all ranks, of the accelerator's device type if there is one, else the CPU's.

    Starts the default process group from the environment if there is none yet, as FSDP2 does.
    """
    if not dist.is_initialized():
        dist.init_process_group()
    group = dist.group.WORLD
    assert group is not None
    mesh = _MESHES.get(group)
    if mesh is None:
        device = torch.accelerator.current_accelerator(check_available=True)
        device_type = "cpu" if device is None else device.type
        mesh = _MESHES[group] = init_device_mesh(device_type, (dist.get_world_size(),))
    return mesh


def reshards_after_forward(given: object, mesh: DeviceMesh) -> bool:
    """Whether gathered weights are dropped between forward and backward.

    Args:
        given: A bool; None for the default; or the number of ranks that FSDP2 would reshard to,
            where that is one of them or all.
        mesh: The data-parallel mesh.

    Raises:
        ValueError: It is something else.
    """
    if given is None:
        return True
    if isinstance(given, bool):
        return given
    shards = mesh.size(mesh.ndim - 1)
    if isinstance(given, int) and given in (1, shards):
        return given != 1
    raise ValueError(
        f"reshard_after_forward must be True, False or None, got {given!r}; weights are kept whole "
        f"(1) or dropped to this rank's of {shards} shards ({shards}), and not to shards over "
        "fewer ranks; keep them over fewer by making those the inner axis of a 2-D mesh"
    )


def offload_of(policy: object) -> Offload | None:
    """What a policy of FSDP2's asks to be offloaded; None for nothing.

    Raises:
        ValueError: It is none of torch's policies.
    """
    if policy is None or type(policy) is OffloadPolicy:
        return None
    if isinstance(policy, CPUOffloadPolicy):
        return Offload(pin_memory=bool(policy.pin_memory))
    raise ValueError(
        f"offload_policy={policy!r} cannot be honored; give torch.distributed.fsdp's "
        "CPUOffloadPolicy() to have weights, gradients and optimizer states in host memory, or "
        "OffloadPolicy() or None to have them on the device"
    )


def check_can_offload(owned: Sequence[OwnedParameter]) -> None:
    """See that weights can be made of main weights in host memory.

    Raises:
        ValueError: A parameter is of a format whose ranks talk about main weights.
    """
    for parameter in owned:
        found = format_of(parameter.param)
        if found is not None and found.communicates:
            raise ValueError(
                f"parameter {parameter.name} is a {type(parameter.param).__name__}, whose scales "
                "ranks find together from main weights on the device; leave offload_policy out, or "
                "give this module a unit of its own without it"
            )


def check_mesh_dims(dims: object) -> None:
    """Refuse to look for the data-parallel axes in a mesh that has others as well.

    Raises:
        ValueError: It is not None.
    """
    if dims is not None:
        raise ValueError(
            f"dp_mesh_dims={dims!r} cannot be honored: give the data-parallel axes as the mesh, "
            "such as mesh=mesh['dp'] or mesh['outer', 'dp'] of a mesh with more axes"
        )


def check_shard_placement(
    choose: Callable[[torch.nn.Parameter], Any] | None, owned: Sequence[OwnedParameter]
) -> None:
    """See that a `shard_placement_fn` asks for what is done here: rows are sharded.

    Args:
        choose: The function; None for none.
        owned: What it is asked about.

    Raises:
        ValueError: It chooses another placement for one of them.
    """
    for parameter in owned if choose is not None else ():
        assert choose is not None
        placement = choose(parameter.param)
        if placement is not None and placement != Shard(0):
            raise ValueError(
                f"shard_placement_fn returns {placement} for parameter {parameter.name}; "
                "parameters are sharded by rows, Shard(0), which need not be even, over the "
                "mesh of a unit. Return None; say with shard_granularity what must not be cut, and "
                "make a module whose parameters have another mesh a unit with that mesh"
            )
